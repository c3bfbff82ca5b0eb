"""The texts of the cities experiment: sentences that stop before a city or name it.

Texts that nearly repeat one another are one group, wherever they stand.
"""

from dataclasses import dataclass

import numpy as np

import hiddenscope as hs
from hiddenscope.texts import Labelled
from hiddenscope.texts.groups import near_duplicates

DATA = {"incomplete": "cities-incomplete", "complete": "cities-complete"}
CITIES = ("Toronto", "Montreal")

# Part 3. Each landmark is a group: a probe is tested on landmarks it was not fitted to.
TORONTO = """
CN Tower
Royal Ontario Museum
Casa Loma castle
Hockey Hall of Fame
Rogers Centre
Distillery District
Yonge Street subway
Bay Street exchange
Pearson Airport
Queen's Park legislature
Kensington Market
Ryerson University campus
Maple Leafs arena
Scarborough Bluffs
"""
MONTREAL = """
Mount Royal cross
Notre-Dame Basilica
Saint Joseph's Oratory
Bell Centre
Olympic Stadium of 1976
Old Port
Saint Catherine Street shops
Expo 67 Biosphere
Trudeau Airport
McGill University campus
Jean-Talon Market
Concordia University campus
Canadiens arena
Lachine Canal
"""
LANDMARKS = {
    "Toronto": TORONTO.strip().splitlines(),
    "Montreal": MONTREAL.strip().splitlines(),
}
LEADS = (
    "The {x} is in the Canadian city of",
    "Tourists who want to see the {x} travel to",
)

# Part 4. Each topic has three wordings, and a fact about either city.
TOPICS = {
    ("Pearson", "Trudeau"): (
        "Most flights to {city} land at {x}.",
        "{x} is the airport that serves {city}.",
        "Travellers who arrive by air in {city} pass through {x}.",
    ),
    ("the Maple Leafs", "the Canadiens"): (
        "Hockey fans in {city} cheer for {x}.",
        "{x} play their home games in {city}.",
        "The ice hockey team of {city} is called {x}.",
    ),
    ("Ontario", "Quebec"): (
        "{city} lies in the province of {x}.",
        "No other city of {x} has as many people as {city}.",
        "Drive through {x} and you will come to {city}, its biggest town.",
    ),
    ("Lake Ontario", "the Saint Lawrence River"): (
        "{city} was built on the shore of {x}.",
        "Ships on {x} sail past {city}.",
        "The towers of {city} look out over {x}.",
    ),
    ("York University", "McGill University"): (
        "Students at {x} live in {city}.",
        "{city} is the home of {x}.",
        "To study at {x} you have to move to {city}.",
    ),
    ("the CN Tower", "Mount Royal"): (
        "{x} rises above {city}.",
        "Visitors can see {x} from anywhere in {city}.",
        "The skyline of {city} is dominated by {x}.",
    ),
    ("York", "Ville-Marie"): (
        "{city} was once called {x}.",
        "The settlers named their town {x}; today it is {city}.",
        "Before it became {city}, the place was known as {x}.",
    ),
    ("films", "jazz"): (
        "Every year {city} holds a festival of {x}.",
        "Lovers of {x} travel to the festival in {city}.",
        "For {x} there is no better week in {city} than that of the festival.",
    ),
    ("Drake", "Leonard Cohen"): (
        "{x} grew up in {city}.",
        "The childhood home of {x} was in {city}.",
        "As a boy the musician {x} lived in {city}.",
    ),
    ("streetcars", "rubber-tyred metro trains"): (
        "People in {city} ride to work on {x}.",
        "{x} carry the commuters of {city}.",
        "Public transport in {city} relies on {x}.",
    ),
    ("Scarborough", "Verdun"): (
        "{x} is a district of {city}.",
        "The borough of {x} was merged into {city}.",
        "Since the merger {city} includes {x}.",
    ),
    ("the Royal Ontario Museum", "the Notre-Dame Basilica"): (
        "Tourists in {city} visit {x}.",
        "{x} stands in the centre of {city}.",
        "A sight of {city} that nobody should miss is {x}.",
    ),
}


def shipped(few: int | None) -> dict[str, Labelled]:
    """Return the shipped sentences, or a few of each city.

    No sentence of one kind is a pair of one of the other.
    """
    data = {}
    for kind, source in DATA.items():
        texts, labels = few_of_each(hs.read(source), few)
        groups = [f"{kind} {group}" for group in repeats(texts)]
        data[kind] = hs.read((texts, labels), group=groups)
    return data


def paired(few: int | None) -> dict[str, Labelled]:
    """Return the incomplete sentences, and the same with their city and a full stop."""
    texts, labels = few_of_each(hs.read(DATA["incomplete"]), few)
    groups = repeats(texts)
    pairs = zip(texts, labels, strict=True)
    completed = [f"{text} {city}." for text, city in pairs]
    return {
        "incomplete": hs.read((texts, labels), group=groups),
        "completed": hs.read((completed, labels), group=groups),
    }


def few_of_each(data: Labelled, few: int | None) -> tuple[list[str], list[str]]:
    """Return some texts of each city with their labels, or all of them."""
    texts, labels = columns(data)
    # The sentences of one city stand before those of the other.
    half = len(texts) // 2
    some_texts = texts[:half][:few] + texts[half:][:few]
    some_labels = labels[:half][:few] + labels[half:][:few]
    return some_texts, some_labels


def repeats(texts: list[str]) -> list[str]:
    """Name the group of each text: texts that nearly repeat one another share one."""
    groups = list(texts)
    while (alike := near_duplicates(texts, groups)) is not None:
        first, second = (groups[texts.index(text)] for text in alike.example)
        groups = [first if group == second else group for group in groups]
    return groups


def columns(data: Labelled) -> tuple[list[str], list[str]]:
    """Return the texts and the labels."""
    return list(data.texts), list(data.labels)


def landmarks(few: int | None) -> Labelled:
    """Return sentences that stop before the city of a landmark, grouped by landmark."""
    texts = []
    labels = []
    groups = []
    for city, places in LANDMARKS.items():
        for place in places[:few]:
            for lead in LEADS:
                texts.append(lead.format(x=place))
                labels.append(city)
                groups.append(place)
    return hs.read((texts, labels), group=groups)


@dataclass(frozen=True)
class RetrievalTexts:
    """Texts with their topic, city and wording, one row each."""

    texts: list[str]
    topic: np.ndarray
    city: np.ndarray
    wording: np.ndarray


def retrieval_texts(few: int | None) -> RetrievalTexts:
    """Return every topic in three wordings for either city."""
    texts = []
    rows = []
    topics = list(TOPICS.items())[:few]
    for topic, (names, wordings) in enumerate(topics):
        for city, name in enumerate(names):
            for number, wording in enumerate(wordings):
                text = wording.format(city=CITIES[city], x=name)
                texts.append(text[0].upper() + text[1:])
                rows.append((topic, city, number))
    return RetrievalTexts(texts, *np.array(rows).T)

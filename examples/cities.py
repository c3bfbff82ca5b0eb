"""Ask whether hidden states tell Toronto from Montreal, and serve as embeddings.

    python examples/cities.py

Four parts. 1: how sentences about two cities lie in every layer of three models, with
the numbers of the full space beside the pictures. 2: the trap, sentences whose last
token is the city. 3: a probe that must tell the city of landmarks it has not seen.
4: retrieval: is the nearest text a paraphrase, or the same wording about the other
city? Bags of words and a sentence model are the rivals in 3 and 4. `--quick` takes one
model and a few texts.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
import numpy as np
from intervals import Mean, mean_interval
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import LeaveOneGroupOut, cross_val_predict

import hiddenscope as hs
from hiddenscope.texts import Labelled

DATA = {"incomplete": "cities-incomplete", "complete": "cities-complete"}
DECODERS = ("smollm2", "gemma3-270m")
SENTENCE_MODEL = "minilm"
CITIES = ("Toronto", "Montreal")
EVERY_LAYER = "layer.*,final"
QUICK_SITES = "layer.0,layer.4"
EARLY = "layer.0,layer.1,layer.2,layer.4"
PICTURED = ("layer.0", "layer.12", "layer.24", "layer.29")

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


def main() -> None:
    """Run the four parts, print what they say and draw it."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    names = DECODERS
    sites = EVERY_LAYER
    few = None
    if options.quick:
        names = DECODERS[:1]
        sites = QUICK_SITES
        few = 5
    models = [hs.load(name) for name in names]
    sentence_model = hs.load(SENTENCE_MODEL)

    print("1. Separation in every layer")
    data = shipped(few)
    projected = [hs.project(models, data, method="pca", pool="last", sites=sites)]
    if not options.quick:
        # A sentence model is read as it was trained: by the mean of all tokens.
        projected.append(hs.project(sentence_model, DATA, method="pca"))
    for result in projected:
        print(result.summary(), flush=True)
    projected[0].save(options.out / "cities.html")
    draw_separation(projected, options.out / "cities-separation.png")

    print("\n2. The trap: the city is the last token")
    trapped = trap(models[0])
    draw_trap(trapped, options.out / "cities-trap.png")

    print("\n3. Landmarks that the probe has not seen")
    sentences = landmarks(few)
    print(f"  bag of words: {bag_of_words(sentences).share()}", flush=True)
    for model in (*models, sentence_model):
        sites_probed = probe_sites(model, options.quick)
        result = hs.probe(model, sentences, sites=sites_probed)
        print_probe(model.name, result)

    print("\n4. The nearest text: a paraphrase, or the same wording of the other city?")
    facts = retrieval_texts(few)
    scores = rivals(sentence_model, facts)
    for model in models:
        layers = scores_by_layer(model, facts, sites)
        for pool, by_site in layers.items():
            name = f"{model.name}, {pool}"
            scores[name], chosen = cross_fitted(by_site, facts)
            *_, scores[f"{name} of final"] = by_site.values()
            print_layers(name, by_site, chosen)
    print_retrieval(scores, facts)
    draw_retrieval(scores, facts, options.out / "cities-retrieval.png")

    if not options.quick:
        draw_picture(projected[0], "PCA", options.out / "cities-pca.png")
        mapped = pictured(models[0])
        draw_picture(mapped, "UMAP", options.out / "cities-umap.png")
        for suffix in ("html", "nc"):
            mapped.save(options.out / f"cities-umap.{suffix}")


def shipped(few: int | None) -> dict[str, Labelled]:
    """Return the shipped sentences, or a few of each city."""
    data = {}
    for name, source in DATA.items():
        texts, labels = columns(hs.read(source))
        # The sentences of one city stand before those of the other.
        half = len(texts) // 2
        some_texts = texts[:half][:few] + texts[half:][:few]
        some_labels = labels[:half][:few] + labels[half:][:few]
        data[name] = hs.read((some_texts, some_labels))
    return data


def trap(model: hs.Model) -> hs.Result:
    """Compare sentences that stop before the city with the same that end in it."""
    data = hs.read("cities-incomplete")
    pairs = zip(*columns(data), strict=True)
    named = [f"{text} {city}" for text, city in pairs]
    sets = {"stops before": data, "ends in the city": (named, data.labels)}
    result = hs.project(model, sets, method="pca", sites=EARLY, pool="last")
    scores = result.data[["neighbour", "silhouette", "silhouette_p"]]
    first = scores.isel(site=0).to_dataframe()
    print(first.to_string(), flush=True)
    return result


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


def bag_of_words(data: Labelled) -> Mean:
    """Score a logistic regression on words, with whole landmarks held out.

    One landmark of each city is held out at a time, so that the classes that are left
    stay equal. Otherwise a model that knows nothing would name the larger one, and be
    wrong.
    """
    texts, labels = columns(data)
    words = TfidfVectorizer().fit_transform(texts)
    number = {}
    for places in LANDMARKS.values():
        for index, place in enumerate(places):
            number[place] = index
    folds = [number[place] for place in data.groups]
    predicted = cross_val_predict(
        LogisticRegression(), words, labels, groups=folds, cv=LeaveOneGroupOut()
    )
    is_right = predicted == np.array(labels)
    return mean_interval(is_right, data.groups)


def probe_sites(model: hs.Model, quick: bool) -> str:
    """Return every fourth layer of a deep model, and `final`; else every layer."""
    if model.name == SENTENCE_MODEL:
        return EVERY_LAYER
    if quick:
        return QUICK_SITES
    *layers, final = model.anatomy.select(EVERY_LAYER)
    return ",".join(map(str, [*layers[::4], final]))


def print_probe(name: str, result: hs.Result) -> None:
    """Print the best site with its interval, and the sites above chance."""
    best = result.facts["best"]
    low, high = best["interval"]
    print(
        f"  {name}: best at {best['site']},"
        f" {best['accuracy']:.0%} ({low:.0%} to {high:.0%}), p = {best['p']:.3f};"
        f" above chance at {result.facts['above_chance_at']}",
        flush=True,
    )
    p_values = result.data["p"].to_pandas().round(3).to_dict()
    print(f"    p at each site: {p_values}", flush=True)


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


@dataclass(frozen=True)
class Nearest:
    """For each text, whether its nearest text is a paraphrase, or the decoy."""

    paraphrase: np.ndarray
    decoy: np.ndarray


def nearest(vectors: np.ndarray, facts: RetrievalTexts) -> Nearest:
    """Find the nearest other text by the cosine of centred vectors."""
    centred = vectors - vectors.mean(0)
    norms = np.linalg.norm(centred, axis=1, keepdims=True)
    # States that are all equal have no direction: every cosine is then zero.
    units = centred / np.maximum(norms, 1e-6)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -np.inf)
    chosen = cosines.argmax(1)
    same_topic = facts.topic[chosen] == facts.topic
    same_city = facts.city[chosen] == facts.city
    same_wording = facts.wording[chosen] == facts.wording
    return Nearest(same_topic & same_city, same_topic & same_wording)


def rivals(sentence_model: hs.Model, facts: RetrievalTexts) -> dict[str, Nearest]:
    """Score a bag of words, and the sentence model as it is meant to be used."""
    words = TfidfVectorizer().fit_transform(facts.texts).toarray()
    vectors = hs.embed(sentence_model, facts.texts)
    return {
        "bag of words": nearest(words, facts),
        f"{SENTENCE_MODEL}, sentence model": nearest(vectors, facts),
    }


def scores_by_layer(
    model: hs.Model, facts: RetrievalTexts, sites: str
) -> dict[str, dict[str, Nearest]]:
    """Score the states of every layer: the last token's, and the mean of all."""
    states = model.capture(facts.texts, sites)
    scores: dict[str, dict[str, Nearest]] = {}
    for pool in ("last", "mean"):
        scores[pool] = {}
        for site in states.sites:
            vectors = np.asarray(states.pool(pool, site), float)
            scores[pool][str(site)] = nearest(vectors, facts)
    return scores


def cross_fitted(
    by_site: dict[str, Nearest], facts: RetrievalTexts
) -> tuple[Nearest, list[str]]:
    """Choose the layer on half of the topics and score it on the other half.

    Return the score, and the layers that the two halves chose.
    """
    chosen = []
    is_even = facts.topic % 2 == 0
    paraphrase = np.zeros(len(facts.texts), bool)
    decoy = np.zeros(len(facts.texts), bool)
    for chosen_on in (is_even, ~is_even):
        shares = {}
        for site, score in by_site.items():
            shares[site] = score.paraphrase[chosen_on].mean()
        site = max(shares, key=shares.__getitem__)
        chosen.append(site)
        best = by_site[site]
        scored_on = ~chosen_on
        paraphrase[scored_on] = best.paraphrase[scored_on]
        decoy[scored_on] = best.decoy[scored_on]
    return Nearest(paraphrase, decoy), chosen


def print_layers(name: str, by_site: dict[str, Nearest], chosen: list[str]) -> None:
    """Print what the nearest text is at every layer, and which layers were chosen."""
    print(f"  {name}: the halves of the topics chose {' and '.join(chosen)}")
    for site, score in by_site.items():
        paraphrase, decoy = score.paraphrase.mean(), score.decoy.mean()
        print(f"    {site}: paraphrase {paraphrase:.0%}, decoy {decoy:.0%}")


def print_retrieval(scores: dict[str, Nearest], facts: RetrievalTexts) -> None:
    """Print the shares with intervals over topics, and each rival's difference."""
    reference = scores[f"{SENTENCE_MODEL}, sentence model"].paraphrase.astype(float)
    for name, score in scores.items():
        share = mean_interval(score.paraphrase, facts.topic)
        decoy = mean_interval(score.decoy, facts.topic)
        difference = mean_interval(score.paraphrase - reference, facts.topic)
        print(
            f"  {name}: paraphrase {share.share()}, decoy {decoy.share()};"
            f" against the sentence model {100 * difference.value:+.0f}"
            f" ({100 * difference.low:+.0f} to {100 * difference.high:+.0f}) points",
            flush=True,
        )


def draw_separation(results: list[hs.Result], path: Path) -> None:
    """Draw the share of nearest neighbours of one class, by depth, beside chance."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 1, figsize=(5.2, 6), sharex=True, sharey=True)
    axis_of = dict(zip(DATA, axes, strict=True))
    for result in results:
        for part in result.facts["parts"]:
            axis = axis_of[part["dataset"]]
            scores = part_scores(result, part)
            share = scores["neighbour"]
            depth = np.linspace(0, 1, len(share))
            (line,) = axis.plot(depth, share, label=part["model"])
            colour = line.get_color()
            axis.plot(depth, scores["neighbour_high"], ":", color=colour)
    for name, axis in axis_of.items():
        axis.set_title(f"{name} sentences", fontsize=11)
        axis.set_ylabel("neighbour of its class")
        axis.axhline(0.5, color="lightgrey", zorder=0)
    axes[0].legend(frameon=False, fontsize=9)
    axes[1].set_xlabel(
        "depth (0: embeddings, 1: last)\ndotted: 1 shuffle in 20 is above"
    )
    save(figure, path)


def part_scores(result: hs.Result, part: dict[str, str]) -> dict[str, np.ndarray]:
    """Return the scores of one model on one dataset, over its sites."""
    data = result.data
    if "model" in data.dims:
        data = data.sel(model=part["model"])
    data = data.sel(dataset=part["dataset"])
    # A model beside a deeper one has no numbers at the sites that it lacks.
    present = np.isfinite(data["distinct"].values)
    scores = {}
    for name in ("neighbour", "neighbour_high"):
        scores[name] = data[name].values[present]
    return scores


def draw_trap(result: hs.Result, path: Path) -> None:
    """Draw how often the nearest text is of the same city, in the first layers."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5.2, 3.2))
    sites = list(result.data["site"].values)
    for part in result.facts["parts"]:
        scores = result.data.sel(dataset=part["dataset"])
        axis.plot(sites, scores["neighbour"], "o-", label=part["dataset"])
    axis.axhline(0.5, color="lightgrey", zorder=0)
    axis.set_ylim(-0.05, 1.1)
    axis.set_ylabel("neighbour of its class")
    axis.legend(frameon=False, fontsize=9)
    save(figure, path)


def draw_retrieval(
    scores: dict[str, Nearest], facts: RetrievalTexts, path: Path
) -> None:
    """Draw the shares of paraphrases and decoys with their intervals over topics."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.2, 0.36 * len(scores) + 1.6))
    for shift, key, colour in ((-0.12, "paraphrase", "C0"), (0.12, "decoy", "C3")):
        label: str | None = key
        for row, score in enumerate(scores.values()):
            mean = mean_interval(getattr(score, key), facts.topic)
            ends = np.clip([mean.low, mean.high], 0, 1)
            height = row + shift
            axis.plot(ends, [height, height], color=colour)
            axis.plot(mean.value, height, "o", color=colour, ms=5, label=label)
            # The legend names each colour once.
            label = None
    axis.set_yticks(range(len(scores)), list(scores), fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(-0.03, 1.03)
    axis.set_xlabel("share of texts whose nearest text is a ...")
    figure.legend(frameon=False, fontsize=9, loc="upper right", ncols=2)
    axis.set_title(" ", fontsize=9)
    save(figure, path)


def pictured(model: hs.Model) -> hs.Result:
    """Return the map by UMAP that the page shows live."""
    sites = ",".join(PICTURED)
    return hs.project(model, DATA, sites=sites, pool="last")


def draw_picture(result: hs.Result, method: str, path: Path) -> None:
    """Draw a few layers of the first model, a row of panels for each dataset."""
    plt = pyplot()
    figure, axes = plt.subplots(2, len(PICTURED), figsize=(6.4, 3.9))
    data = result.data
    if "model" in data.dims:
        data = data.sel(model=DECODERS[0])
    start = 0
    for row, name in zip(axes, DATA, strict=True):
        labels = np.array(hs.read(DATA[name]).labels)
        # The texts of the datasets stand one after the other.
        stop = start + len(labels)
        texts = data.isel(text=slice(start, stop))
        start = stop
        for axis, site in zip(row, PICTURED, strict=True):
            points = texts.sel(site=site)
            if not np.isfinite(points["x"].values).any():
                middle = {"transform": axis.transAxes, "ha": "center"}
                axis.text(0.5, 0.5, "all equal", fontsize=8, **middle)
            for city, colour in zip(CITIES, ("C0", "C3"), strict=True):
                of_city = labels == city
                x = points["x"].values[of_city]
                y = points["y"].values[of_city]
                axis.plot(x, y, ".", color=colour, label=city, ms=5)
            axis.set(xticks=[], yticks=[])
            axis.set_title(site, fontsize=9)
        row[0].set_ylabel(name)
    axes[0, 0].legend(frameon=False, fontsize=7, handletextpad=0)
    figure.suptitle(f"{DECODERS[0]}, last token, {method}", fontsize=10)
    save(figure, path)


def pyplot() -> ModuleType:
    """Return matplotlib's pyplot, drawing to files alone."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: "mpl.figure.Figure", path: Path) -> None:
    """Write a figure and close it."""
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot().close(figure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/cities"))
    return parser.parse_args()


if __name__ == "__main__":
    main()

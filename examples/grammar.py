"""Write labelled sentences by a small grammar, with words that are never shared.

Words are dealt into lexicons: two nouns of each kind, three verbs and three adjectives
each. All sentences of a lexicon form a group, so a probe is tested on words that it was
not trained on. Every text ends in the word at which its label is read.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from random import Random
from typing import NamedTuple

from hiddenscope.texts import Labelled

NOUNS = {
    "person": "farmer baker doctor lawyer pilot sailor singer painter writer teacher"
    " student nurse driver hunter plumber barber butcher tailor miner judge actor"
    " author banker clerk dancer diver editor gardener guard joker king lover maid"
    " monk nun officer poet priest prince prisoner queen ranger robber soldier tutor"
    " uncle visitor waiter",
    "animal": "dog cat horse cow goat pig rabbit tiger lion bear monkey camel donkey"
    " duck eagle elephant frog giraffe hawk hen kangaroo lamb lizard mole otter owl"
    " parrot pigeon rat raven robin seal shark snake spider squirrel swan toad turtle"
    " whale worm zebra beaver crow dolphin leopard panda penguin",
    "tool": "hammer saw drill wrench shovel rake axe chisel ladder spade screwdriver"
    " needle broom bucket mop brush ruler stapler pen pencil crowbar anvil pump lever"
    " pulley trowel sickle plough funnel clamp mallet sander toaster vice jack"
    " hoe file scraper lantern corkscrew whisk spatula ladle grater peeler sieve"
    " thermometer compass",
    "food": "apple banana carrot potato tomato onion lemon orange pear plum grape melon"
    " pancake waffle sausage burger pizza noodle biscuit cracker pudding pretzel"
    " dumpling meatball omelette bagel muffin donut cookie tart pie pickle olive"
    " pepper turnip radish lettuce cabbage cucumber pumpkin walnut almond peanut"
    " raisin apricot mango coconut sandwich",
}
VERBS = (
    "help watch follow visit chase greet ignore admire attack accept blame carry"
    " collect compare correct cover deliver describe destroy enjoy examine fetch"
    " film fill fix fool frighten guide hunt inspect invite finish join kick lift list"
    " load lock measure mention miss mock move need notice offend open order paint pass"
    " pick praise protect pull punish push reach remember remove repair replace rescue"
    " scratch respect reward sketch surprise suspect touch trust turn warn wash"
)
ADJECTIVES = (
    "old new big small red blue green brown black white clean dirty heavy light warm"
    " cold dry wet thick thin long short wide narrow loud quiet rich poor strong weak"
    " young fresh sharp dull smooth rough round flat deep shallow bright dark clever"
    " foolish happy sad angry gentle cruel famous strange common rare busy lazy hungry"
    " tired pretty ugly proud brave shy calm noisy simple plain hidden broken empty full"
    " soft tall cheap rotten"
)
OPENINGS = ("", "We know that ", "Today ", "It seems that ", "They say that ")
NEAR = ("near", "behind", "beside", "above", "below")
CLAUSES = ("when", "because", "while", "although", "before")
MENTIONS = (
    "We talked about the",
    "This is the",
    "Nobody here saw the",
    "There is the",
    "Everyone remembers the",
)
CLAIMS = (
    "{} is a kind of {}",
    "We all know that {} is a {}",
    "To be exact, {} is a {}",
    "The book says that {} is a {}",
)
LEXICONS = 24


class Lexicon(NamedTuple):
    """Words that no other lexicon has."""

    nouns: dict[str, list[str]]
    verbs: list[str]
    adjectives: list[str]

    def animate(self, random: Random, count: int) -> list[str]:
        """Draw nouns of those who can act."""
        return random.sample(self.nouns["person"] + self.nouns["animal"], count)

    def any_nouns(self, random: Random, count: int) -> list[str]:
        """Draw nouns of any kind."""
        return random.sample([*chain.from_iterable(self.nouns.values())], count)


Sentence = tuple[str, str]
Rule = Callable[[Lexicon, Random, int], Sentence]


def lexicons(seed: int = 0) -> list[Lexicon]:
    """Deal all words, so that each is in one lexicon."""
    random = Random(seed)

    def dealt(words: str) -> list[list[str]]:
        order = words.split()
        random.shuffle(order)
        return [order[number::LEXICONS] for number in range(LEXICONS)]

    by_kind = {kind: dealt(words) for kind, words in NOUNS.items()}
    verbs, adjectives = dealt(VERBS), dealt(ADJECTIVES)
    parts = []
    for number in range(LEXICONS):
        nouns = {kind: words[number] for kind, words in by_kind.items()}
        parts.append(Lexicon(nouns, verbs[number], adjectives[number]))
    return parts


def plural(noun: str) -> str:
    """Return the plural of a regular noun.

    >>> [plural(noun) for noun in ("dog", "compass", "ruby", "monkey")]
    ['dogs', 'compasses', 'rubies', 'monkeys']
    """
    if noun.endswith(("s", "x", "ch", "sh", "tomato", "potato", "mango")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def with_ending(verb: str, ending: str) -> str:
    """Add -ed or -ing to a verb.

    >>> [with_ending(verb, "ed") for verb in ("help", "chase", "carry", "enjoy")]
    ['helped', 'chased', 'carried', 'enjoyed']
    """
    if ending == "ed" and verb.endswith("y") and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ied"
    return f"{verb.removesuffix('e')}{ending}"


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def word_class(words: Lexicon, random: Random, number: int) -> Sentence:
    """End in a noun, a verb or an adjective."""
    first, second = words.any_nouns(random, 2)
    actors = plural(words.animate(random, 1)[0])
    adjective, other = random.sample(words.adjectives, 2)
    verb = random.choice(words.verbs)
    last = {
        "noun": (
            f"We know that the {first}",
            f"We know that the {adjective} {first}",
            f"The {plural(first)} are {plural(second)}",
            f"They like {plural(first)}",
            f"They often {verb} the {first}",
        ),
        "verb": (
            f"We know that the {actors} {verb}",
            f"We know that the {adjective} {actors} {verb}",
            f"They like to {verb}",
            f"They often {verb}",
            f"The {actors} who {verb}",
        ),
        "adjective": (
            f"We know that the {adjective}",
            f"We know that the {adjective} {other}",
            f"The {plural(first)} are {adjective}",
            f"They like {adjective}",
            f"They are often {adjective}",
        ),
    }
    label = list(last)[number % 3]
    return random.choice(last[label]), label


def subject_number(words: Lexicon, random: Random, number: int) -> Sentence:
    """Stop before the verb, with another noun in between; the two may disagree."""
    subject, attractor = words.any_nouns(random, 2)
    label = ("singular", "plural")[number % 2]
    if label == "plural":
        subject = plural(subject)
    if number // 2 % 2:
        attractor = plural(attractor)
    opening = random.choice(OPENINGS)
    text = f"{opening}the {subject} {random.choice(NEAR)} the {attractor}"
    return text[0].upper() + text[1:], label


def tense(words: Lexicon, random: Random, number: int) -> Sentence:
    """Say something in the present or the past; the subject is plural."""
    actors = plural(words.animate(random, 1)[0])
    verb = random.choice(words.verbs)
    label = ("present", "past")[number % 2]
    if label == "past":
        verb = with_ending(verb, "ed")
    thing = words.any_nouns(random, 1)[0]
    adjective = random.choice(words.adjectives)
    return f"The {actors} {verb} the {adjective} {thing}", label


def voice(words: Lexicon, random: Random, number: int) -> Sentence:
    """Say something in the active or the passive, with the same function words."""
    first, second, third = map(plural, words.animate(random, 3))
    place = words.any_nouns(random, 1)[0]
    verb = random.choice(words.verbs)
    opening = f"The {first} by the {place} were"
    if number % 2:
        agent = f"{random.choice(words.adjectives)} {second}"
        return f"{opening} {with_ending(verb, 'ed')} by the {agent}", "passive"
    return f"{opening} {with_ending(verb, 'ing')} {third} by the {second}", "active"


def embedding_depth(words: Lexicon, random: Random, number: int) -> Sentence:
    """Put the subordinate clause first or last: the same words in another order."""
    first, second = map(plural, words.animate(random, 2))
    thing, other = words.any_nouns(random, 2)
    verb, another = random.sample(words.verbs, 2)
    main = f"the {first} {verb} the {thing}"
    clause = f"{random.choice(CLAUSES)} the {second} {another} the {other}"
    label = ("main clause", "embedded clause")[number % 2]
    text = f"{main}, {clause}" if number % 2 else f"{clause}, {main}"
    return text[0].upper() + text[1:], label


def entity_type(words: Lexicon, random: Random, number: int) -> Sentence:
    """Mention a person, an animal, a tool or a food."""
    label = list(NOUNS)[number % 4]
    noun = random.choice(words.nouns[label])
    return f"{random.choice(MENTIONS)} {noun}", label


def plain_fact(words: Lexicon, random: Random, number: int) -> Sentence:
    """Say what kind of thing a thing is, rightly or wrongly."""
    kinds = list(NOUNS)
    kind = random.choice(kinds)
    thing = with_article(random.choice(words.nouns[kind]))
    label = ("true", "false")[number % 2]
    if label == "false":
        kind = random.choice([other for other in kinds if other != kind])
    text = random.choice(CLAIMS).format(thing, kind).replace(" a animal", " an animal")
    return text[0].upper() + text[1:], label


RULES: dict[str, Rule] = {
    "word class": word_class,
    "subject number": subject_number,
    "tense": tense,
    "voice": voice,
    "depth of embedding": embedding_depth,
    "entity type": entity_type,
    "plain fact": plain_fact,
}


def sentences(label: str, count: int, seed: int = 0) -> Labelled:
    """Write `count` different texts with this label, equally many of each lexicon."""
    random = Random(f"{label} {seed}")
    texts: dict[str, tuple[str, int]] = {}
    parts = lexicons(seed)
    for number in range(count):
        group = number % LEXICONS
        text, value = RULES[label](parts[group], random, number // LEXICONS)
        while text in texts:
            text, value = RULES[label](parts[group], random, number // LEXICONS)
        texts[text] = value, group
    return labelled(label, [(text, *rest) for text, rest in texts.items()])


def labelled(name: str, rows: Sequence[tuple[str, str, int]]) -> Labelled:
    """Return texts, labels and groups as `hs.read` does."""
    texts, labels, groups = zip(*rows, strict=True)
    return Labelled(texts, labels, name, groups)

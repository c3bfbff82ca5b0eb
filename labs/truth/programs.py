"""Ten programs, from one that needs a single head to one of three blocks."""

from collections.abc import Callable

from labs.truth.program import (
    ASK,
    START,
    Positions,
    Program,
    Term,
    Tokens,
    Value,
    copied,
    count,
    longest_input,
    mapped,
    share,
)

# Scores of a key that does not match, and of the start, which is taken if none does.
NO_MATCH, NONE_MATCHES = -1.0, -0.5
# The same where up to 16 positions are told apart by one each.
FAR_NO_MATCH, FAR_NONE_MATCHES = -100.0, -50.0


def _tokens(letters: str, *others: str) -> Tokens:
    return Tokens("token", (START, *letters, *others))


def reverse() -> Program:
    """Write the letters backwards, one for each question mark."""
    letters, lengths = "abc", range(2, 5)
    longest = longest_input(lengths, asks=True)
    tokens = _tokens(letters, ASK)
    position = Positions("position", tuple(range(longest)))
    length = count("length", tokens, longest, lambda _, token: token in letters)

    def mirrored(place: int, total: int) -> int:
        # The first question mark is at total + 1 and takes the last letter.
        return min(max(0, 2 * total + 1 - place), longest)

    wanted = mapped("wanted", mirrored, position, length)
    output = copied("output", tokens, Term(position, _same_place, wanted))
    task = "the letters backwards, at the question marks"
    return Program(
        "reverse", task, tokens, output, tuple(letters), lengths, 0.002, asks=True
    )


def _same_place(wanted: int, place: int) -> float:
    if place == 0:
        return NONE_MATCHES
    return 0.0 if place == wanted else NO_MATCH


def histogram() -> Program:
    """Count how often each letter has been seen, itself included."""
    letters, lengths = "abc", range(2, 8)
    tokens = _tokens(letters)
    longest = longest_input(lengths, asks=False)
    output = count("output", tokens, longest, lambda mine, other: mine == other, tokens)
    task = "how often this letter has been seen"
    return Program("histogram", task, tokens, output, tuple(letters), lengths, 0.002)


def fraction() -> Program:
    """Say which share of the letters so far is x."""
    letters, lengths = "xyz", range(2, 8)
    tokens = _tokens(letters)
    longest = longest_input(lengths, asks=False)
    not_start = Term(tokens, lambda token: NO_MATCH if token == START else 0.0)
    part = share("share", tokens, ["x"], longest - 1, not_start)
    output = mapped("output", str, part)
    task = "which share of the letters so far is x"
    return Program("fraction", task, tokens, output, tuple(letters), lengths, 0.005)


def sort() -> Program:
    """Write the letters in order, one for each question mark."""
    letters, lengths = "abc", range(2, 5)
    tokens = _tokens(letters, ASK)
    longest = longest_input(lengths, asks=True)
    asked = count("asked", tokens, longest, lambda _, token: token == ASK)
    low = count("low", tokens, longest, lambda _, token: token == "a")
    middle = count("middle", tokens, longest, lambda _, token: token in "ab")
    is_low = mapped("is_low", lambda place, total: place <= total, asked, low)
    is_middle = mapped("is_middle", lambda place, total: place <= total, asked, middle)

    def letter(first: bool, second: bool) -> str:
        if first:
            return "a"
        return "b" if second else "c"

    output = mapped("output", letter, is_low, is_middle)
    task = "the letters in order, at the question marks"
    return Program(
        "sort", task, tokens, output, tuple(letters), lengths, 0.05, asks=True
    )


def induction(letters: str = "abcd", longest_text: int = 7) -> Program:
    """Write what followed the last time that this letter was seen."""
    lengths = range(2, longest_text + 1)
    tokens = _tokens(letters)
    longest = longest_input(lengths, asks=False)
    position = Positions("position", tuple(range(longest)))

    def just_before(mine: int, other: int) -> float:
        return 0.0 if other == max(0, mine - 1) else NO_MATCH

    before = copied("before", tokens, Term(position, just_before, position))

    def matches(mine: str, other: str) -> float:
        if other == START:
            return FAR_NONE_MATCHES
        return 0.0 if mine == other else FAR_NO_MATCH

    def latest_or_start(place: int) -> float:
        # The first letter has the start before it too, and is not to be taken.
        return 2.0 if place == 0 else float(place)

    latest = Term(position, latest_or_start)
    output = copied("output", tokens, Term(before, matches, tokens), latest)
    task = "what followed this letter the last time"
    return Program("induction", task, tokens, output, tuple(letters), lengths, 0.002)


def depth() -> Program:
    """Count the brackets that are open."""
    letters, lengths = "()x", range(2, 8)
    tokens = _tokens(letters)
    longest = longest_input(lengths, asks=False)
    opened = count("opened", tokens, longest, lambda _, token: token == "(")
    closed = count("closed", tokens, longest, lambda _, token: token == ")")
    output = mapped("output", lambda up, down: up - down, opened, closed)
    task = "how many brackets are open"
    return Program("depth", task, tokens, output, tuple(letters), lengths, 0.02)


def maximum() -> Program:
    """Write the largest digit so far."""
    letters, lengths = "1234", range(2, 8)
    tokens = _tokens(letters)
    largest = Term(tokens, lambda token: 0.0 if token == START else float(token))
    output = copied("output", tokens, largest)
    task = "the largest digit so far"
    return Program("maximum", task, tokens, output, tuple(letters), lengths, 0.002)


def parity() -> Program:
    """Say whether the number of ones so far is odd."""
    letters, lengths = "01", range(2, 9)
    tokens = _tokens(letters)
    longest = longest_input(lengths, asks=False)
    ones = count("ones", tokens, longest, lambda _, token: token == "1")
    output = mapped("output", lambda total: "odd" if total % 2 else "even", ones)
    task = "whether the number of ones so far is odd"
    return Program("parity", task, tokens, output, tuple(letters), lengths, 0.01)


def modular_sum() -> Program:
    """Add the digits so far modulo 3."""
    letters, lengths = "012", range(2, 8)
    tokens = _tokens(letters)
    longest = longest_input(lengths, asks=False)
    ones = count("ones", tokens, longest, lambda _, token: token == "1")
    twos = count("twos", tokens, longest, lambda _, token: token == "2")
    output = mapped("output", lambda one, two: (one + 2 * two) % 3, ones, twos)
    task = "the sum of the digits so far, modulo 3"
    return Program("modular_sum", task, tokens, output, tuple(letters), lengths, 0.02)


def skip_trigram() -> Program:
    """Write x at a c that has an a before it, and y at a d that has a b before it."""
    letters, lengths = "abcd", range(2, 8)
    tokens = _tokens(letters)
    triggers = {"c": "a", "d": "b"}

    def triggered(mine: str, other: str) -> float:
        if other == START:
            return NONE_MATCHES
        return 0.0 if triggers.get(mine) == other else NO_MATCH

    trigger = copied("trigger", tokens, Term(tokens, triggered, tokens))

    def written(found: Value) -> str:
        return {"a": "x", "b": "y"}.get(found, "-")

    output = mapped("output", written, trigger)
    task = "x at c after a, y at d after b"
    return Program("skip_trigram", task, tokens, output, tuple(letters), lengths, 0.002)


PROGRAMS: dict[str, Callable[..., Program]] = {
    function.__name__: function
    for function in (
        reverse,
        histogram,
        fraction,
        sort,
        induction,
        depth,
        maximum,
        parity,
        modular_sum,
        skip_trigram,
    )
}

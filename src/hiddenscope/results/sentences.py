"""Sentences: the phrases in which every kind of result states its findings."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hiddenscope.files import printable
from hiddenscope.results.report import Estimate, Facts, Grouped, Pooled
from hiddenscope.sites import Site, summarise
from hiddenscope.states.pooling import POOLINGS, meaning_of, score_pooling

if TYPE_CHECKING:
    from hiddenscope.results.result import Result

UNTESTED = "These numbers describe these texts; other texts were not tested."
UNPROVED = (
    "Nothing was proved of this dictionary: its file may mean another layer, input or"
    " activation. Read it with its model: Dictionary.read(path, model, texts=...)."
)
# What tells two runs of one model apart.
DIFFERING = ("dtype", "device", "attention", "revision", "quantisation")
LONGEST_DETAIL, LONGEST_HASH = 40, 20
# From this share of texts that nearly repeat another on, a finding says so.
MANY = 0.1
# If fewer neighbours are told apart from chance, a finding says that none are.
APART = 0.15
# An example is cut here, in characters.
SHOWN = 60
# Items of a list, and characters of a text, that one line shows.
MOST_ITEMS = 12
LONGEST_TEXT = 200


def fact_lines(facts: Facts, indent: str = "") -> Iterator[str]:
    """Yield one line for each fact; inner mappings are indented beneath their key.

    >>> list(fact_lines({"largest": 2.5, "at": "layer.1"}))
    ['largest  2.5', 'at       layer.1']
    """
    widths = [0]
    for key, value in facts.items():
        if not isinstance(value, dict):
            widths.append(len(printable(key)))
    for key, value in facts.items():
        if isinstance(value, dict):
            yield f"{indent}{printable(key)}"
            yield from fact_lines(value, indent + "  ")
        else:
            yield f"{indent}{printable(key):<{max(widths)}}  {in_words(value)}"


def in_words(value: object) -> str:
    """Return a fact as one short line that is safe to print on a terminal."""
    if isinstance(value, list):
        items = [in_words(item) for item in value[:MOST_ITEMS]]
        if len(value) > MOST_ITEMS:
            items.append("…")
        return ", ".join(items) or "none"
    if isinstance(value, dict):
        return "; ".join(
            f"{printable(key)} {in_words(inner)}" for key, inner in value.items()
        )
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    # Escaped before it is cut, since an escape may take ten characters.
    text = printable(text, None)
    if len(text) > LONGEST_TEXT:
        text = text[: LONGEST_TEXT - 1] + "…"
    return text


def quote(text: str) -> str:
    """Quote a text within a sentence: on one line, and with nothing in it that would be
    taken for code.

    >>> quote("`a`" + chr(10) + "- b")
    '“’a’\\\\n- b”'
    """
    # Prose takes words between backticks for code.
    return f"“{in_words(text).replace('`', '’')}”"


def quoted_token(token: str) -> str:
    """Quote a token without the space that most tokens begin with.

    >>> quoted_token(" Paris"), quoted_token(" ")
    ('“Paris”', '“ ”')
    """
    return quote(token.strip() or token)


def quoted_tokens(tokens: Sequence[str]) -> list[str]:
    """Quote tokens, each without the space that it begins with unless that is what
    tells two apart.

    >>> quoted_tokens([" Paris", " Rome"]), quoted_tokens([" Paris", "Paris"])
    (['“Paris”', '“Rome”'], ['“ Paris”', '“Paris”'])
    """
    stripped = [quoted_token(token) for token in tokens]
    if len(set(stripped)) == len(set(tokens)):
        return stripped
    return [quote(token) for token in tokens]


def shortened(text: str, most: int) -> str:
    """Cut a text to at most this many characters.

    >>> shortened("The capital of France", 12)
    'The capital…'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def capitalised(text: str) -> str:
    """Return a text that begins with a capital letter."""
    return f"{text[:1].upper()}{text[1:]}"


def plural(count: int, word: str) -> str:
    """Return a noun as it stands behind a number.

    >>> f"1 {plural(1, 'text')} and 2 {plural(2, 'text')}"
    '1 text and 2 texts'
    """
    return word if count == 1 else f"{word}s"


def counted(count: int, word: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "text"), counted(2_000, "text")
    ('1 text', '2,000 texts')
    """
    return f"{count:,} {plural(count, word)}"


def number(value: float, digits: int = 3) -> str:
    """Return a number without a power of ten where it is large.

    >>> number(27_312.4), number(0.01234), number(99.7, 2)
    ('27,312', '0.0123', '100')
    """
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.{digits}g}"


def estimated(estimate: Estimate, form: str) -> str:
    """Return a number with its interval; a share ends at 0 and 1."""
    # What rounds to 0 has no sign.
    form = form.replace("z", "").replace(".", "z.")
    low, high = estimate.low, estimate.high
    # Texts that all agree tell nothing of how far others may differ.
    if low is None or high is None or low == high:
        return f"{estimate.value:{form}}"
    if form.endswith("%"):
        low, high = max(0.0, low), min(1.0, high)
    flags, _, digits = form.partition(".")
    if f"{low:{form}}" == f"{high:{form}}" == f"{0.0:{form}}":
        # It is 0 to all digits that count.
        return f"{0.0:{form}}"
    # As many digits as tell the ends apart: no interval is shown without a width.
    while low < high and f"{low:{form}}" == f"{high:{form}}":
        digits = f"{int(digits[:-1]) + 1}{digits[-1]}"
        form = f"{flags}.{digits}"
    return f"{estimate.value:{form}} (95% interval {low:{form}} to {high:{form}})"


def in_series(parts: Sequence[str], conjunction: str = "and") -> str:
    """Join the parts of a sentence as English does.

    >>> in_series(["norms"]), in_series(["norms", "ranks", "shares"])
    ('norms', 'norms, ranks and shares')
    """
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} {conjunction} {parts[-1]}"


def ranges(selected: Sequence[str], sites: Sequence[str]) -> str:
    """Name some of the sites of a result, neighbours as a range.

    >>> sites = ["layer.0", "layer.1", "layer.2", "final"]
    >>> ranges(["layer.0", "layer.1", "final"], sites)
    'layer.0 to layer.1 and final'
    """
    rows = sorted(sites.index(site) for site in selected)
    first_rows = [row for row in rows if row - 1 not in rows]
    last_rows = [row for row in rows if row + 1 not in rows]
    names = []
    for first, last in zip(first_rows, last_rows, strict=True):
        if first == last:
            names.append(sites[first])
        else:
            names.append(f"{sites[first]} to {sites[last]}")
    return in_series(names)


def site_list(names: Iterable[str]) -> str:
    """Name sites, consecutive layers as a range.

    >>> site_list(["layer.2", "layer.3", "layer.4", "final"])
    'layer.2 to layer.4 and final'
    """
    return summarise(map(Site.parse, names))


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Add a number to names that occur more than once.

    >>> distinct(["cat", "dog", "cat"])
    ('cat (0)', 'dog', 'cat (2)')
    """
    numbered = []
    for index, name in enumerate(names):
        number = f" ({index})" if names.count(name) > 1 else ""
        numbered.append(f"{name}{number}")
    return tuple(numbered)


def model_name(result: "Result") -> str:
    """Return the name of the model that a result is about."""
    return str(result.source.get("model", "the model"))


def of_model(result: "Result") -> str:
    """Return " of" and the model's name, or nothing where the model is unknown."""
    model = result.source.get("model")
    return f" of {model}" if isinstance(model, str) else ""


def side_names(source: Mapping[str, Any]) -> tuple[str, str]:
    """Name the two models of a comparison, each with what it does not share with the
    other: dtype, device, kernel, revision, quantisation, weights.

    >>> other = {"model": "m", "dtype": "bfloat16"}
    >>> side_names({"model": "m", "dtype": "float32", "other": other})
    ('m (float32)', 'm (bfloat16)')
    """
    other = source.get("other", source)
    differing = [
        name
        for name in DIFFERING
        if str(source.get(name) or "") != str(other.get(name) or "")
    ]
    same_name = source.get("model") == other.get("model")
    if not differing and same_name and source.get("weights") != other.get("weights"):
        # Only the hash of its weights tells such a model from the other.
        differing = ["weights"]
    return _side_name(source, differing), _side_name(other, differing)


def _side_name(side: Mapping[str, Any], differing: Sequence[str]) -> str:
    name = str(side.get("model", "one"))
    details = []
    for key in differing:
        longest = LONGEST_HASH if key == "weights" else LONGEST_DETAIL
        details.append(str(side.get(key) or f"no {key}")[:longest])
    return f"{name} ({', '.join(details)})" if details else name


def standing(token: str | int) -> str:
    """Say what stands for a text.

    >>> standing("mean"), standing(3)
    ('the mean over the tokens of each text', 'token 3 of each text')
    """
    if token == "each":
        return "every token"
    if isinstance(token, int) or token in POOLINGS or score_pooling(token):
        return meaning_of(token)
    # A result of another version may name a pooling that is not known here.
    return f"token {token} of each text"


def ruled(report: Pooled | None, of: str = "") -> Iterator[str]:
    """Yield what was left out of the vectors of texts, and what rules them."""
    if report is None:
        return
    sinks, massive, lengths = report.sinks, report.massive, report.length_share
    if sinks:
        where = 'left out of the means; pool="mean:all" keeps them'
        if report.kept:
            where = 'in the vectors, and may rule them; pool="mean" leaves them out'
        yield (
            "Sinks, with states over 4 times as long as the median of their text, are"
            f" {where}: up to {sinks.most:,} of {report.tokens:,} tokens{of}, at"
            f" {site_list(sinks.at)}."
        )
    if massive:
        yield (
            f"Up to {massive.most:,} of {report.texts:,} vectors{of} are over 4 times"
            f" as long as their median, at {site_list(massive.at)}: single tokens may"
            " rule them, as in a text of one token."
        )
    if lengths:
        yield (
            f"The vectors{of} lie by the lengths of their texts, or by what goes with"
            f" them: the number of tokens alone (1/n) accounts for up to"
            f" {lengths.most:.0%} of their variance, at {site_list(lengths.at)}."
        )


def neighbours(told_apart: float | None, unit: str = "text") -> Iterator[str]:
    """Yield how many nearest neighbours are nearer than chance explains."""
    if told_apart is None:
        return
    verdict = ""
    if told_apart < APART:
        verdict = ", so neighbours are not told apart from chance"
    yield (
        f"The nearest {unit} is nearer than chance explains for {told_apart:.0%} of the"
        f" {unit}s (in noise for about 5%){verdict}."
    )


def independence(report: Grouped, of: str = "") -> str:
    """Say that texts or groups are taken as independent, and when near duplicates or a
    drift along their order make that implausible.

    >>> print(independence(Grouped()))
    The texts are taken as independent of one another, since no groups were given.
    """
    if report.groups_given:
        sentence = (
            f"The {report.groups:,} groups of texts{of} are taken as independent of"
            " one another, and each is kept together."
        )
    elif report.groups < report.texts:
        sentence = (
            f"Texts{of} that differ in case, white space and punctuation alone are kept"
            f" together ({report.groups:,} groups); these are taken as independent of"
            " one another, since no other groups were given."
        )
    else:
        sentence = (
            f"The texts{of} are taken as independent of one another, since no groups"
            " were given."
        )
    serial = report.serial_inflation
    if serial is not None:
        sentence += (
            " That is doubtful: labels and states both drift along the order of the"
            " texts, and what drifts goes together by chance (labels shifted along the"
            f" order explain {serial:.1f} times as much as permuted ones). So permuted"
            " labels are no comparison, and fresh texts may be read much worse. Put"
            " texts that follow one another, such as those of one document or day, into"
            " one group."
        )
    near = report.near_duplicates
    if near is None or near.texts < MANY * near.of:
        return sentence
    text, other = (quote(shortened(text, SHOWN)) for text in near.example)
    repeated = "a text of another group" if report.groups_given else "another"
    return (
        f"{sentence} That is doubtful: {near.texts:,} of {near.of:,} texts"
        f" nearly repeat {repeated}, such as {text} and {other}. Put such texts into"
        " one group: otherwise p-values can come out too small, intervals too narrow,"
        " and accuracies below chance."
    )

"""Sentences: read the numbers of what a result says, and say what they cannot be.

>>> unsound("The mean cosine is 2.4.")
["a cosine of 2.4: 'The mean cosine is 2.4.'"]
>>> unsound("Accuracy 90% (95% interval 70% to 97%), p = 0.002: 9 of 10 texts.")
[]
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import hiddenscope as hs
from hiddenscope.results import story_of, views_of

# A number that is no part of a name such as layer.1 or v1; 1,234 and 1e-05 are numbers.
NUMBER = r"(?<![\w.,])[+−-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])"
GROUP = f"({NUMBER}%?)"
ENDS = rf"(?:R² )?{GROUP} to (?:R² )?{GROUP}"
# The interval of a number: behind it, perhaps with a few words between.
INTERVAL = re.compile(
    rf"{GROUP}((?: (?!to\b)[a-zA-Z'\-]+){{0,6}})"
    rf"(?: \((?:95% )?(?:interval )?|, ){ENDS}(?=[,)])"
)
INFINITE = math.inf


class Kind(NamedTuple):
    """What some numbers are, by the words around them, and what such can be."""

    name: str
    pattern: re.Pattern[str]
    least: float
    most: float
    # Whether it is beyond the least, and never at it.
    beyond: bool = False


def _kind(
    name: str, words: str, least: float, most: float, *, beyond: bool = False
) -> Kind:
    return Kind(name, re.compile(words.replace("#", GROUP)), least, most, beyond)


# The first kind that fits a number counts; `#` stands for the number.
KINDS = (
    _kind("p", r"\bp(?: =| at most| is|,)? #", 0, 1, beyond=True),
    _kind("p", r"\bp-values? (?:that is possible )?is #", 0, 1, beyond=True),
    _kind("correlation", r"\bcorrelation (?:of|is|was) #|\br = #", -1, 1),
    _kind("cosine", r"\bcosines? (?:[a-z]+ ){0,6}#", -1, 1),
    _kind("silhouette", r"\bsilhouette (?:is largest at [\w.]+: )?#", -1, 1),
    _kind(
        "CKA",
        r"\bCKA of [^;]*? is #|#(?= (?:over all|without first|with tokens))",
        0,
        1,
    ),
    _kind("CKA", r"\balike \(#", 0, 1),
    _kind("R²", r"R² #", -INFINITE, 1),
    _kind("AUROC", r"\bAUROC (?:of )?#", 0, 1),
    _kind("accuracy", r"\b[Aa]ccurac(?:y|ies)(?: of| is)? #", 0, 1),
    _kind("probability", r"\bprobability(?: of|,)? #(?: to #)?", 0, 1),
    _kind("rank", r"\brank of #", 1, INFINITE),
    _kind("perplexity", r"\bunchanged it is #", 1, INFINITE),
    _kind("change", r"\bperplexity #", -1, INFINITE),
    _kind("change", r"\bby at most #|\badds #(?= to the KL)", 0, INFINITE),
    _kind(
        "error",
        r"\boff by #|\b[Oo]n (?:the strongest ones|average) it is #",
        0,
        INFINITE,
    ),
    _kind("error", r"\bshows from about #|, from #(?= on)", 0, INFINITE),
    _kind("error", r"\berror (?:of at most |is |of )#", 0, INFINITE),
    _kind("ratio", r"#(?= times\b)", 0, INFINITE),
    _kind("nats", r"(?<![+−-])\b#(?= nats)|\bdivergence is #", 0, INFINITE),
    _kind("norm", r"\bnorm(?:, | of | is )#", 0, INFINITE),
    _kind(
        "norm",
        r"\bnorm of [a-z ]+ is #(?:, and that of the other tokens #)?",
        0,
        INFINITE,
    ),
    _kind("norm", r"\bnorm of [a-z ]+ from # to #", 0, INFINITE),
    _kind("norm", r"\bthat of the other tokens from # to #", 0, INFINITE),
    _kind(
        "norm",
        r"\bby #(?= of its norm)|\bdispersion is # in “x*” and # in",
        0,
        INFINITE,
    ),
    _kind(
        "distance", r"\bmedian difference is #|\brelative difference is #", 0, INFINITE
    ),
    _kind(
        "influence", r"\bthe influence of [^;]* is #; that of [\w.]+ is #", 0, INFINITE
    ),
    _kind("weight", r"\blargest weight, #", 0, 1),
    _kind("difference", r"\b[Dd]ifference (?:of |is )#", -INFINITE, INFINITE),
    _kind("share", r"\bshare (?:of [^:;(]*? )?is #(?! \()", 0, 1),
)
# What a sentence begins with says what all its numbers are.
HEADS = (
    ("Share of the loss recovered", -INFINITE, INFINITE),
    ("Share of the variance left unexplained", 0, INFINITE),
    ("AUROC", 0, 1),
    ("KL divergence of predictions", 0, INFINITE),
    ("Mean KL divergence", 0, INFINITE),
    ("Accuracy", 0, 1),
    ("Silhouette", -1, 1),
    ("Median norm", 0, INFINITE),
    ("Median relative difference", 0, INFINITE),
    ("Error of the whole pass", 0, INFINITE),
    ("Share", 0, 1),
)
QUOTED = re.compile(r"“[^”]*”|`[^`]*`")
NO_NUMBER = re.compile(r"(?<!\w)(nan|NaN|-?inf|null)(?!\w)|(?<=\w )None\b")
COUNT = r"(?<![\w.,-])\d+(?:,\d{3})*"
OF = re.compile(
    rf"({COUNT}) of (?:the |these |its |all |their )?({COUNT})(?![\w%]|[.,]\d)"
)
PERCENT = re.compile(rf"({NUMBER})%")
# Less than nothing, or more than all of it: differences and changes alone.
MAY_EXCEED = re.compile(
    r"difference|change|differ|more of it|less (?:that|middle)|exceed|error|increase"
)
# "3 of 4 tokens (75%)", and "75% of the tokens (3 of 4)".
SHARED = (
    re.compile(
        rf"(?P<part>{COUNT})(?: \w+){{0,3}} of (?:\w+ ){{0,2}}?(?P<whole>{COUNT})"
        rf"[^;:.%(]{{0,40}} \((?P<share>{NUMBER})%\)"
    ),
    re.compile(
        rf"(?P<share>{NUMBER})% [^;:.%(]{{0,40}}"
        rf"\((?P<part>{COUNT}) of (?P<whole>{COUNT})\)"
    ),
)
NOUNS = (
    "text|token|layer|prompt|pair|head|site|group|member|feature|direction|query"
    "|class|cluster|vector|point|setting|window|edge|cell|position|model|pass|block"
    "|neuron|row|fold|batch|draw|target|prediction|label|example|rank|way|channel"
)
PLURALS = re.sub(r"(\w+)", r"\1s", NOUNS).replace("querys", "queries")
PLURALS = re.sub(r"(class|pass|batch)s", r"\1es", PLURALS)
VACUOUS = (
    # A reason, or a share, of none.
    re.compile(r"(?<![\w.,])0 (?:[a-z]+ )*?(?:none|of none)\b"),
    re.compile(r"(?<![\w.,])(?:0|[Nn]one)\b[^;:.]{0,60}\(0(?:\.0+)?%\)"),
    re.compile(r"(?<![\w.,])0 of [^;]*\bbecause\b"),
    # An average over nothing, and nothing of nothing.
    re.compile(rf"\b(?:over|of|in|among|with) 0 (?:[a-z]+ )?(?:{PLURALS})\b"),
    re.compile(r"(?<![\w.,])0 of (?:the |these )?0\b"),
    # From a number at a place to the same number there.
    re.compile(r"\bfrom (\S+ at \S+) to \1(?![\w.])"),
    re.compile(r"(?<!\w)\(\s*\)|: \.$|, ,|  "),
)
ONE_OF_SEVERAL = re.compile(
    rf"(?<![\w.,-])1 (?:more |other |further )?(?:{PLURALS})\b"
    rf"|(?<![\w.,-])(?<!layer )(?<!token )(?<!text )(?:[2-9]|\d{{2,}})"
    rf" (?:more |other )?(?:{NOUNS})\b(?![-.] ?\w| \d|s)"
)


class Reading(NamedTuple):
    """A number of a sentence: where it stands, and what it can be."""

    start: int
    end: int
    value: float
    kind: Kind

    @property
    def is_possible(self) -> bool:
        """Whether such a number can be."""
        if self.kind.beyond and self.value <= self.kind.least:
            return False
        return self.kind.least <= self.value <= self.kind.most


def sentences(result: hs.Result) -> Iterator[str]:
    """Yield all that a person is told: the findings, the prose of the page and the
    notes below its pictures.
    """
    told = [result.summary()]
    for section in story_of(result):
        told += [section.prose, section.reading]
    told += [str(getattr(view, "note", "")) for view in views_of(result)]
    for text in told:
        for part in re.split(r"(?<=[.!?])\s+|\n", text):
            if part.strip():
                yield part.strip()


def number_of(written: str) -> float:
    """Return a number as it is written: a percentage as a share."""
    plain = written.replace(",", "").replace("−", "-")
    if plain.endswith("%"):
        return float(plain[:-1]) / 100
    return float(plain)


def bare(sentence: str) -> str:
    """Blank out what is quoted: its numbers are not the result's."""
    return QUOTED.sub(lambda match: "“" + "x" * (len(match[0]) - 2) + "”", sentence)


def readings(sentence: str) -> list[Reading]:
    """Return the numbers of a sentence whose words say what they can be."""
    text = bare(sentence)
    found: dict[int, Reading] = {}

    def put(match: re.Match[str], group: int, kind: Kind) -> None:
        start, end = match.span(group)
        if start >= 0 and start not in found:
            found[start] = Reading(start, end, number_of(match[group]), kind)

    for kind in KINDS:
        for match in kind.pattern.finditer(text):
            for group in range(1, 1 + match.re.groups):
                put(match, group, kind)
    for head, least, most in HEADS:
        if text.startswith(head) and ": " in text:
            kind = Kind(head, kind.pattern, least, most)
            begin = text.index(": ")
            for match in re.finditer(
                rf"(?<=[a-z):] ){GROUP}(?= for | \(|[;.]|, )", text
            ):
                if match.start() > begin and "by" not in text[begin : match.start()]:
                    put(match, 1, kind)
            break
    for match in PERCENT.finditer(text):
        start, end = match.span()
        if start in found or text[start:].startswith("95% interval"):
            continue
        signed = text[start] == "+"
        wide = signed or MAY_EXCEED.search(text) is not None
        least, most = (-INFINITE, INFINITE) if wide else (0.0, 1.0)
        kind = Kind("share", PERCENT, least, most)
        found[start] = Reading(start, end, number_of(match[0]), kind)
    for match in INTERVAL.finditer(text):
        middle = found.get(match.start(1))
        for group in (3, 4):
            start = match.start(group)
            if middle is not None:
                found.pop(start, None)
                put(match, group, middle.kind)
    return [found[start] for start in sorted(found)]


def _step(written: str) -> float:
    """Return one unit of the last digit that is written."""
    digits = re.sub(r"e.*|[%+−,-]", "", written)
    decimals = len(digits.partition(".")[2])
    power = re.search(r"e([+-]?\d+)", written)
    step = 10.0 ** (-decimals + (int(power[1]) if power else 0))
    return step / 100 if written.endswith("%") else step


def _intervals(text: str) -> Iterator[str]:
    for match in INTERVAL.finditer(text):
        number, _, low, high = match.groups()
        value, least, most = map(number_of, (number, low, high))
        if least > most:
            yield f"an interval from {low} to {high}"
        elif least == most:
            yield f"an interval of no width at {low}"
        elif number.endswith("%") == low.endswith("%"):
            slack = max(map(_step, (number, low, high)))
            if not least - slack <= value <= most + slack:
                yield f"{number} outside of its interval {low} to {high}"


def _counts(text: str) -> Iterator[str]:
    for match in OF.finditer(text):
        part, whole = (number_of(number) for number in match.groups())
        if part > whole:
            yield f"{match[0]}"
    for pattern in SHARED:
        for match in pattern.finditer(text):
            part, whole, share = map(number_of, match.group("part", "whole", "share"))
            if whole and abs(100 * part / whole - share) > _step(match["share"]):
                yield f"{part:g} of {whole:g} as {share:g}%"


def unsound(sentence: str) -> list[str]:
    """Say what is wrong with a sentence: no number, one that cannot be, an interval
    without a width or beside its number, more of some than there are, nothing said of
    nothing, a plural of one.
    """
    text = bare(sentence)
    problems = [f"no number ({match[0]})" for match in NO_NUMBER.finditer(text)]
    for reading in readings(sentence):
        if not reading.is_possible:
            written = text[reading.start : reading.end]
            problems.append(f"a {reading.kind.name} of {written}")
    problems += _intervals(text)
    problems += _counts(text)
    for pattern in VACUOUS:
        problems += [f"vacuous ({match[0]})" for match in pattern.finditer(text)]
    problems += [f"one of several ({m[0]})" for m in ONE_OF_SEVERAL.finditer(text)]
    return [f"{problem}: {sentence!r}" for problem in problems]


COMPARES = re.compile(
    r"\b((?<!at )most|(?<!at )least|more|less|larger|largest|smaller|smallest|lower"
    r"|lowest|higher|highest|better|best|worse|apart|alike|tighter|farther|jumps|differ"
    r"|differs|times as much|nearest|half of|weigh)\b",
    re.IGNORECASE,
)
BACKED = re.compile(
    r"\binterval\b|\bp = |\bp at most\b|not significant|not tested|is shown to"
    r"|\(.+ to .+\)|noise envelope|in noise for about"
)
SAYS_UNTESTED = re.compile(r"\b(was|were) not tested\b")
# Words that no test of ours bears out.
CERTAIN = re.compile(r"\bsignificant|\bshows that\b|\bproves? that\b|\bbecause of\b")
# Sentences that compare and leave nothing to be tested, by the kind of result:
# definitions, instructions, what is equal bit for bit.
PLAIN = {
    "compare": (
        r"have equal states everywhere|over the tokens that differ"
        r"|^The (two|texts of) .* first differ"
    ),
    "anatomy": r"bit for bit|The bar is the raw|largest absolute difference",
    # The last is a claim whose rate on noise is counted.
    "probe": (
        r"^One more probe|what counts is|^Better than guessing"
        r"|smallest p-value that is possible"
    ),
    "embed": r"^Nearest are",
    "search": r"^Nearest to|compared with every query",  # every row was looked at
    "project": (
        r"Do not trust|look apart|groups can be seen|^Neighbour is|dashed line|picture"
        r" in two dimensions|^The same holds at|smallest p-value that is possible"
    ),
    # How features are listed, and how baselines are fitted.
    "features": r"^The list has|^Every way uses|^Neurons were not compared",
    "steer": r"^The perplexity is that of other texts",
    # How the states were drawn; the second holds by a whole interval.
    "visibility": r"^Averaged over .* states were drawn|^Up to .* than half of",
    "cluster": r"points that are together here may be apart",
    "drift": (
        r"^In the output, the KL|^Local error is what|sites? differs? on equal input|of"
        r" the candidate differs in|^As they were given|differs? all the same|least"
        r" sensitive part|weights? differs?, |sites that differ"
    ),
}


def unbacked(result: hs.Result) -> list[str]:
    """Return the sentences that compare numbers without a test, where the result does
    not say that nothing was tested.
    """
    told = list(sentences(result))
    if any(SAYS_UNTESTED.search(sentence) for sentence in told):
        return []
    plain = re.compile(PLAIN.get(result.kind, r"(?!)"))
    return [
        sentence
        for sentence in told
        if COMPARES.search(sentence)
        and not BACKED.search(sentence)
        and not plain.search(sentence)
    ]

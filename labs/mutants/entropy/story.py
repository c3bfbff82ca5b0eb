"""The story of entropies: how certain every layer is."""

from collections.abc import Iterator

from hiddenscope.results import Explanation, Report, Result, Section, frozen
from hiddenscope.results.drawing import grid_of, labels, level
from hiddenscope.results.pictures import Lines, Series
from hiddenscope.results.report import Extremes
from hiddenscope.results.sentences import UNTESTED, counted, model_name

READING = (
    "Every state goes through the model's own final norm and unembedding, as if its"
    " layer were the last. The entropy of the prediction is 0 bits where one token has"
    " all of the probability, and log2 of the vocabulary where all tokens are equally"
    " likely."
)


@frozen
class EntropyReport(Report):
    """How certain the sites are, on average over all tokens."""

    texts: int
    tokens: int
    vocabulary: int
    # In bits, of the mean over all tokens.
    bits: Extremes
    # Of random states at the last layer.
    random_bits: float


def story(report: EntropyReport, result: Result) -> Iterator[Section]:
    """Yield one section: the entropy of every token, and its mean along the sites."""
    sites, name = labels(result.data, "site"), model_name(result)
    title = f"The entropy of what each layer of {name} would predict"
    grid = grid_of(result, ["entropy"], title)
    assert grid is not None, "there is an entropy for each site and token"
    mean = result.data["entropy_mean"].to_numpy()
    lines = Lines(
        f"The mean entropy at each layer of {name}",
        sites,
        (
            Series("mean over tokens", mean),
            level("random states", report.random_bits, len(sites)),
        ),
        y_name="entropy",
        unit="bits",
    )
    lowest, highest = report.bits.lowest, report.bits.highest
    random = f"random states have {report.random_bits:.4f}"
    sentences = [
        f"Over {counted(report.tokens, 'token')}, {lowest.site} is the most certain,"
        f" with a mean entropy of {lowest.value:.4f} bits.",
        f"{highest.site} is the least certain, with {highest.value:.4f} bits; {random}.",
    ]
    if len(sites) == 1:
        sentences = [
            f"Over {counted(report.tokens, 'token')}, {lowest.site} has a mean entropy"
            f" of {lowest.value:.4f} bits; {random}."
        ]
    yield Section(
        "How certain is each layer?",
        (*sentences, Explanation(UNTESTED)),
        (grid, lines),
        READING,
    )

"""The losses of texts along the windows, and what layers of a donor change in them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hiddenscope.analyses.graft.story import (
    ChangedThird,
    ChangedWindow,
    Estimate,
    LossReport,
)
from hiddenscope.errors import NotFinite
from hiddenscope.measures.grouped import reach_of_all
from hiddenscope.passes import Inputs, Pass
from hiddenscope.results.dataset import Attributes, Variables
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats, Ints

THIRDS = ("early", "middle", "late")
NATS = "nats per token"
ATTRIBUTES: Mapping[str, Attributes] = {
    "loss": {"long_name": "loss", "units": NATS},
    "loss_change": {"long_name": "change of the loss", "units": NATS},
    "loss_change_low": {"long_name": "lower end, 95%", "units": NATS},
    "loss_change_high": {"long_name": "upper end, 95%", "units": NATS},
    "agreement": {"long_name": "agreement", "units": "share of the tokens"},
    "agreement_low": {"long_name": "lower end, 95%", "units": "share of the tokens"},
    "agreement_high": {"long_name": "upper end, 95%", "units": "share of the tokens"},
}


class Losses(NamedTuple):
    """The mean loss of each text `[run, text]`, and how often the most likely next
    token is that of the model alone.

    The runs are those of the model, of the donor, and of the model with each window.
    """

    loss: Floats
    agreement: Floats


def measure_losses(
    inputs: Inputs, runs: Iterable[tuple[int, list[int], Pass]], run_count: int
) -> Losses:
    """Score the next token at every token of every text but its last.

    `runs` are the number of a run, the texts in it, and what it gave; of each batch of
    texts, the model's own run is the first.
    """
    loss = np.zeros((run_count, len(inputs)))
    agreement = np.zeros(loss.shape)
    of_model = torch.empty(0)
    assert min(inputs.lengths) > 1, "a text of one token has no next one"
    for row, texts, run in runs:
        assert run.logits is not None
        batch = inputs.some(texts)
        lengths = np.array(batch.lengths)
        ends = np.cumsum(lengths)
        # Every token but the last of a text predicts, every one but the first is next.
        predicts = np.delete(np.arange(ends[-1]), ends - 1)
        following = np.delete(batch.flat, ends - lengths)
        device = run.logits.device
        logits = run.logits[torch.from_numpy(predicts).to(device)].float()
        targets = torch.from_numpy(following).to(device)[:, None]
        losses = logits.logsumexp(-1) - logits.gather(1, targets)[:, 0]
        predicted = logits.argmax(-1)
        if row == 0:
            of_model = predicted
        counts = lengths - 1
        starts = np.cumsum(counts) - counts
        for table, values in ((loss, losses), (agreement, predicted == of_model)):
            sums = np.add.reduceat(values.cpu().double().numpy(), starts)
            table[row, texts] = sums / counts
    if not np.isfinite(loss).all():
        raise NotFinite(
            "No finite loss with layers of the donor",
            "the logits hold a NaN, or rule out a token of the texts",
            "Look at the weights of the donor, or load both in float32.",
        )
    return Losses(loss, agreement)


def compare_losses(
    windows: Sequence[tuple[Site, ...]],
    scores: Losses,
    by_third: Mapping[int, list[int]],
    groups: Ints,
    tokens: int,
) -> tuple[LossReport, Variables]:
    """Compare the loss with each window with that of the model alone, text by text."""
    change = (scores.loss[2:] - scores.loss[0]).T
    agreement = scores.agreement[2:].T
    changes = estimate(change, groups)
    agreements = estimate(agreement, groups)
    row = int(np.abs(change.mean(0)).argmax())
    fields: dict[str, Any] = {}
    thirds = {THIRDS[third]: rows for third, rows in sorted(by_third.items())}
    if thirds.keys() >= {"middle", "late"}:
        by_name = {name: change[:, rows].mean(1) for name, rows in thirds.items()}
        columns = list(by_name.values())
        agreeing = [agreement[:, rows].mean(1) for rows in thirds.values()]
        parts = zip(
            thirds.items(),
            estimate(np.stack(columns, 1), groups),
            estimate(np.stack(agreeing, 1), groups),
            strict=True,
        )
        for (name, rows), in_third, agrees in parts:
            fields[name] = ChangedThird(
                loss_change=in_third,
                agreement=agrees,
                from_=str(windows[rows[0]][0]),
                to=str(windows[rows[-1]][-1]),
            )
        others = [name for name in ("late", "early") if name in by_name]
        differences = [by_name[name] - by_name["middle"] for name in others]
        for name, difference in zip(
            others, estimate(np.stack(differences, 1), groups), strict=True
        ):
            fields[f"{name}_less_middle"] = difference
    report = LossReport(
        texts=change.shape[0],
        tokens=tokens,
        windows=len(windows),
        model=estimate(scores.loss[:1].T, groups)[0],
        donor=estimate(scores.loss[1:2].T, groups)[0],
        donor_agreement=estimate(scores.agreement[1:2].T, groups)[0],
        largest=ChangedWindow(
            loss_change=changes[row],
            from_=str(windows[row][0]),
            to=str(windows[row][-1]),
        ),
        raised=_names(windows, [window.side > 0 for window in changes]),
        lowered=_names(windows, [window.side < 0 for window in changes]),
        **fields,
    )
    arrays = {
        "loss": scores.loss[2:].mean(1),
        **_columns("loss_change", changes),
        **_columns("agreement", agreements),
    }
    variables: Variables = {}
    for name, values in arrays.items():
        variables[name] = "site", values.astype(np.float32), ATTRIBUTES[name]
    return report, variables


def estimate(values: Floats, groups: Ints) -> list[Estimate]:
    """Return the mean of every column of `[text, column]`, with intervals that hold all
    of them together.

    Without five groups, or where half of the groups have one value, there is none; if
    all of them have it, its width is 0.
    """
    means = values.mean(0)
    reach = reach_of_all(values, groups)
    estimates = []
    for column, mean in enumerate(means):
        low = high = None
        if reach is not None and np.isfinite(reach[column]):
            low = float(mean - reach[column])
            high = float(mean + reach[column])
        estimates.append(Estimate(value=float(mean), low=low, high=high))
    return estimates


def _columns(name: str, estimates: Sequence[Estimate]) -> dict[str, Floats]:
    """Return estimates as columns of the data, NaN where there is no interval."""
    columns = {}
    for end, suffix in (("value", ""), ("low", "_low"), ("high", "_high")):
        numbers = [getattr(window, end) for window in estimates]
        columns[f"{name}{suffix}"] = np.array(numbers, dtype=float)
    return columns


def _names(windows: Sequence[tuple[Site, ...]], selected: Sequence[bool]) -> list[str]:
    """Return the first sites of the selected windows."""
    pairs = zip(windows, selected, strict=True)
    return [str(window[0]) for window, is_selected in pairs if is_selected]

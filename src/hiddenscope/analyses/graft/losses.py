"""The losses of texts along the windows, and what layers of a donor change in them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hiddenscope.analyses.graft.story import (
    ChangedThird,
    ChangedWindow,
    LossReport,
)
from hiddenscope.measures.grouped import estimate, shares
from hiddenscope.passes.losses import Losses
from hiddenscope.results.dataset import Attributes, Variables
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats, Ints

THIRDS = ("early", "middle", "late")
NATS, SHARE = "nats per token", "share of the tokens"


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
    agreements = shares(agreement, groups)
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
            shares(np.stack(agreeing, 1), groups),
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
        donor_agreement=shares(scores.agreement[1:2].T, groups)[0],
        largest=ChangedWindow(
            loss_change=changes[row],
            from_=str(windows[row][0]),
            to=str(windows[row][-1]),
        ),
        raised=_names(windows, [window.side > 0 for window in changes]),
        lowered=_names(windows, [window.side < 0 for window in changes]),
        **fields,
    )
    loss = scores.loss[2:].mean(1).astype(np.float32)
    variables: Variables = {
        "loss": ("site", loss, {"long_name": "loss", "units": NATS})
    }
    for name, words, units, estimates in (
        ("loss_change", "change of the loss", NATS, changes),
        ("agreement", "agreement", SHARE, agreements),
    ):
        ends = [(window.value, window.low, window.high) for window in estimates]
        variables |= with_ends(name, words, units, np.array(ends, float))
    return report, variables


def with_ends(name: str, words: str, units: str, rows: Floats) -> Variables:
    """Return numbers with the ends of their intervals `[window, 3]` as variables."""
    variables: Variables = {}
    long_names = {"": words, "_low": "lower end, 95%", "_high": "upper end, 95%"}
    for (end, long_name), values in zip(long_names.items(), rows.T, strict=True):
        attributes: Attributes = {"long_name": long_name, "units": units}
        variables[f"{name}{end}"] = "site", values.astype(np.float32), attributes
    return variables


def _names(windows: Sequence[tuple[Site, ...]], selected: Sequence[bool]) -> list[str]:
    """Return the first sites of the selected windows."""
    pairs = zip(windows, selected, strict=True)
    return [str(window[0]) for window, is_selected in pairs if is_selected]

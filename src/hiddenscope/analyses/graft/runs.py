"""Runs of one prompt: in both models, and in the model with each window grafted."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from hiddenscope.model import Model
from hiddenscope.modules import hooks
from hiddenscope.passes import Inputs, Pass, Replace, edit, record, resume
from hiddenscope.sites import Site
from hiddenscope.states import States

Window: TypeAlias = tuple[Site, ...]


class Runs:
    """One prompt in both models, and in the model with each window grafted.

    `ungrafted` are the logits of both models as they are.
    """

    def __init__(
        self,
        model: Model,
        donor: Model,
        prompt: Inputs,
        windows: Sequence[Window],
        *,
        blocks: bool,
    ) -> None:
        self.model = model
        self.donor = donor
        self.prompt = prompt
        self.windows = windows
        self.blocks = blocks
        self.notes: tuple[str, ...] = ()
        # The pass is resumed with the model's states below each window of blocks, or
        # with the donor's states.
        below = {Site(window[0].layer - 1) for window in windows if window[0].layer}
        grafted = set().union(*windows)
        model_sites = sorted(below) if blocks else ()
        donor_sites = () if blocks else sorted(grafted)
        model_run = record(model, prompt, model_sites, logits=True)
        donor_run = record(donor, prompt, donor_sites, logits=True)
        self.ungrafted = {"model": _last(model_run), "donor": _last(donor_run)}
        states = model_run.states if blocks else donor_run.states
        assert isinstance(states, States)
        self.states = states

    def grafted(self) -> Iterator[Tensor]:
        """Yield the logits of the last token with each window grafted."""
        for window in self.windows:
            if self.blocks:
                entry = Site((window[0].layer or 0) - 1)
                with hooks.substituting(self._donor_forwards(window)):
                    run = self._resume(entry)
            elif window[0].part:
                changes: dict[str | Site, Any] = {
                    site: Replace(self.states[site]) for site in window
                }
                run = edit(self.model, self.prompt, changes, (), logits=True)
            else:
                run = self._resume(window[0])
            yield _last(run)

    def _resume(self, entry: Site) -> Pass:
        run = resume(self.model, self.prompt, entry, self.states[entry], ())
        self.notes = run.notes
        return run

    def _donor_forwards(self, window: Window) -> dict[nn.Module, Callable[..., Any]]:
        """Return the donor's forward for each of the model's blocks in a window."""
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        for site in window:
            number = (site.layer or 0) - 1
            path = self.model.anatomy.stacks[0].blocks[number].path
            donor_path = self.donor.anatomy.stacks[0].blocks[number].path
            block = self.model.module.get_submodule(path)
            forwards[block] = self.donor.module.get_submodule(donor_path).forward
        return forwards


def _last(run: Pass) -> Tensor:
    assert run.logits is not None
    return run.logits[-1]

"""A sweep: what a model gives to some tokens, as it is, and with a direction added or
ablated at one site after another.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.steer.steered import Steered
from hiddenscope.directions.direction import changed_sites, in_stack
from hiddenscope.errors import NotFinite, PassError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import (
    Change,
    Inputs,
    Pass,
    Project,
    Texts,
    edit,
    editing,
    record,
    resume,
)
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.sites import Site
from hiddenscope.states import Pair, States
from hiddenscope.states.arrays import Floats

How: TypeAlias = Literal["add", "ablate"]
LogProbs: TypeAlias = list[Floats]
"""For each text [position, token]."""

# Every sixth token of a masked language model's texts is masked, and read there.
MASKED = 6
# Floats at a time, 64 MiB of float32.
MOST_LOGITS = 2**24
BATCH_TOKENS = 2048

T = TypeVar("T")


def masked_model(model: Model) -> bool:
    """Tell whether it fills in masked tokens and does not continue a text."""
    return not model.anatomy.stacks[-1].causal


class Reads(NamedTuple):
    """Texts, and for each the positions and tokens whose log-probabilities are read."""

    inputs: Inputs
    positions: list[Sequence[int]]
    tokens: list[Sequence[tuple[int, ...]]]


def prompt_reads(model: Model, prompts: Inputs, answers: tuple[int, ...]) -> Reads:
    """Read the answers after each prompt, or at its mask token."""
    tokenizer: Any = model.tokenizer
    positions: list[Sequence[int]] = []
    for number, ids in enumerate(prompts.of("decoder").ids):
        places = [len(ids) - 1]
        if masked_model(model):
            mask = tokenizer.mask_token_id
            places = [place for place, token in enumerate(ids) if token == mask]
        if len(places) != 1:
            raise TextError(
                f"Prompt {number} must have one mask token",
                f"it has {len(places)}",
                f"Put one {tokenizer.mask_token} where the answer goes.",
            )
        positions.append(places)
    return Reads(prompts, positions, [[answers]] * len(prompts))


def quality_reads(model: Model, texts: Texts | Inputs) -> Reads:
    """Read every token of plain texts that the model can predict.

    An encoder reads half of a text, and its decoder predicts the rest. For a masked
    language model every sixth token is masked, from another position on in each text,
    but no special tokens.
    """
    inputs = model.encode(texts)
    tokenizer: Any = model.tokenizer
    special = set(getattr(tokenizer, "all_special_ids", ()))
    all_ids: list[tuple[int, ...]] = []
    decoder_ids = []
    positions: list[Sequence[int]] = []
    read: list[Sequence[tuple[int, ...]]] = []
    for number, ids in enumerate(inputs.ids):
        places: Sequence[int] = range(len(ids) - 1)
        tokens: Sequence[int] = ids[1:]
        if inputs.targets is not None:
            half = len(ids) // 2
            tokens = ids[half:] if half else ()
            places = range(len(tokens))
            ids = ids[: max(half, 1)]
            decoder_ids.append((inputs.targets.ids[number][0], *tokens[:-1]))
        elif masked_model(model):
            words = [place for place, token in enumerate(ids) if token not in special]
            places = words[number % MASKED :: MASKED] or words[:1]
            tokens = [ids[place] for place in places]
            masked_ids = np.array(ids)
            masked_ids[places] = tokenizer.mask_token_id
            ids = tuple(masked_ids.tolist())
        if not tokens:
            raise TextError(
                f"Cannot measure the perplexity of text {number}",
                "it has one token, and there is nothing to predict",
                "Give a longer text.",
            )
        all_ids.append(ids)
        positions.append(places)
        read.append([(token,) for token in tokens])
    targets = Inputs(tuple(decoder_ids)) if decoder_ids else None
    return Reads(Inputs(tuple(all_ids), targets=targets), positions, read)


class Intervention(NamedTuple):
    """A change of states: a vector at every changed site, and its strengths.

    A batch holds its texts once for each strength.
    """

    how: How
    vectors: Mapping[Site, Tensor]
    strengths: tuple[float, ...]

    def changes(self, texts: int) -> dict[str | Site, Change]:
        """Return the change at each site of a batch.

        `texts` is the number of texts that the batch holds for each strength.
        """
        changes: dict[str | Site, Change] = {}
        strengths = torch.tensor(self.strengths, dtype=torch.float64)[:, None]
        for site, vector in self.vectors.items():
            changes[site] = Project(vector)
            if self.how == "add":
                shifts = (strengths * vector).repeat_interleave(texts, 0)[:, None]
                changes[site] = partial(_shifted, shifts)
        return changes


def _shifted(shifts: Tensor, states: Tensor) -> Tensor:
    return states + shifts.to(states.device, states.dtype)


class Measured(NamedTuple):
    """Log-probabilities before steering, and after it by site and strength."""

    before: LogProbs
    after: list[list[LogProbs]]

    @property
    def answers_before(self) -> Floats:
        """Return [text, answer]: prompts are read at one position."""
        return np.array(self.before)[:, 0]

    @property
    def answers_after(self) -> Floats:
        """Return [site, strength, text, answer]."""
        return np.array(self.after)[:, :, :, 0]


@dataclass
class Sweep:
    """A direction added or ablated at one site after another, with every strength.

    Log-probabilities are read off the last states of a pass. The head makes a row of
    the whole vocabulary for each token. So passes end before it, and logits are made of
    the rows that are read, some at a time; a model for which that does not give its
    logits is run with its head.
    """

    model: Model
    steered: Steered
    how: How
    strengths: tuple[float, ...]
    upwards: bool
    notes: list[str]

    def __post_init__(self) -> None:
        # Strength 0 is the model as it is, and is not run again.
        self.steps = tuple(strength for strength in self.strengths if strength)
        self.last = self.model.anatomy.sites[-1]
        self.unembedding: Unembedding | None = None
        # What a pass must give, and how many tokens it may have.
        self.outputs: dict[str, Any] = {"sites": (), "logits": True}
        self.batch_tokens = MOST_LOGITS // self.model.text_encoder.vocabulary
        # Raised where logits depend on more than the state of their own token.
        with suppress(PassError):
            self.unembedding = Unembedding(self.model)
            self.outputs = {"sites": self.last, "logits": False}
            self.batch_tokens = BATCH_TOKENS

    def intervention(self, site: Site) -> Intervention:
        """Return what steers at one site."""
        known = tuple(self.steered.vectors)
        changed = changed_sites(known, [site], upwards=self.upwards)
        vectors = {upper: self.steered.vectors[upper] for upper in changed}
        return Intervention(self.how, vectors, self.steps)

    def with_unchanged(self, steered: Sequence[T], before: T) -> list[T]:
        """Return one value for each strength: `before` where the strength is 0."""
        by_strength = dict(zip(self.steps, steered, strict=True))
        return [by_strength.get(strength, before) for strength in self.strengths]

    def measure(
        self, what: str, reads: Reads, states: States | Pair | None
    ) -> Measured:
        """Measure texts with the model as it is, and by site and strength.

        `states` are those of the texts at the steered sites, where passes are resumed.
        Inside a block they cannot be: there the whole model is run while its states
        change.
        """

        def unchanged(inputs: Inputs, texts: list[int]) -> Pass:
            return record(self.model, inputs, **self.outputs)

        sites = self.steered.sites
        runs = 1 + len(sites) * len(self.steps)
        with progress.track(what, total=sum(reads.inputs.costs) * runs) as advance:
            (before,) = self._log_probs(reads, 1, unchanged, advance)
            after = []
            for site in sites:
                steered = []
                if self.steps:
                    steered = self._steered(reads, states, site, advance)
                after.append(self.with_unchanged(steered, before))
        return Measured(before, after)

    def _steered(
        self,
        reads: Reads,
        states: States | Pair | None,
        site: Site,
        advance: progress.Advance,
    ) -> list[LogProbs]:
        """Return the log-probabilities with each strength, and note once why blocks
        could not be skipped.
        """
        intervention = self.intervention(site)
        notes = []
        if site.part:
            notes = [f"The whole model was run for {site}, which is inside a block."]

        def run(inputs: Inputs, texts: list[int]) -> Pass:
            changes = intervention.changes(len(texts))
            if site.part or states is None:
                return edit(self.model, inputs, changes, **self.outputs)
            stack = in_stack(states, site)
            rows = torch.cat([stack[site][stack.tokens.rows(text)] for text in texts])
            # The entry is changed already where the pass begins.
            del changes[site]
            vector = intervention.vectors[site]
            if self.how == "ablate":
                changed = Project(vector).of(rows)
            else:
                copies = [_shifted(step * vector, rows) for step in self.steps]
                changed = torch.cat(copies)
            steering: AbstractContextManager[None] = nullcontext()
            if changes:
                steering = editing(self.model, changes)
            with steering:
                result = resume(self.model, inputs, site, changed, **self.outputs)
            notes.extend(result.notes)
            return result

        values = self._log_probs(reads, len(self.steps), run, advance)
        if notes and notes[0] not in self.notes:
            self.notes.append(notes[0])
        return values

    def _log_probs(
        self,
        reads: Reads,
        copies: int,
        run: Callable[[Inputs, list[int]], Pass],
        advance: progress.Advance,
    ) -> list[LogProbs]:
        """Return the log-probabilities of every text, for each of its copies in a
        batch.
        """
        values: list[dict[int, Floats]] = [{} for _ in range(copies)]
        most = max(1, self.batch_tokens // copies)
        for texts, inputs in reads.inputs.batches(self.model, batch_tokens=most):
            copied = inputs.some([*range(len(texts))] * copies)
            results = self._read(run(copied, texts), reads, texts * copies)
            for row, text_values in enumerate(results):
                copy, place = divmod(row, len(texts))
                values[copy][texts[place]] = text_values
            advance(copies * sum(inputs.costs))
        return [[copy[text] for text in range(len(reads.inputs))] for copy in values]

    def _read(self, run: Pass, reads: Reads, texts: Sequence[int]) -> LogProbs:
        """Return the log-probabilities of each text in a pass."""
        lengths = reads.inputs.of("decoder").lengths
        rows = []
        tokens: list[tuple[int, ...]] = []
        ends = []
        start = 0
        for text in texts:
            rows += [start + position for position in reads.positions[text]]
            tokens += reads.tokens[text]
            ends.append(len(rows))
            start += lengths[text]
        # The logits of the rows, as many at a time as fit.
        if self.unembedding is None:
            assert run.logits is not None
            blocks: Iterable[Tensor] = [run.logits[rows].float()]
        else:
            states = run.states[self.last][rows]
            step = max(1, MOST_LOGITS // self.unembedding.vocabulary)
            blocks = self.unembedding.blocks(states, self.last, step)
        parts = []
        for logits in blocks:
            columns = torch.tensor(tokens[: len(logits)], device=logits.device)
            total = logits.logsumexp(-1, keepdim=True)
            parts.append(logits.gather(1, columns) - total)
            del tokens[: len(logits)]
        values = torch.cat(parts).double().cpu().numpy()
        if np.isnan(values).any():
            raise NotFinite(
                f"No log-probabilities of {self.model.name}",
                "they hold a NaN and the states none",
                "Steer with less strength.",
            )
        return np.split(values, ends[:-1])

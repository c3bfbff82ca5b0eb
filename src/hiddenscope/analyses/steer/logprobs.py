"""Log-probabilities that a model gives to tokens, as it is or while it is steered."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor

from hiddenscope.analyses.steer.direction import in_stack
from hiddenscope.analyses.steer.intervention import Intervention
from hiddenscope.analyses.steer.reads import Reads
from hiddenscope.errors import NotFinite, PassError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, Pass, edit, editing, record, resume
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.sites import Site
from hiddenscope.states import Pair, States
from hiddenscope.states.arrays import Floats

LogProbs: TypeAlias = list[Floats]
"""For each text [position, token]."""

# Floats at a time, 64 MiB of float32.
MOST_LOGITS = 2**24
BATCH_TOKENS = 2048


class Outputs(TypedDict):
    """What a pass must give: keyword arguments of `record`, `edit` and `resume`."""

    sites: tuple[()] | Site
    logits: bool


class Reader:
    """Reads log-probabilities off the last states of a pass, at some positions.

    The head makes a row of the whole vocabulary for each token. So passes end before
    it, and logits are made of the rows that are read, some at a time; a model for which
    that does not give its logits is run with its head.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.last = model.anatomy.sites[-1]
        self.unembedding: Unembedding | None = None
        # Raised where logits depend on more than the state of their own token.
        with suppress(PassError):
            self.unembedding = Unembedding(model, self.last)

    @property
    def outputs(self) -> Outputs:
        """Return what a pass must give."""
        if self.unembedding is None:
            return {"sites": (), "logits": True}
        return {"sites": self.last, "logits": False}

    def batch_tokens(self, copies: int) -> int:
        """Return how many tokens a batch may have that is copied so often."""
        most = BATCH_TOKENS
        if self.unembedding is None:
            most = MOST_LOGITS // self.model.text_encoder.vocabulary
        return max(1, most // copies)

    def read(self, run: Pass, reads: Reads, texts: Sequence[int]) -> LogProbs:
        """Return the log-probabilities of each text in a pass."""
        lengths = reads.inputs.of("decoder").lengths
        rows: list[int] = []
        tokens: list[tuple[int, ...]] = []
        counts: list[int] = []
        start = 0
        for text in texts:
            rows += [start + position for position in reads.positions[text]]
            tokens += reads.tokens[text]
            counts.append(len(reads.positions[text]))
            start += lengths[text]
        values = self._read_rows(run, torch.tensor(rows), torch.tensor(tokens))
        array = values.double().cpu().numpy()
        if np.isnan(array).any():
            raise NotFinite(
                f"No log-probabilities of {self.model.name}",
                "they hold a NaN and the states none",
                "Steer with less strength.",
            )
        return np.split(array, np.cumsum(counts)[:-1])

    def _read_rows(self, run: Pass, rows: Tensor, tokens: Tensor) -> Tensor:
        if self.unembedding is None:
            assert run.logits is not None
            return _of_logits(run.logits[rows.to(run.logits.device)].float(), tokens)
        states = in_stack(run.states, self.last)[self.last]
        head_inputs = self.unembedding.head_inputs(states[rows.to(states.device)])
        step = max(1, MOST_LOGITS // self.unembedding.vocabulary)
        parts = []
        for start in range(0, len(head_inputs), step):
            logits = self.unembedding.logits(head_inputs[start : start + step])
            parts.append(_of_logits(logits, tokens[start : start + step]))
        return torch.cat(parts)


def _of_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    total = logits.logsumexp(-1, keepdim=True)
    return logits.gather(1, tokens.to(logits.device)) - total


def log_probs(
    reader: Reader, reads: Reads, advance: Callable[[float], None]
) -> LogProbs:
    """Return the log-probabilities of the model as it is."""

    def run(inputs: Inputs, texts: list[int]) -> Pass:
        return record(reader.model, inputs, **reader.outputs)

    (values,) = _in_batches(reader, reads, 1, run, advance)
    return values


def steered_log_probs(
    reader: Reader,
    reads: Reads,
    states: States | Pair | None,
    intervention: Intervention,
    advance: Callable[[float], None],
) -> tuple[list[LogProbs], str]:
    """Return the log-probabilities with each strength, and a note on skipped blocks.

    `states` are those of the texts at the entry, where the pass is resumed. Inside a
    block it cannot be: there the whole model is run while its states change. The note
    says why blocks could not be skipped, and is empty if they were.
    """
    model, entry = reader.model, intervention.entry
    notes: list[str] = []
    if entry.part:
        notes.append(f"The whole model was run for {entry}, which is inside a block.")

    def run(inputs: Inputs, texts: list[int]) -> Pass:
        if entry.part or states is None:
            changes = intervention.changes(len(texts), entry=True)
            return edit(model, inputs, changes, **reader.outputs)
        stack = in_stack(states, entry)
        rows = torch.cat([stack[entry][stack.tokens.rows(text)] for text in texts])
        changed = intervention.at_entry(rows)
        above = intervention.changes(len(texts), entry=False)
        steering: AbstractContextManager[None] = nullcontext()
        if above:
            steering = editing(model, above)
        with steering:
            result = resume(model, inputs, entry, changed, **reader.outputs)
        notes.extend(result.notes)
        return result

    values = _in_batches(reader, reads, len(intervention.strengths), run, advance)
    return values, notes[0] if notes else ""


def _in_batches(
    reader: Reader,
    reads: Reads,
    copies: int,
    run: Callable[[Inputs, list[int]], Pass],
    advance: Callable[[float], None],
) -> list[LogProbs]:
    """Return the log-probabilities of every text, for each of its copies in a batch."""
    values: list[dict[int, Floats]] = [{} for _ in range(copies)]
    batch_tokens = reader.batch_tokens(copies)
    for texts, inputs in reads.inputs.batches(reader.model, batch_tokens=batch_tokens):
        copied = inputs.some([*range(len(texts))] * copies)
        results = reader.read(run(copied, texts), reads, texts * copies)
        for row, text_values in enumerate(results):
            copy, place = divmod(row, len(texts))
            values[copy][texts[place]] = text_values
        advance(copies * sum(inputs.costs))
    return [[copy[text] for text in range(len(reads.inputs))] for copy in values]

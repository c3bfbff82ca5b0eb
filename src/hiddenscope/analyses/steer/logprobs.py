"""Log-probabilities: what a model gives to chosen tokens of texts, as it is or while
its states are changed.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.steer.direction import in_stack
from hiddenscope.errors import NotFinite, PassError, TextError, without_panic
from hiddenscope.model import Model
from hiddenscope.passes import (
    Add,
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

How: TypeAlias = Literal["add", "ablate"]
LogProbs: TypeAlias = list[NDArray[np.float64]]  # for each text [position, token]
Advance: TypeAlias = Callable[[float], None]

MASKED = (
    # Every sixth token of a masked language model's texts is masked, and read there.
    6
)
MOST_LOGITS = 2**24  # numbers at a time, 64 MiB of float32
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Reads:
    """Texts, the positions at which their logits are read, and the tokens whose
    log-probabilities are kept there.
    """

    inputs: Inputs
    positions: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def count(self) -> int:
        """How many positions are read."""
        return sum(map(len, self.positions))


@dataclass(frozen=True)
class Intervention:
    """A change of states: a vector at every site that is changed, how it is applied,
    and with which strengths.

    A batch holds its texts once for each strength.
    """

    how: How
    vectors: Mapping[Site, Tensor]
    strengths: tuple[float, ...]

    @property
    def entry(self) -> Site:
        """The lowest site that is changed."""
        return min(self.vectors)

    def at_entry(self, states: Tensor) -> Tensor:
        """The states [token, width] at the entry after the change, once for each
        strength.
        """
        vector = self.vectors[self.entry]
        if self.how == "ablate":
            return Project(vector).of(states)
        return torch.cat(
            [Add(vector, scale=strength).of(states) for strength in self.strengths]
        )

    def changes(self, texts: int, *, entry: bool) -> dict[str | Site, Change]:
        """The change at each site of a batch of so many texts, with that at the entry
        or without.
        """
        chosen = {
            site: vector
            for site, vector in self.vectors.items()
            if entry or site != self.entry
        }
        return {site: self._change(vector, texts) for site, vector in chosen.items()}

    def _change(self, vector: Tensor, texts: int) -> Change:
        if self.how == "ablate":
            return Project(vector)
        steps = torch.tensor(self.strengths, dtype=torch.float64)[:, None] * vector
        shifts = steps.repeat_interleave(texts, 0)[:, None]
        return lambda states: states + shifts.to(states.device, states.dtype)


def masked_model(model: Model) -> bool:
    """Whether it is a masked language model, which fills in tokens and does not
    continue a text.
    """
    return not model.anatomy.stacks[-1].causal


def check_head(model: Model) -> None:
    """Refuse a model that gives no logits, or a masked language model without a mask
    token.
    """
    if not model.anatomy.makes_logits:
        remedy = "Load it with task='causal-lm' or 'masked-lm'."
        raise PassError(
            f"Cannot steer {model.name}", "it has no head, and makes no logits", remedy
        )
    if masked_model(model) and _mask(model) is None:
        reason = "it is a masked language model, and its tokenizer has no mask token"
        raise PassError(
            f"Cannot steer {model.name}",
            reason,
            "Load it with the tokenizer that has one.",
        )


def _mask(model: Model) -> int | None:
    mask = getattr(model.tokenizer, "mask_token_id", None)
    return mask if isinstance(mask, int) else None


def prompt_reads(model: Model, prompts: Inputs, answers: tuple[int, ...]) -> Reads:
    """The log-probabilities of the answers after each prompt, or at its mask token."""
    positions = []
    for number, ids in enumerate(prompts.ids):
        if prompts.targets is not None:
            positions.append((len(prompts.targets.ids[number]) - 1,))
        else:
            positions.append(
                (
                    (
                        _mask_position(model, number, ids)
                        if masked_model(model)
                        else len(ids) - 1
                    ),
                )
            )
    return Reads(prompts, tuple(positions), ((answers,),) * len(prompts))


def _mask_position(model: Model, number: int, ids: Sequence[int]) -> int:
    positions = [
        position for position, token in enumerate(ids) if token == _mask(model)
    ]
    if len(positions) != 1:
        remedy = (
            f"Put one {getattr(model.tokenizer, 'mask_token', 'mask')} where the answer"
            " goes."
        )
        raise TextError(
            f"Prompt {number} must have one mask token",
            f"it has {len(positions)}",
            remedy,
        )
    return positions[0]


def quality_reads(model: Model, texts: Texts | Inputs) -> Reads:
    """The log-probability of every token of plain texts that the model can predict."""
    inputs = model.encode(texts)
    if inputs.targets is not None:
        reads = _second_halves(inputs)
    elif masked_model(model):
        reads = _masked_tokens(model, inputs)
    else:
        positions = tuple(tuple(range(length - 1)) for length in inputs.lengths)
        reads = Reads(
            inputs,
            positions,
            tuple(tuple((token,) for token in ids[1:]) for ids in inputs.ids),
        )
    for number, read in enumerate(reads.positions):
        if not read:
            reason = "it has one token, and there is nothing to predict"
            raise TextError(
                f"Cannot measure the perplexity of text {number}",
                reason,
                "Give a longer text.",
            )
    return reads


def _second_halves(inputs: Inputs) -> Reads:
    """The encoder reads the first half of a text, and the decoder predicts the second."""
    assert inputs.targets is not None
    halves = [len(ids) // 2 for ids in inputs.ids]
    rests = [
        ids[half:] if half else () for half, ids in zip(halves, inputs.ids, strict=True)
    ]
    firsts = tuple(
        ids[: max(half, 1)] for half, ids in zip(halves, inputs.ids, strict=True)
    )
    targets = tuple(
        (start[0], *rest[:-1])
        for start, rest in zip(inputs.targets.ids, rests, strict=True)
    )
    positions = tuple(tuple(range(len(rest))) for rest in rests)
    tokens = tuple(tuple((token,) for token in rest) for rest in rests)
    return Reads(Inputs(firsts, targets=Inputs(targets)), positions, tokens)


def _masked_tokens(model: Model, inputs: Inputs) -> Reads:
    """Every sixth token is masked, from another position on in each text; special
    tokens are not.
    """
    special, mask = set(getattr(model.tokenizer, "all_special_ids", ())), _mask(model)
    assert mask is not None
    shown, chosen = [], []
    for number, ids in enumerate(inputs.ids):
        words = [position for position, token in enumerate(ids) if token not in special]
        positions = words[number % MASKED :: MASKED] or words[:1]
        chosen.append(tuple(positions))
        shown.append(
            tuple(
                mask if position in positions else token
                for position, token in enumerate(ids)
            )
        )
    tokens = tuple(
        tuple((ids[position],) for position in positions)
        for ids, positions in zip(inputs.ids, chosen, strict=True)
    )
    return Reads(Inputs(tuple(shown)), tuple(chosen), tokens)


class Reader:
    """Reads log-probabilities off the last states of a pass, at the positions that are
    asked for.

    The head makes a row of the whole vocabulary for each token. So passes end before
    it, and logits are made of the rows that are read, some at a time; a model for which
    that does not give its logits is run with its head.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.last = model, model.anatomy.sites[-1]
        self.unembedding: Unembedding | None = None
        # Raised where logits depend on more than the state of their own token.
        with suppress(PassError):
            self.unembedding = Unembedding(model, self.last)

    @property
    def keeps(self) -> dict[str, Any]:
        """What a pass must give, as keyword arguments of `record`, `edit` and `resume`."""
        if self.unembedding is None:
            return {"sites": (), "logits": True}
        return {"sites": self.last, "logits": False}

    def batch_tokens(self, copies: int) -> int | None:
        """How many tokens a batch may have, so often as it is copied."""
        most = (
            MOST_LOGITS // self.model.text_encoder.vocabulary
            if self.unembedding is None
            else BATCH_TOKENS
        )
        return max(1, most // copies)

    def read(
        self, run: Pass, reads: Reads, texts: Sequence[int]
    ) -> list[NDArray[np.float64]]:
        """The log-probabilities of each text in a pass."""
        lengths = [reads.inputs.of("decoder").lengths[text] for text in texts]
        starts = np.cumsum([0, *lengths[:-1]])
        rows = np.concatenate(
            [
                start + np.array(reads.positions[text])
                for start, text in zip(starts, texts, strict=True)
            ]
        )
        tokens = torch.tensor([ids for text in texts for ids in reads.tokens[text]])
        values = (
            self._values(run, torch.from_numpy(rows), tokens).double().cpu().numpy()
        )
        if np.isnan(values).any():
            reason = "they hold a NaN and the states none"
            raise NotFinite(
                f"No log-probabilities of {self.model.name}",
                reason,
                "Steer with less strength.",
            )
        return np.split(
            values, np.cumsum([len(reads.positions[text]) for text in texts])[:-1]
        )

    def _values(self, run: Pass, rows: Tensor, tokens: Tensor) -> Tensor:
        if self.unembedding is None:
            assert run.logits is not None
            return _of_logits(run.logits[rows.to(run.logits.device)].float(), tokens)
        states = in_stack(run.states, self.last)[self.last]
        inputs = self.unembedding.head_inputs(states[rows.to(states.device)])
        step = max(1, MOST_LOGITS // self.unembedding.vocabulary)
        parts = [slice(start, start + step) for start in range(0, len(inputs), step)]
        return torch.cat(
            [
                _of_logits(self.unembedding.logits(inputs[part]), tokens[part])
                for part in parts
            ]
        )


def _of_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(1, tokens.to(logits.device)) - logits.logsumexp(
        -1, keepdim=True
    )


def log_probs(reader: Reader, reads: Reads, advance: Advance) -> LogProbs:
    """The log-probabilities of the model as it is."""
    (values,) = _in_batches(
        reader,
        reads,
        1,
        lambda inputs, _: record(reader.model, inputs, **reader.keeps),
        advance,
    )
    return values


def steered_log_probs(
    reader: Reader,
    reads: Reads,
    states: States | Pair | None,
    intervention: Intervention,
    advance: Advance,
) -> tuple[list[LogProbs], str]:
    """The log-probabilities with each strength, and a note if the blocks below the
    entry could not be skipped.

    `states` are those of the texts at the entry, where the pass is entered. Inside a
    block it cannot be: there the whole model is run while its states change.
    """
    model, entry = reader.model, intervention.entry
    notes: list[str] = (
        [f"The whole model was run for {entry}, which is inside a block."]
        if entry.part
        else []
    )

    def one_pass(inputs: Inputs, texts: list[int]) -> Pass:
        if entry.part or states is None:
            return edit(
                model,
                inputs,
                intervention.changes(len(texts), entry=True),
                **reader.keeps,
            )
        stack = in_stack(states, entry)
        rows = torch.cat([stack[entry][stack.tokens.rows(text)] for text in texts])
        above = intervention.changes(len(texts), entry=False)
        changed: AbstractContextManager[None] = (
            editing(model, above) if above else nullcontext()
        )
        with changed:
            run = resume(
                model, inputs, entry, intervention.at_entry(rows), **reader.keeps
            )
        notes.extend(run.notes)
        return run

    values = _in_batches(reader, reads, len(intervention.strengths), one_pass, advance)
    return values, notes[0] if notes else ""


def _in_batches(
    reader: Reader,
    reads: Reads,
    copies: int,
    one_pass: Callable[[Inputs, list[int]], Pass],
    advance: Advance,
) -> list[LogProbs]:
    """The log-probabilities of every text in so many copies."""
    values: list[dict[int, NDArray[np.float64]]] = [{} for _ in range(copies)]
    for texts, inputs in reads.inputs.batches(
        reader.model, batch_tokens=reader.batch_tokens(copies)
    ):
        run = one_pass(inputs.some([*range(len(texts))] * copies), texts)
        for row, text_values in enumerate(reader.read(run, reads, texts * copies)):
            values[row // len(texts)][texts[row % len(texts)]] = text_values
        advance(copies * sum(inputs.costs))
    return [[copy[text] for text in range(len(reads.inputs))] for copy in values]


def cannot_generate(model: Model) -> str:
    """Why the model cannot continue a text; empty if it can."""
    if masked_model(model):
        return "it is a masked language model, which does not continue a text"
    can: Any = getattr(model.module, "can_generate", None)
    return "" if can is not None and can() else "its module has no generate method"


def check_new_tokens(model: Model, prompts: Inputs, new_tokens: int) -> None:
    """Refuse more new tokens than the model takes."""
    longest, window = max(prompts.lengths), model.text_encoder.window
    if window and prompts.targets is None and longest + new_tokens > window:
        reason = (
            f"with the longest prompt that makes {longest + new_tokens:,} tokens, and"
            f" {model.name} takes {window:,}"
        )
        raise TextError(
            f"new_tokens is {new_tokens:,}", reason, "Give fewer, or shorter prompts."
        )


def generate(
    model: Model, prompts: Inputs, new_tokens: int, intervention: Intervention | None
) -> list[list[str]]:
    """Greedy continuations: for each strength a text for each prompt."""
    copies = len(intervention.strengths) if intervention else 1
    texts: list[list[str]] = [[""] * len(prompts) for _ in range(copies)]
    # One length at a time, so that nothing is padded.
    for length in sorted(set(prompts.lengths)):
        same = [number for number, one in enumerate(prompts.lengths) if one == length]
        ids = torch.tensor(
            [prompts.ids[number] for number in same] * copies, device=model.device
        )
        changes = intervention.changes(len(same), entry=True) if intervention else {}
        with model.lock, editing(model, changes) if changes else nullcontext():
            sequences = _generated(model, ids, new_tokens)
        new = sequences[:, 1 if prompts.targets is not None else length :].tolist()
        for row, tokens in enumerate(new):
            texts[row // len(same)][same[row % len(same)]] = _decoded(model, tokens)
    return texts


def _generated(model: Model, ids: Tensor, new_tokens: int) -> Tensor:
    module: Any = model.module
    greedy = {
        "do_sample": False,
        "num_beams": 1,
        "use_cache": True,
        "pad_token_id": model.text_encoder.pad,
    }
    output = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **greedy
    )
    sequences: Tensor = getattr(output, "sequences", output)
    return sequences


def _decoded(model: Model, ids: list[int]) -> str:
    """New tokens as text, up to where the model ended it."""
    ends = getattr(
        getattr(model.module, "generation_config", None), "eos_token_id", None
    )
    known = {ends} if isinstance(ends, int) else set(ends or ())
    stop = next((place for place, token in enumerate(ids) if token in known), len(ids))
    if model.tokenizer is None:
        return " ".join(map(str, ids[:stop]))
    with without_panic(
        TextError, f"Cannot decode what {model.name} wrote", "Give new_tokens=0."
    ):
        return str(
            model.tokenizer.decode(ids[:stop], clean_up_tokenization_spaces=False)
        )

"""Running: what a model says, as it is or while its states are changed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.steer.directions import part_at
from hiddenscope.analyses.steer.questions import Question
from hiddenscope.errors import TextError
from hiddenscope.model import ANOTHER_BATCH, Model
from hiddenscope.passes import Add, Change, Pass, Project, edit, editing, record, resume
from hiddenscope.passes.compat import plan
from hiddenscope.sites import Site
from hiddenscope.states import Pair, States

How: TypeAlias = Literal["add", "ablate"]
Said: TypeAlias = list[NDArray[np.float64]]  # for each question the log-probabilities [row, target]
Advance: TypeAlias = Callable[[float], None]
SKIPPED = "from each site on, the blocks below skipped"
MOST_LOGITS = 2**25  # numbers in one pass, 128 MiB of float32: the head makes a row of the vocabulary for each token


@dataclass(frozen=True)
class Steering:
    """What is done: a vector at every site that is changed, in what way, and with which strengths, each in a copy."""

    how: How
    vectors: Mapping[Site, Tensor]
    strengths: tuple[float, ...]

    @property
    def entry(self) -> Site:
        """The lowest site that is changed."""
        return min(self.vectors)

    def rows(self, states: Tensor) -> Tensor:
        """The rows [token, width] at the entry after the change, once for each strength."""
        vector = self.vectors[self.entry]
        if self.how == "ablate":
            return Project(vector).of(states)
        return torch.cat([Add(vector, scale=strength).of(states) for strength in self.strengths])

    def changes(self, texts: int, *, entry: bool) -> dict[str | Site, Change]:
        """The change at each site of a batch that holds so many texts once for each strength."""
        wanted = {site: vector for site, vector in self.vectors.items() if entry or site != self.entry}
        return {site: self._change(vector, texts) for site, vector in wanted.items()}

    def _change(self, vector: Tensor, texts: int) -> Change:
        if self.how == "ablate":
            return Project(vector)
        rows = torch.tensor(self.strengths, dtype=torch.float64)[:, None] * vector
        shifts = rows.repeat_interleave(texts, 0)[:, None]
        return lambda states: states + shifts.to(states.device, states.dtype)


def as_it_is(model: Model, asked: Sequence[Question], advance: Advance) -> Said:
    """What the model says, unchanged."""
    last = model.anatomy.sites[-1]

    def one_pass(ids: list[Any], aims: list[Any] | None, texts: list[int]) -> Pass:
        return record(model, ids, last, targets=aims, logits=True)

    (said,) = _asked(model, asked, 1, one_pass, advance)
    return said


def steered(
    model: Model, asked: Sequence[Question], states: States | Pair | None, doing: Steering, advance: Advance
) -> tuple[list[Said], str]:
    """What the model says with each strength, and how it was run.

    `states` are those of the questions' texts at the entry: the pass is entered there. Without them (inside a block) it
    is run whole.
    """
    last = model.anatomy.sites[-1]
    notes: list[str] = [] if states is not None else [f"whole, with the states at {doing.entry} changed on their way"]

    def one_pass(ids: list[Any], aims: list[Any] | None, texts: list[int]) -> Pass:
        if states is None:
            return edit(model, ids, doing.changes(len(texts), entry=True), last, targets=aims, logits=True)
        own = part_at(states, doing.entry)
        rows = torch.cat([own[doing.entry][own.tokens.rows(text)] for text in texts])
        above = doing.changes(len(texts), entry=False)
        changed: AbstractContextManager[None] = editing(model, above) if above else nullcontext()
        with changed:
            made = resume(model, ids, doing.entry, doing.rows(rows), last, targets=aims)
        notes.extend(made.notes)
        return made

    said = _asked(model, asked, len(doing.strengths), one_pass, advance)
    return said, notes[0] if notes else SKIPPED


def _asked(
    model: Model,
    asked: Sequence[Question],
    copies: int,
    one_pass: Callable[[list[Any], list[Any] | None, list[int]], Pass],
    advance: Advance,
) -> list[Said]:
    """Ask every question in so many copies, in batches of texts of about one length."""
    lengths = [len(question.ids) + len(question.aim or ()) for question in asked]
    budget = max(1, MOST_LOGITS // model.encoder.vocabulary // copies)
    another = ANOTHER_BATCH.get(model.device.type, ANOTHER_BATCH["cpu"])
    said: list[dict[int, NDArray[np.float64]]] = [{} for _ in range(copies)]
    for texts in plan(lengths, budget, padded=model.batches, turn=model.turn, another=another):
        some = [asked[text] for text in texts] * copies
        aims = [list(question.aim) for question in some if question.aim is not None] or None
        made = one_pass([list(question.ids) for question in some], aims, texts)
        for place, read in enumerate(_read(made, some)):
            said[place // len(texts)][texts[place % len(texts)]] = read
        advance(copies * sum(lengths[text] for text in texts))
    return [[copy[text] for text in range(len(asked))] for copy in said]


def _read(made: Pass, asked: Sequence[Question]) -> Iterator[NDArray[np.float64]]:
    """The log-probabilities that were asked for, text after text, in float64."""
    assert made.logits is not None
    start = 0
    for question in asked:
        rows = made.logits[start + torch.tensor(question.rows, device=made.logits.device)].double()
        targets = torch.tensor(question.targets, device=rows.device).reshape(len(rows), -1)
        yield (rows.gather(1, targets) - rows.logsumexp(-1, keepdim=True)).cpu().numpy()
        start += len(question.aim or question.ids)


def refuses_to_write(model: Model) -> str:
    """Why the model writes no text; empty if it does."""
    if not model.anatomy.stacks[-1].causal:
        return "it fills masks, and does not go on with a text"
    can: Any = getattr(model.module, "can_generate", None)
    return "" if can is not None and can() else "its module has no generate"


def check_room(model: Model, prompts: Sequence[Question], new_tokens: int) -> None:
    """Refuse more tokens than there is room for."""
    if new_tokens < 1:
        raise TextError(
            f"{new_tokens} new tokens",
            "that is nothing to write",
            "Ask for one at least, or for 0, which writes nothing.",
        )
    longest, window = max(len(question.ids) for question in prompts), model.encoder.window
    if window and prompts[0].aim is None and longest + new_tokens > window:
        reason = f"with the longest prompt's that is {longest + new_tokens:,}, and {model.name} takes {window:,}"
        raise TextError(f"{new_tokens:,} new tokens", reason, "Ask for fewer, or give shorter prompts.")


def written(model: Model, prompts: Sequence[Question], new_tokens: int, doing: Steering | None) -> list[list[str]]:
    """What the model goes on with after each prompt, greedily: for each strength a text a prompt."""
    copies = len(doing.strengths) if doing else 1
    texts: list[list[str]] = [[""] * len(prompts) for _ in range(copies)]
    for length in sorted({len(question.ids) for question in prompts}):  # so that none has to be filled up
        same = [place for place, question in enumerate(prompts) if len(question.ids) == length]
        ids = torch.tensor([prompts[place].ids for place in same] * copies, device=model.device)
        changes = doing.changes(len(same), entry=True) if doing else {}
        with model.lock, editing(model, changes) if changes else nullcontext():
            sequences = _generated(model, ids, new_tokens)
        new = sequences[:, 1 if prompts[0].aim else length :].tolist()
        for row, one in enumerate(new):
            texts[row // len(same)][same[row % len(same)]] = _as_text(model, one)
    return texts


def _generated(model: Model, ids: Tensor, new_tokens: int) -> Tensor:
    module: Any = model.module
    greedy = {"do_sample": False, "num_beams": 1, "use_cache": True, "pad_token_id": model.encoder.pad}
    output = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **greedy)
    sequences: Tensor = getattr(output, "sequences", output)
    return sequences


def _as_text(model: Model, ids: list[int]) -> str:
    """New ids as text, up to where the model ended it."""
    ends = getattr(getattr(model.module, "generation_config", None), "eos_token_id", None)
    known = {ends} if isinstance(ends, int) else set(ends or ())
    stop = next((place for place, one in enumerate(ids) if one in known), len(ids))
    if model.tokenizer is None:
        return " ".join(map(str, ids[:stop]))
    return str(model.tokenizer.decode(ids[:stop], clean_up_tokenization_spaces=False))

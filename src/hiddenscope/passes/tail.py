"""Tail: what the model makes of its last layer, applied to any rows: final norm, head, soft-capping and all.

Rows enter a pass over texts that mean nothing at the last layer (or at `final`), and the model's own code makes their
logits. Where it can be shown on the model that the logits are an elementwise function of one linear map, the pass goes
only as far as that map, and the product with it can be made a few rows at a time in memory that is used again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hiddenscope import hooks
from hiddenscope.anatomy import probe
from hiddenscope.errors import PassError
from hiddenscope.passes.inputs import Inputs
from hiddenscope.passes.protocol import ModelLike
from hiddenscope.passes.record import record
from hiddenscope.passes.resume import resume, skipping
from hiddenscope.sites import Site
from hiddenscope.states import States

LONGEST = 256  # tokens of a text that means nothing; masks grow with its square
TRIAL = 7
ROOM = 256  # what rounding may make of a logit, in units in the last place of the largest

Form = Literal["", "as they are", "scaled", "soft-capped"]


@dataclass(frozen=True)
class Finding:
    """What was shown of a tail: how many words it knows, and what becomes of the products, if they are all there is.

    `form` is empty where the logits are not shown to be a function of single products; `why` says what was seen.
    """

    words: int
    form: Form
    constant: float
    why: str


@dataclass
class Tail:
    """The tail of a model above an entry, which is its last layer or `final`.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("gpt2"), None))
    >>> full = record(model, [[5, 6, 7]], "layer.-1", logits=True)
    >>> tail = Tail(model, Site(3))
    >>> torch.allclose(tail.logits(tail.ready(full.states["layer.3"])), full.logits, atol=1e-5)
    True
    """

    model: ModelLike
    entry: Site
    found: Finding = field(init=False)

    def __post_init__(self) -> None:
        with self.model.lock:
            self.found = _shown(self)

    @property
    def words(self) -> int:
        """How many words there are to choose from."""
        return self.found.words

    @property
    def by_product(self) -> bool:
        """Whether one product with the head's weight, and no more than a function of each number, gives the logits."""
        return bool(self.found.form)

    @property
    def dtype(self) -> torch.dtype:
        """What logits are read in: float32, or float64 where the model is."""
        wide = self.model.anatomy.stack(self.entry).proof.dtype == torch.float64
        return torch.float64 if wide else torch.float32

    @property
    def device(self) -> torch.device:
        """Where logits are made."""
        device: torch.device = _head(self.model).weight.device if self.by_product else self.model.device
        return device

    def ready(self, rows: Tensor) -> Tensor:
        """Rows of the entry, brought as near to the logits as costs little: to the head's product, if there is one."""
        return self._inputs(rows) if self.by_product else rows

    def logits(self, ready: Tensor, out: Tensor | None = None, room: Tensor | None = None) -> Tensor:
        """The logits [row, word] of rows that were made ready, in `dtype`; into `out` where it is given.

        `room` is memory of the same size that may be written over.
        """
        made = _into(self._product(ready, out, room) if self.by_product else self._passed(ready), out, self.dtype)
        if self.found.form == "scaled":
            made *= self.found.constant
        elif self.found.form == "soft-capped":
            made.div_(self.found.constant).tanh_().mul_(self.found.constant)
        return made

    def _product(self, ready: Tensor, out: Tensor | None, room: Tensor | None) -> Tensor:
        """The head's product. On a CPU it is made word by row, or a copy of the whole weight would be packed for it."""
        head = _head(self.model)
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        fits = out is not None and room is not None and out.dtype == weight.dtype and out.device.type == "cpu"
        if not fits or room is None:
            return ready @ weight.t() if bias is None else torch.addmm(bias, ready, weight.t())
        standing = room.view(-1)[: len(weight) * len(ready)].view(len(weight), len(ready))
        torch.mm(weight, ready.t(), out=standing)
        return standing.t() if bias is None else standing.add_(bias[:, None]).t()

    def _inputs(self, rows: Tensor) -> Tensor:
        """What the head takes in for each row; the head itself is passed over."""
        head, taken = _head(self.model), _Taken()
        skipping(self.model, self.entry.stack)  # tried before the head is passed over, for a trial needs it
        with self.model.lock, hooks.skipping({head: {0: torch.empty(0)}}), taken.watching(head):
            made = self._passed(rows)
        if len(taken.inputs) != 1:
            raise PassError("The input of the head", f"it was called {len(taken.inputs)} times", "Use whole passes.")
        return taken.inputs[0].flatten(0, -2)[: len(made)]

    def _passed(self, rows: Tensor) -> Tensor:
        """The logits that passes entered with the rows give, in the model's dtype."""
        window = self.model.text_encoder.target_window or self.model.text_encoder.window or LONGEST
        length = min(len(rows), LONGEST, window)
        texts = ceil(len(rows) / length)
        filled = torch.cat([rows, rows[:1].expand(texts * length - len(rows), -1)])
        ids = probe(self.model.module, 1, length).tolist() * texts
        fillers = tuple(map(tuple, ids))
        inputs = Inputs(fillers)
        if len(self.model.anatomy.stacks) > 1:
            inputs = Inputs(tuple(row[:1] for row in fillers), targets=Inputs(fillers))
        logits = resume(self.model, inputs, self.entry, filled, ()).logits
        assert logits is not None, "they were asked for"
        return logits[: len(rows)]


class _Taken:
    """What a module took in, call by call."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        def seen(args: tuple[Any, ...], kwargs: Any) -> None:
            state = hooks.state_in(args, kwargs)
            if state is not None:
                self.inputs.append(state)

        with hooks.watching([hooks.Watch(module, "input", seen)]):
            yield


def _into(made: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    return made.to(dtype) if out is None else out.copy_(made)


def _head(model: ModelLike) -> Any:
    head = model.anatomy.head
    if head is None:
        reason = "it has no head that gives any"
        remedy = "Load it with task='causal-lm' or 'masked-lm'."
        raise PassError(f"Logits of {model.anatomy.name}", reason, remedy)
    return model.module.get_submodule(head.path)


def _shown(tail: Tail) -> Finding:
    """What the model shows of its tail, tried once on the model as it is."""
    key = str(tail.entry), id(_head(tail.model))
    return tail.model.trials.once("unembed", lambda: _try(tail), key=key)


def _try(tail: Tail) -> Finding:
    """Hold the tail against the logits of a true pass, by the product if that can be, else by whole passes."""
    model = tail.model
    states, logits = _true(model, tail.entry)
    form, constant, why = _after_the_head(model)
    words = logits.shape[-1]
    backwards = torch.arange(len(states) - 1, -1, -1)  # a row must give the same wherever it stands
    if form:
        tail.found = Finding(words, form, constant, why)
        try:
            if _close(tail.logits(tail.ready(states[backwards])), logits[backwards]):
                return tail.found
            why = "its logits are not made by the head's product alone"
        except Exception as error:
            why = f"the head cannot be passed over ({type(error).__name__})"
    tail.found = Finding(words, "", 0.0, why)
    if not _close(tail.logits(states[backwards]), logits[backwards]):
        reason = "its logits depend on more than each token's own state there"
        remedy = "Use resume(), which keeps a text together."
        raise PassError(f"The tail of {model.anatomy.name} above {tail.entry}", reason, remedy)
    return tail.found


def _true(model: ModelLike, entry: Site) -> tuple[Tensor, Tensor]:
    """The states at the entry and the logits of a pass over a trial text."""
    length = min(TRIAL, model.text_encoder.window or TRIAL, model.text_encoder.target_window or TRIAL)
    ids = probe(model.module, 1, length, seed=11).tolist()
    targets = ids if len(model.anatomy.stacks) > 1 else None
    made = record(model, ids, entry, targets=targets, logits=True)
    assert isinstance(made.states, States), "one site is in one stack"
    assert made.logits is not None, "they were asked for"
    return made.states[entry], made.logits


def _after_the_head(model: ModelLike) -> tuple[Form, float, str]:
    """What becomes of the head's products: numbers of every size are put in their place, and the logits looked at."""
    head = _head(model)
    weight = getattr(head, "weight", None)
    if type(head) is not nn.Linear or weight is None or weight.is_meta or hooks.is_offloaded(model.module):
        return "", 0.0, f"its head is {type(head).__name__}, and no plain product"
    put: list[Tensor] = []

    def numbers(output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(12)
        size = torch.randn(output.shape, generator=generator) * 10 ** torch.empty(output.shape).uniform_(
            -2, 3, generator=generator
        )
        put.append(size.to(output))
        return put[-1]

    with hooks.watching([hooks.Watch(head, "output", numbers)]):
        _, logits = _true(model, _last(model))
    if len(put) != 1 or put[0].shape[-1] != logits.shape[-1]:
        return "", 0.0, "its head does not make the logits in one call"
    return _form(put[0].flatten(0, -2).double(), logits.double(), torch.finfo(put[0].dtype).eps)


def _form(given: Tensor, logits: Tensor, eps: float) -> tuple[Form, float, str]:
    """Which function of each number the logits are, if it is one that is known."""
    if torch.equal(given, logits):
        return "as they are", 1.0, "its logits are the head's product"
    largest = int(given.abs().argmax())
    scale = (logits.flatten()[largest] / given.flatten()[largest]).item()
    if torch.allclose(logits, given * scale, rtol=8 * eps, atol=0):
        return "scaled", scale, f"its logits are {scale:.6g} times the head's product"
    cap = logits.abs().max().item()
    capped = cap * torch.tanh(given / cap)
    if torch.allclose(logits, capped, rtol=8 * eps, atol=0):
        return "soft-capped", cap, f"its logits are the head's product, soft-capped at {cap:g}"
    return "", 0.0, "what becomes of the head's product is no function that is known here"


def _last(model: ModelLike) -> Site:
    stack = model.anatomy.stacks[-1]
    return Site(stack.depth, "", stack.name if len(model.anatomy.stacks) > 1 else None)


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two ways of making the same logits differ by rounding alone."""
    if ours.shape != theirs.shape:
        return False
    finite = torch.isfinite(theirs)
    if not torch.equal(finite, torch.isfinite(ours)):
        return False
    a, b = ours[finite].double(), theirs[finite].double()
    room = ROOM * torch.finfo(theirs.dtype).eps if theirs.dtype in (torch.float32, torch.float64) else 0.05
    return not a.numel() or bool((a - b).abs().max() <= room * b.abs().max())

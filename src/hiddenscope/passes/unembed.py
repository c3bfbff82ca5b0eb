"""Unembedding: the logits that a model makes of any rows of its last layer, or of
`final`.

Nothing is assumed of what follows the last layer. Rows enter a pass there (`resume`),
over texts that mean nothing, and the model's own code makes their logits: final norm,
head transform, head, scale, soft-capping, a decoder's bias. Two shortcuts are tried on
the model, and used where they give the logits of a true pass:

- The logits are the product with the head's weight, as it is, scaled or soft-capped. The product is then made here,
  for some words of the vocabulary at a time, in memory that the caller gives.
- Between the last layer and the head are the modules that the anatomy found there, mostly one norm. They are then
  called directly, and no pass is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional

from hiddenscope.discovery import trial_ids
from hiddenscope.errors import PassError
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.trials import disagreement
from hiddenscope.passes.inputs import Inputs
from hiddenscope.passes.protocol import PassModel
from hiddenscope.passes.record import record
from hiddenscope.passes.resume import resume, try_skipping
from hiddenscope.sites import Site
from hiddenscope.states import States

LONGEST_TEXT = (
    # Tokens of a text that means nothing; attention masks grow with its square.
    256
)
TRIAL_TOKENS = 7
# On a CPU, bytes of the head's weight in one product. Kernels pack the weight first,
# and a copy of all of it would take more memory than the logits do.
WEIGHT_BLOCK = 16 * 2**20

Method = Literal["modules", "pass", "whole"]
Transform = Literal["none", "scale", "softcap"]


@dataclass(frozen=True)
class Recipe:
    """How the logits are made, as it was tried on the model.

    `method`: the head's inputs come from the modules below it ("modules") or from a
    pass that ends there ("pass"), and the product is made here; or the logits come from
    whole passes ("whole"), for the `reason`. `transform` is what becomes of the
    product, with its `constant`.
    """

    vocabulary: int
    method: Method
    transform: Transform = "none"
    constant: float = 1.0
    reason: str = ""


@dataclass
class Unembedding:
    """What a model makes of rows that enter at its last layer, or at `final`.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("gpt2"), None))
    >>> full = record(model, [[5, 6, 7]], "layer.-1", logits=True)
    >>> unembedding = Unembedding(model, Site(3))
    >>> torch.allclose(unembedding.logits(unembedding.head_inputs(full.states["layer.3"])), full.logits, atol=1e-5)
    True
    """

    model: PassModel
    entry: Site
    recipe: Recipe = field(init=False)

    def __post_init__(self) -> None:
        head = _head(self.model)  # somebody may have exchanged it
        key = (
            str(self.entry),
            None if head is None else ref(head),
            _numbers_around_head(self.model),
        )
        with self.model.lock:
            self.recipe = self.model.trials.once("unembed", self._try, key=key)

    @property
    def vocabulary(self) -> int:
        """How many logits a row has."""
        return self.recipe.vocabulary

    @property
    def dtype(self) -> torch.dtype:
        """What logits are kept in: float32, or float64 where the model is."""
        wide = self.model.anatomy.stack(self.entry).proof.dtype == torch.float64
        return torch.float64 if wide else torch.float32

    @property
    def device(self) -> torch.device:
        """Where logits are made."""
        device: torch.device = (
            self.model.device
            if self.recipe.method == "whole"
            else _head(self.model).weight.device
        )
        return device

    @autograd.without_grad
    def head_inputs(self, rows: Tensor) -> Tensor:
        """Rows of the entry [row, width] as the head takes them; where whole passes are
        needed, as they are.
        """
        if self.recipe.method == "whole":
            return rows
        inputs = (
            self._through_modules(rows)
            if self.recipe.method == "modules"
            else self._through_pass(rows)
        )
        return inputs.to(self.device)

    @autograd.without_grad
    def logits(
        self, head_inputs: Tensor, words: slice = slice(None), out: Tensor | None = None
    ) -> Tensor:
        """The logits [row, word] of rows that `head_inputs` gave, in `dtype`; into
        `out` where it is given.

        `words` are a part of the vocabulary, if not all of it is wanted.
        """
        if out is None:
            count = len(range(self.vocabulary)[words])
            out = torch.empty(
                len(head_inputs), count, dtype=self.dtype, device=self.device
            )
        if self.recipe.method == "whole":
            return out.copy_(self._logits_of_pass(head_inputs)[:, words])
        head = _head(self.model)
        weight, bias = (
            head.weight[words],
            None if head.bias is None else head.bias[words],
        )
        step = len(weight)
        if out.device.type == "cpu":
            step = min(step, max(1, WEIGHT_BLOCK // weight[0].nbytes))
        if step == len(weight) and bias is None and out.dtype == weight.dtype:
            torch.mm(head_inputs, weight.T, out=out)
        else:
            for start in range(0, len(weight), step):
                part = slice(start, start + step)
                out[:, part] = functional.linear(
                    head_inputs, weight[part], None if bias is None else bias[part]
                )
        if self.recipe.transform == "scale":
            out *= self.recipe.constant
        elif self.recipe.transform == "softcap":
            out.div_(self.recipe.constant).tanh_().mul_(self.recipe.constant)
        return out

    def _through_modules(self, rows: Tensor) -> Tensor:
        """What the modules between the last layer and the head make of the rows;
        `final` is behind them.
        """
        paths = (
            ()
            if self.entry.layer is None
            else self.model.anatomy.stack(self.entry).proof.exit
        )
        states = rows.to(self.model.device)[None]
        for path in paths:
            states = self.model.module.get_submodule(path)(states)
        return states[0]

    def _through_pass(self, rows: Tensor) -> Tensor:
        """What the head is given in a pass that is entered with the rows; the head
        itself is skipped.
        """
        head, given = _head(self.model), list[Tensor]()

        def keep(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            state = hooks.state_in(args, kwargs)
            if state is not None:
                given.append(state)

        # Tried while the head is in its place, because a trial needs it.
        try_skipping(self.model, self.entry.stack)
        watch = hooks.Watch(head, "input", keep)
        with (
            self.model.lock,
            hooks.skipping({head: {0: torch.empty(0)}}),
            hooks.watching([watch]),
        ):
            self._logits_of_pass(rows)
        if len(given) != 1:
            raise PassError(
                "Cannot read the inputs of the head",
                f"it was called {len(given)} times",
                "Use resume().",
            )
        return given[0].flatten(0, -2)[: len(rows)]

    def _logits_of_pass(self, rows: Tensor) -> Tensor:
        """The logits of a pass that is entered with the rows, in the model's dtype."""
        encoder = self.model.text_encoder
        length = min(
            len(rows),
            LONGEST_TEXT,
            encoder.target_window or encoder.window or LONGEST_TEXT,
        )
        texts = ceil(len(rows) / length)
        filled = torch.cat([rows, rows[:1].expand(texts * length - len(rows), -1)])
        fillers = Inputs(
            tuple(map(tuple, trial_ids(self.model.module, 1, length).tolist() * texts))
        )
        inputs = fillers
        if self.model.encoder_decoder:
            inputs = Inputs(tuple(row[:1] for row in fillers.ids), targets=fillers)
        logits = resume(self.model, inputs, self.entry, filled, ()).logits
        assert logits is not None, "they were asked for"
        return logits[: len(rows)]

    def _try(self) -> Recipe:
        """The quickest way of making logits that gives those of a true pass, or a
        PassError where none does.
        """
        states, logits = _true_pass(self.model, self.entry)
        # A row must give the same wherever it stands.
        order = torch.arange(len(states) - 1, -1, -1)
        product = replace(_after_head(self.model), vocabulary=logits.shape[-1])
        methods: tuple[Method, ...] = (
            ("whole",) if product.method == "whole" else ("modules", "pass", "whole")
        )
        for method in methods:
            self.recipe = replace(product, method=method)
            if method == "whole":
                reason = (
                    product.reason or "its logits are not the product of its head alone"
                )
                self.recipe = Recipe(logits.shape[-1], "whole", reason=reason)
            if self._gives(states[order], logits[order]):
                return self.recipe
        reason = "they depend on more than the state of their own token"
        problem = (
            f"Cannot make logits of single states at {self.entry} of"
            f" {self.model.anatomy.name}"
        )
        raise PassError(problem, reason, "Use resume(), which takes whole texts.")

    def _gives(self, states: Tensor, logits: Tensor) -> bool:
        """Whether the recipe gives these logits, except for rounding; a shortcut that
        stops with an error does not.
        """
        try:
            again = self.logits(self.head_inputs(states)).to(logits.device)
        except Exception:
            if self.recipe.method == "whole":
                raise
            return False
        finite = logits.isfinite()
        if again.shape != logits.shape or not torch.equal(finite, again.isfinite()):
            return False
        ours, true = (
            values.double().masked_fill(~finite, 0)[None] for values in (again, logits)
        )
        return (
            disagreement(
                true,
                ours,
                [self.model.anatomy.stack(self.entry).depth],
                dtype=logits.dtype,
            )
            <= 1
        )


def _head(model: PassModel) -> Any:
    """The module that makes the logits; None where no single module does, or where
    there are none.
    """
    head = model.anatomy.head
    return None if head is None else model.module.get_submodule(head.path)


def _numbers_around_head(model: PassModel) -> tuple[tuple[str, float], ...]:
    """Numbers that the modules around the head hold themselves, as Cohere holds the
    scale of its logits.
    """
    path = "" if model.anatomy.head is None else model.anatomy.head.path
    names = path.split(".")[:-1] if path else []
    around = [
        model.module.get_submodule(".".join(names[:end]))
        for end in range(len(names) + 1)
    ]
    return tuple(
        (name, value)
        for part in around
        for name, value in vars(part).items()
        if type(value) in (int, float)
    )


def _true_pass(model: PassModel, entry: Site) -> tuple[Tensor, Tensor]:
    """The states at the entry and the logits of a pass over a trial text."""
    windows = (model.text_encoder.window, model.text_encoder.target_window)
    length = min(TRIAL_TOKENS, *(window or TRIAL_TOKENS for window in windows))
    ids = trial_ids(model.module, 1, length, seed=11).tolist()
    full = record(
        model, ids, entry, targets=ids if model.encoder_decoder else None, logits=True
    )
    assert isinstance(full.states, States), "one site is in one stack"
    assert full.logits is not None, "they were asked for"
    return full.states[entry], full.logits


def _after_head(model: PassModel) -> Recipe:
    """What becomes of the head's product: numbers of every size are put in its place,
    and the logits compared.
    """
    head = _head(model)
    # MobileBERT multiplies with two weights joined, inside the module that holds them.
    if head is None:
        return Recipe(0, "whole", reason="no module of their own makes them")
    if (
        type(head) is not nn.Linear
        or head.weight.is_meta
        or hooks.is_offloaded(model.module)
    ):
        return Recipe(
            0, "whole", reason=f"its head is {type(head).__name__}, not a plain product"
        )
    products: list[Tensor] = []

    def exchange(output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(12)
        sizes = 10 ** torch.empty(output.shape).uniform_(-2, 3, generator=generator)
        products.append(
            (torch.randn(output.shape, generator=generator) * sizes).to(output)
        )
        return products[-1]

    stack = model.anatomy.stacks[-1]
    last = Site(stack.depth, "", stack.name if model.encoder_decoder else None)
    with hooks.watching([hooks.Watch(head, "output", exchange)]):
        _, logits = _true_pass(model, last)
    if len(products) != 1 or products[0].flatten(0, -2).shape != logits.shape:
        return Recipe(
            0, "whole", reason="its head does not make the logits in one call"
        )
    return _transform(
        products[0].flatten(0, -2).double(),
        logits.double(),
        torch.finfo(products[0].dtype).eps,
    )


def _transform(products: Tensor, logits: Tensor, eps: float) -> Recipe:
    """Which function of each product the logits are, if it is one of those that are
    known here.
    """
    if torch.equal(products, logits):
        return Recipe(0, "pass")
    largest = int(products.abs().argmax())
    scale = (logits.flatten()[largest] / products.flatten()[largest]).item()
    if torch.allclose(logits, products * scale, rtol=8 * eps, atol=0):
        return Recipe(0, "pass", "scale", scale)
    cap = logits.abs().max().item()
    if torch.allclose(logits, cap * torch.tanh(products / cap), rtol=8 * eps, atol=0):
        return Recipe(0, "pass", "softcap", cap)
    return Recipe(
        0, "whole", reason="its logits are not a known function of the head's product"
    )

"""Unembedding: the logits that a model makes of any rows of its residual stream.

Rows come with the site they were read at. Those of `final` enter the head, and all
others the final norm below it, as if they were the last layer.

Nothing is assumed of what follows the last layer. Rows enter a pass there (`resume`),
over texts that mean nothing, and the model's own code makes their logits: final norm,
head transform, head, scale, soft-capping, a decoder's bias. Two shortcuts are tried on
the model, and used where they give the logits of a true pass:

- The logits are the product with the head's weight, as it is, scaled or soft-capped.
  The product is then made here, for some words of the vocabulary at a time, in memory
  of the caller.
- Between the last layer and the head are the modules that the anatomy names there,
  mostly one norm. They are then called directly, and no pass is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional

from hiddenscope.discovery import Anatomy, trial_ids
from hiddenscope.errors import PassError, SiteError, StatesError, is_out_of_memory
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.quantised import quantised_weights
from hiddenscope.modules.trials import disagreement
from hiddenscope.passes.inputs import Inputs, PassModel
from hiddenscope.passes.record import record
from hiddenscope.passes.resume import resume, try_skipping
from hiddenscope.sites import Site
from hiddenscope.states import States

# Attention masks grow with the square of a text's length.
LONGEST_TEXT = 256
TRIAL_TOKENS = 7
# On a CPU, bytes of the head's weight in one product. Kernels pack the weight first,
# and a copy of all of it would take more memory than the logits do.
WEIGHT_BLOCK = 16 * 2**20

Method = Literal["modules", "pass", "whole"]
Transform = Literal["none", "scale", "softcap"]


@dataclass(frozen=True)
class Recipe:
    """How logits are made, as verified on the model.

    With the `method` "modules" the head's inputs come from the modules below it, and
    with "pass" from a pass that ends there; the product is made here, and `transform`
    is applied to it with its `constant`. With "whole" the logits come from whole
    passes, for the `reason`.
    """

    vocabulary: int
    method: Method
    transform: Transform = "none"
    constant: float = 1.0
    reason: str = ""


class HeadInputs(NamedTuple):
    """Rows as the head takes them, of states that enter a model at `entry`."""

    rows: Tensor
    entry: Site


@dataclass
class Unembedding:
    """The logits of rows of the residual stream, as if the model ended there.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("gpt2"), None))
    >>> full = record(model, [[5, 6, 7]], "layer.-1", logits=True)
    >>> logits = Unembedding(model).logits_of(full.states["layer.3"], Site(3))
    >>> torch.allclose(logits, full.logits, atol=1e-5)
    True
    """

    model: PassModel
    # How logits are made of rows that enter at a site.
    recipes: dict[Site, Recipe] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        stack = self.model.anatomy.stacks[-1]
        self.last = Site(stack.depth, "", self.model.anatomy.sites[-1].stack)
        # The dtype of the logits is float32, or float64 for a float64 model.
        dtype = stack.proof.dtype
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        # The module that makes the logits; None where no single module does.
        self.head: Any = None
        anatomy, part = self.model.anatomy, self.model.module
        path = ""
        if anatomy.head is not None:
            path = anatomy.head.path
            self.head = part.get_submodule(path)
        # Cohere keeps the scale of its logits as a number of a module around the head.
        numbers: list[tuple[str, float]] = []
        for name in path.split("."):
            for attribute, value in vars(part).items():
                if type(value) in (int, float):
                    numbers.append((attribute, value))
            part = part.get_submodule(name)
        # The user may have replaced the head since the last trial.
        head_key = None if self.head is None else ref(self.head)
        self._key = head_key, tuple(numbers)
        self._prepare(self.last)

    @property
    def recipe(self) -> Recipe:
        """Return how logits are made of the last layer."""
        return self.recipes[self.last]

    @property
    def vocabulary(self) -> int:
        """Return how many logits a row has."""
        return self.recipe.vocabulary

    @property
    def head_dtype(self) -> torch.dtype:
        """Return the dtype of the head's weight."""
        dtype: torch.dtype = self.head.weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Return the device on which logits are made."""
        if self.recipe.method == "whole":
            return self.model.device
        device: torch.device = self.head.weight.device
        return device

    def logits_of(self, rows: Tensor, site: Site) -> Tensor:
        """Return the logits [row, word] of rows [row, width] of a site."""
        return self.logits(self.head_inputs(rows, site))

    def blocks(self, rows: Tensor, site: Site, most: int) -> Iterator[Tensor]:
        """Yield the logits of rows of a site, of at most `most` rows at a time."""
        for block in torch.split(rows, most):
            yield self.logits_of(block, site)

    @autograd.without_grad
    def head_inputs(self, rows: Tensor, site: Site) -> HeadInputs:
        """Return rows [row, width] of a site as the head takes them.

        Where whole passes are needed, they stay as they are.
        """
        entry = entry_of(self.model.anatomy, site)
        width = self.model.anatomy.width(site)
        if rows.shape[-1] != width:
            raise StatesError(
                f"Cannot make logits of these rows of {site}",
                f"they are {rows.shape[-1]} wide, and {site} {width}",
                "Give rows with the site that they were read at.",
            )
        method = self._prepare(entry).method
        if method == "modules":
            rows = self._through_modules(rows, entry).to(self.device)
        elif method == "pass":
            rows = self._through_pass(rows, entry).to(self.device)
        return HeadInputs(rows, entry)

    @autograd.without_grad
    def logits(
        self,
        head_inputs: HeadInputs,
        words: slice = slice(None),
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the logits [row, word] of rows from `head_inputs`, in `dtype`.

        `words` are a part of the vocabulary. The logits are written into `out`, if
        there is one.
        """
        rows, entry = head_inputs
        recipe = self.recipes[entry]
        if out is None:
            shape = (len(rows), len(range(self.vocabulary)[words]))
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
        if recipe.method == "whole":
            return out.copy_(self._logits_of_pass(rows, entry)[:, words])
        head = self.head
        weight = head.weight[words]
        bias = None if head.bias is None else head.bias[words]
        step = len(weight)
        if out.device.type == "cpu":
            step = min(step, max(1, WEIGHT_BLOCK // weight[0].nbytes))
        if step == len(weight) and bias is None and out.dtype == weight.dtype:
            torch.mm(rows, weight.T, out=out)
        else:
            for start in range(0, len(weight), step):
                part = slice(start, start + step)
                part_bias = None if bias is None else bias[part]
                out[:, part] = functional.linear(rows, weight[part], part_bias)
        if recipe.transform == "scale":
            out *= recipe.constant
        elif recipe.transform == "softcap":
            out.div_(recipe.constant).tanh_().mul_(recipe.constant)
        return out

    @autograd.without_grad
    def word_rows(self, words: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the head's weight [word, width] and bias [word] for some words.

        They are in float64, and the scale of the logits is in both. A soft cap is not:
        it is no linear map.
        """
        if self.recipe.method == "whole":
            raise PassError(
                f"No unembedding rows of {self.model.anatomy.name}",
                self.recipe.reason,
                "Use the logits of whole passes.",
            )
        head = self.head
        ids = torch.tensor(list(words), device=head.weight.device)
        weight = head.weight[ids].double()
        bias = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
        if head.bias is not None:
            bias = head.bias[ids].double()
        scale = 1.0
        if self.recipe.transform == "scale":
            scale = self.recipe.constant
        return weight * scale, bias * scale

    def _prepare(self, entry: Site) -> Recipe:
        """Return how logits are made of rows that enter there, tried once."""
        if entry not in self.recipes:
            key = (str(entry), *self._key)
            try:
                with self.model.lock:
                    self.recipes[entry] = self.model.trials.once(
                        "unembed", lambda: self._try(entry), key=key
                    )
            except BaseException:
                # A recipe that was only being tried.
                self.recipes.pop(entry, None)
                raise
        return self.recipes[entry]

    def _through_modules(self, rows: Tensor, entry: Site) -> Tensor:
        """Run the modules between the last layer and the head; `final` skips them."""
        paths: tuple[str, ...] = ()
        if entry.layer is not None:
            paths = self.model.anatomy.stack(entry).proof.exit
        states = rows.to(self.model.device)[None]
        for path in paths:
            states = self.model.module.get_submodule(path)(states)
        return states[0]

    def _through_pass(self, rows: Tensor, entry: Site) -> Tensor:
        """Return the head's inputs in a pass that is entered with the rows.

        The head itself is skipped.
        """
        head_inputs: list[Tensor] = []

        def keep(args: hooks.Args, kwargs: hooks.Kwargs) -> None:
            state = hooks.state_in(args, kwargs)
            if state is not None:
                head_inputs.append(state)

        # Tried while the head is in its place, because a trial needs it.
        try_skipping(self.model, entry.stack)
        watch = hooks.Watch(self.head, "input", keep)
        with (
            self.model.lock,
            hooks.skipping({self.head: {0: torch.empty(0)}}),
            hooks.watching([watch]),
        ):
            self._logits_of_pass(rows, entry)
        if len(head_inputs) != 1:
            raise PassError(
                "Cannot read the inputs of the head",
                f"it was called {len(head_inputs)} times",
                "Use resume().",
            )
        return head_inputs[0].flatten(0, -2)[: len(rows)]

    def _logits_of_pass(self, rows: Tensor, entry: Site) -> Tensor:
        """Return the logits of a pass that is entered with the rows.

        They are in the model's dtype.
        """
        encoder = self.model.text_encoder
        window = encoder.target_window or encoder.window or LONGEST_TEXT
        length = min(len(rows), LONGEST_TEXT, window)
        texts = ceil(len(rows) / length)
        filled = torch.cat([rows, rows[:1].expand(texts * length - len(rows), -1)])
        ids = tuple(trial_ids(self.model.module, 1, length)[0].tolist())
        inputs = Inputs((ids,) * texts)
        if self.model.encoder_decoder:
            inputs = Inputs((ids[:1],) * texts, targets=inputs)
        logits = resume(self.model, inputs, entry, filled, ()).logits
        assert logits is not None, "they were requested"
        return logits[: len(rows)]

    def _try(self, entry: Site) -> Recipe:
        """Return the quickest recipe that gives the logits of a true pass.

        A PassError says that none does.
        """
        states, logits = _true_pass(self.model, entry)
        # A row must give the same wherever it stands.
        order = torch.arange(len(states) - 1, -1, -1)
        vocabulary, product = (
            logits.shape[-1],
            _after_head(self.model, self.head, self.last),
        )
        recipes = []
        reason = "its logits are not the product of its head alone"
        if isinstance(product, str):
            reason = product
        else:
            recipes.append(Recipe(vocabulary, "modules", *product))
            recipes.append(Recipe(vocabulary, "pass", *product))
        recipes.append(Recipe(vocabulary, "whole", reason=reason))
        for recipe in recipes:
            self.recipes[entry] = recipe
            if self._gives(states[order], entry, logits[order]):
                return recipe
        raise PassError(
            f"Cannot make logits of single states at {entry} of"
            f" {self.model.anatomy.name}",
            "they depend on more than the state of their own token",
            "Use resume(), which takes whole texts.",
        )

    def _gives(self, states: Tensor, entry: Site, logits: Tensor) -> bool:
        """Tell whether the recipe gives these logits, except for rounding.

        A shortcut that stops with an error does not.
        """
        try:
            again = self.logits_of(states, entry).to(logits.device)
        except Exception as error:
            if self.recipes[entry].method == "whole" or is_out_of_memory(error):
                raise
            return False
        if again.shape != logits.shape:
            return False
        depth = self.model.anatomy.stack(entry).depth
        excess = disagreement(logits[None], again[None], [depth], dtype=logits.dtype)
        return excess <= 1


def entry_of(anatomy: Anatomy, site: Site) -> Site:
    """Return where rows of a site enter: at `final`, or else at the last layer.

    A site whose states are not those of the stream below the head is refused.
    """
    stack = anatomy.sites[-1].stack
    reason = ""
    if site.stack != stack:
        reason = f"the head reads the {stack}"
    elif site not in anatomy.select(site):
        reason = "it is no site of the model"
    # Heads and neurons have an index: what they write is in the stream.
    elif site.is_inner and site.index is None:
        reason = f"{site} is not written to the residual stream as it is"
    if reason:
        of_stack = f" of the {stack}" if stack else ""
        raise SiteError(
            f"Cannot make logits of {site} of {anatomy.name}",
            reason,
            f"Ask for layers{of_stack}, parts such as '*.attn' or '*.attn.head.*', or"
            " `final`.",
        )
    if site.layer is None:
        return site
    return Site(anatomy.stacks[-1].depth, "", stack)


def _true_pass(model: PassModel, entry: Site) -> tuple[Tensor, Tensor]:
    """Return the states at the entry and the logits of a pass over a trial text."""
    encoder = model.text_encoder
    length = min(
        TRIAL_TOKENS,
        encoder.window or TRIAL_TOKENS,
        encoder.target_window or TRIAL_TOKENS,
    )
    ids = trial_ids(model.module, 1, length, seed=11).tolist()
    targets = ids if model.encoder_decoder else None
    full = record(model, ids, entry, targets=targets, logits=True)
    assert isinstance(full.states, States), "one site is in one stack"
    assert full.logits is not None, "they were requested"
    return full.states[entry], full.logits


def _after_head(
    model: PassModel, head: Any, last: Site
) -> tuple[Transform, float] | str:
    """Find which function of the head's product the logits are, or say why none.

    Numbers of every size are put in the place of the product.
    """
    # MobileBERT multiplies with two weights joined, inside the module that holds them.
    if head is None:
        return "no module of their own makes them"
    if hooks.is_offloaded(head):
        return "its head is offloaded: keep it on a device"
    if type(head) is not nn.Linear or any(quantised_weights(head)):
        return f"its head is {type(head).__name__}, not a plain product"
    products: list[Tensor] = []

    def replace_product(output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(12)
        sizes = 10 ** torch.empty(output.shape).uniform_(-2, 3, generator=generator)
        product = torch.randn(output.shape, generator=generator) * sizes
        products.append(product.to(output))
        return products[-1]

    with hooks.watching([hooks.Watch(head, "output", replace_product)]):
        _, true_logits = _true_pass(model, last)
    if len(products) != 1 or products[0].flatten(0, -2).shape != true_logits.shape:
        return "its head does not make the logits in one call"
    rounding = 8 * torch.finfo(products[0].dtype).eps
    product, logits = products[0].flatten(0, -2).double(), true_logits.double()
    if torch.equal(product, logits):
        return "none", 1.0
    largest = int(product.abs().argmax())
    scale = (logits.flatten()[largest] / product.flatten()[largest]).item()
    if torch.allclose(logits, product * scale, rtol=rounding, atol=0):
        return "scale", scale
    cap = logits.abs().max().item()
    if torch.allclose(logits, cap * torch.tanh(product / cap), rtol=rounding, atol=0):
        return "softcap", cap
    return "its logits are not a known function of the head's product"

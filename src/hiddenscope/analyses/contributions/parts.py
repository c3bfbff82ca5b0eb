"""Parts: what every head, MLP, neuron and bias adds to the logit of an answer.

The last layer is `layer.0` plus what every block's parts add. With the final norm's
scale frozen, a logit is linear in the last layer. So there is one direction in the
residual stream for each token of the answer, and the product of a part's write with it
is what the part adds. The states are the model's own, and the products are made in
float64, on the device of the states.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.contributions.final_norm import FrozenNorm, freeze_norm
from hiddenscope.analyses.contributions.question import Question
from hiddenscope.discovery import Stack, effects_along
from hiddenscope.errors import PassError
from hiddenscope.model import Model
from hiddenscope.modules import autograd
from hiddenscope.passes.record import record_rows
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Ints

BRANCHES = ("attn", "cross")
NOUNS = {"attn": "attention", "cross": "cross-attention"}
OTHER_WAYS = "Use hs.lens or hs.patch."
# Units in the last place that each state of the pass may be off: many times what
# rounding does. Such errors are independent, so that they add up like a random walk.
ROUNDING = 4
# The same for the products of the pass, which are summed in float32 at least.
SUMMING = 64
# The precision of products in float32, by torch's names for it.
FEWER_DIGITS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}


@dataclass(frozen=True)
class Neurons:
    """The strongest neurons of each token of the answer, [step, rank]."""

    effect: NDArray[np.float64]
    layer: Ints
    index: Ints


@dataclass
class Parts:
    """What the parts add to the logit of each token of the answer.

    `by_layer` holds arrays [step, layer] by name, such as `mlp`, and `heads` arrays
    [step, layer, head]; NaN stands where a block has no such part. `single` are arrays
    [step]. `logit` is the model's, and `allowed` how far rounding may move the sum.
    `centred` says whether the final norm subtracts the mean.
    """

    heads: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    by_layer: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    single: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    neurons: Neurons | None = None
    logit: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    allowed: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    probability: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    dtype: str = ""
    centred: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> NDArray[np.float64]:
        """Return the sum of all parts, [step]."""
        total = np.zeros(len(self.logit))
        for values in self.single.values():
            total = total + values
        for values in self.by_layer.values():
            total = total + np.nansum(values, axis=1)
        for values in self.heads.values():
            total = total + np.nansum(values, axis=(1, 2))
        return total

    @property
    def error(self) -> NDArray[np.float64]:
        """Return how far the sum of all parts is from the model's logit, [step]."""
        return self.total - self.logit


def check_stack(model: Model) -> Stack:
    """Return the stack below the head; refuse one whose parts do not sum up."""
    problem = f"Cannot split the logits of {model.name} into parts"
    stack = model.anatomy.stacks[-1]
    if not stack.causal:
        raise PassError(
            problem, "it sees the whole text and predicts no next token", OTHER_WAYS
        )
    for number, block in enumerate(stack.blocks, 1):
        reason = ""
        if block.kind == "post-norm":
            reason = (
                f"block {number} norms the sum of its parts and the residual stream, so"
                " that the last layer is no sum of parts"
            )
        elif block.kind not in ("pre-norm", "parallel") or not block.parts:
            reason = f"the parts of block {number} are not known: {block.refused}"
        if reason:
            raise PassError(problem, reason, OTHER_WAYS)
    return stack


@autograd.without_grad
def split_logits(
    model: Model, question: Question, unembedding: Unembedding, *, neurons: int
) -> Parts:
    """Return what every part adds to the logits that are asked for.

    A PassError says that the parts do not sum to the model's logit.
    """
    stack = check_stack(model)
    name = stack.name if model.encoder_decoder else None
    sites = list(_sites(model, stack, name, neurons=neurons > 0))
    states = record_rows(model, question.inputs, sites, question.rows)
    last = states[Site(stack.depth, "", name)]
    with model.lock:
        norm = freeze_norm(unembedding, last)
        weight, bias = unembedding.word_rows(question.words)
        if question.others is not None:
            # The difference of two words reads the difference of their logits.
            steps = len(question.answers)
            weight = weight[:steps] - weight[steps:]
            bias = bias[:steps] - bias[steps:]
        directions = norm.directions(weight)
        attribution = _Attribution(model, stack, name, states, directions)
        parts = attribution.parts(neurons)
    parts.single["norm_bias"] = _numbers(weight @ norm.bias)
    parts.single["head_bias"] = _numbers(bias)
    parts.logit = _numbers((weight * norm.output).sum(-1) + bias)
    # They came from this dtype, so that nothing is rounded.
    head_inputs = norm.output.to(unembedding.head_dtype)
    logits = unembedding.logits(head_inputs).double()
    answers = torch.tensor(question.answers, device=logits.device)
    log_probabilities = logits.log_softmax(-1).gather(1, answers[:, None])
    parts.probability = _numbers(log_probabilities[:, 0].exp())
    parts.centred = norm.centred
    parts.dtype = str(last.dtype).removeprefix("torch.")
    parts.allowed = attribution.rounding(norm, weight)
    error = np.abs(parts.error)
    # A NaN is too much as well.
    if not (error <= parts.allowed).all():
        worst = int(np.nanargmax(error / parts.allowed))
        raise PassError(
            f"The parts of {model.name} do not sum to its logit",
            f"they are off by {error[worst]:.2g}, and rounding in {parts.dtype}"
            f" explains at most {parts.allowed[worst]:.2g}",
            OTHER_WAYS,
        )
    return parts


def _sites(
    model: Model, stack: Stack, name: str | None, *, neurons: bool
) -> Iterator[Site]:
    """Yield the sites that are needed: the stream, the parts, and what is inside."""
    yield Site(0, "", name)
    for layer, block in enumerate(stack.blocks, 1):
        inside = model.anatomy.block_inside(Site(layer, "", name))
        for branch in BRANCHES:
            if branch not in block.parts:
                continue
            yield Site(layer, branch, name)
            if inside.branches[branch].heads is not None:
                yield Site(layer, f"{branch}.z", name)
        yield Site(layer, "mlp", name)
        if neurons and inside.branches["mlp"].projection is not None:
            yield Site(layer, "mlp.neurons", name)
        yield Site(layer, "", name)


class _Attribution:
    """The states of one pass, and the directions that they are read along."""

    def __init__(
        self,
        model: Model,
        stack: Stack,
        name: str | None,
        states: Mapping[Site, Tensor],
        directions: Tensor,
    ) -> None:
        self.model = model
        self.stack = stack
        self.name = name
        self.states = states
        self.directions = directions

    def parts(self, neurons: int) -> Parts:
        """Return what the embeddings and all blocks add."""
        parts = Parts()
        embedding = self._along(Site(0, "", self.name))
        parts.single["embedding"] = _numbers(embedding)
        for branch in BRANCHES:
            counts = self._head_counts(branch)
            if counts is not None:
                self._split_attention(parts, branch, counts)
        mlp = []
        for layer in range(1, self.stack.depth + 1):
            added = self._along(Site(layer, "mlp", self.name))
            mlp.append(_numbers(added))
        parts.by_layer["mlp"] = np.stack(mlp, axis=1)
        if neurons:
            parts.neurons = self._strongest_neurons(parts, neurons)
        return parts

    def _split_attention(self, parts: Parts, branch: str, counts: list[int]) -> None:
        """Put in what the heads and biases of an attention add, in every block."""
        shape = len(self.directions), self.stack.depth
        heads = np.full((*shape, max(counts)), np.nan)
        biases = np.full(shape, np.nan)
        whole = np.full(shape, np.nan)
        refused = ""
        for row, count in enumerate(counts):
            site = Site(row + 1, branch, self.name)
            if count:
                z = Site(site.layer, f"{site.branch}.z", site.stack)
                columns, bias = self._columns(z)
                # The columns of a head stand side by side.
                by_head = columns.reshape(len(columns), count, -1)
                heads[:, row, :count] = _numbers(by_head.sum(-1))
                biases[:, row] = _numbers(bias)
            else:
                whole[:, row] = _numbers(self._along(site))
                refused = refused or self._why(site)
        parts.heads[f"{branch}_head"] = heads
        parts.by_layer[f"{branch}_bias"] = biases
        if 0 in counts:
            parts.by_layer[f"{branch}_whole"] = whole
            noun = NOUNS[branch]
            note = f"The {noun} of some blocks is not split into heads: {refused}."
            parts.notes.append(note)

    def _along(self, site: Site) -> Tensor:
        """Return what the state at a site adds, [step]."""
        state = self.states[site].to(self.directions)
        return (state * self.directions).sum(-1)

    def _head_counts(self, branch: str) -> list[int] | None:
        """Return the number of heads of each block, 0 where they are not known.

        It is None in a stack without such a branch.
        """
        counts = []
        for layer, block in enumerate(self.stack.blocks, 1):
            if branch not in block.parts:
                return None
            site = Site(layer, branch, self.name)
            heads = self.model.anatomy.block_inside(site).branches[branch].heads
            counts.append(0 if heads is None else heads.heads)
        return counts

    def _why(self, site: Site) -> str:
        return self.model.anatomy.block_inside(site).branches[site.branch].refused

    def _columns(self, site: Site) -> tuple[Tensor, Tensor]:
        """Return what each column of a projection's input adds, and its bias."""
        inputs = self.states[site]
        # The blocks of a large model may be on several devices.
        directions = self.directions.to(inputs.device)
        projection = self.model.anatomy.projection(site)
        return effects_along(self.model.module, projection, inputs, directions)

    def _strongest_neurons(self, parts: Parts, most: int) -> Neurons | None:
        """Return the neurons that add or take most, over all blocks."""
        effects: list[Tensor] = []
        indices: list[Tensor] = []
        layers: list[int] = []
        refused = ""
        for layer in range(1, self.stack.depth + 1):
            site = Site(layer, "mlp.neurons", self.name)
            if site not in self.states:
                refused = refused or self._why(site)
                continue
            columns, _ = self._columns(site)
            # The strongest of all are among the strongest of each block.
            count = min(most, columns.shape[-1])
            best = columns.abs().topk(count).indices
            strongest = columns.gather(1, best)
            effects.append(strongest.to(self.directions))
            indices.append(best.to(self.directions.device))
            layers += [layer] * count
        if refused:
            parts.notes.append(f"Neurons of some blocks were left out: {refused}.")
        if not effects:
            return None
        effect = torch.cat(effects, 1)
        index = torch.cat(indices, 1)
        count = min(most, effect.shape[1])
        best = effect.abs().topk(count).indices
        places = best.cpu().numpy()
        return Neurons(
            effect=_numbers(effect.gather(1, best)),
            layer=np.array(layers)[places],
            index=index.gather(1, best).cpu().numpy(),
        )

    def rounding(self, norm: FrozenNorm, weight: Tensor) -> NDArray[np.float64]:
        """Return how far the rounding of the pass may move the sum, [step].

        Every state of the stream and every write is rounded once. Each channel's error
        is a share of its number, independent of the others.
        """
        output = weight * norm.output
        squares = output.square().sum(-1)
        eps = 0.0
        for site, state in self.states.items():
            eps = max(eps, torch.finfo(state.dtype).eps)
            # What is inside a branch is rounded once, in what the branch adds.
            if site.is_inner:
                continue
            terms = state.to(self.directions) * self.directions
            squares = squares + terms.square().sum(-1)
        summing_eps = min(eps, torch.finfo(torch.float32).eps)
        units = ROUNDING * eps + SUMMING * summing_eps
        # A user may let the products of float32 be made with fewer digits.
        if eps == summing_eps:
            units += ROUNDING * FEWER_DIGITS[torch.get_float32_matmul_precision()]
        return units * _numbers(squares.sqrt())


def _numbers(values: Tensor) -> NDArray[np.float64]:
    numbers: NDArray[np.float64] = values.double().cpu().numpy()
    return numbers

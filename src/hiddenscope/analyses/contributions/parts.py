"""Parts: what every head, MLP, neuron and bias adds to the logit of an answer.

The last layer is `layer.0` plus what every block's parts add. With the final norm's
scale frozen, a logit is linear in the last layer. So there is one direction in the
residual stream for each token of the answer, and the product of a part's write with it
is what the part adds. The states are the model's own, and the products are made in
float64, on the device of the states.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiddenscope.analyses.contributions.final_norm import FrozenNorm, freeze_norm
from hiddenscope.analyses.contributions.question import Question
from hiddenscope.discovery import Stack, effects_along
from hiddenscope.discovery.anatomy import Branch
from hiddenscope.errors import PassError
from hiddenscope.model import Model
from hiddenscope.modules import autograd
from hiddenscope.passes.record import record_rows
from hiddenscope.passes.unembed import HeadInputs, Unembedding
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats, Ints

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


class Neurons(NamedTuple):
    """The strongest neurons of each token of the answer, [step, rank]."""

    effect: Floats
    layer: Ints
    number: Ints


class Parts(NamedTuple):
    """What the parts add to the logit of each token of the answer.

    `arrays` are [step], [step, layer] or [step, layer, head], by names such as `mlp`;
    NaN stands where a block has no such part. `logit` is the model's, and `allowed` how
    far rounding may move the sum. `centred` says whether the final norm subtracts the
    mean.
    """

    arrays: dict[str, Floats]
    neurons: Neurons | None
    logit: Floats
    allowed: Floats
    probability: Floats
    dtype: str
    centred: bool
    notes: list[str]

    @property
    def total(self) -> Floats:
        """Return the sum of all parts, [step]."""
        total = np.zeros(len(self.logit))
        for values in sorted(self.arrays.values(), key=np.ndim):
            total = total + np.nansum(values.reshape(len(total), -1), axis=1)
        return total

    @property
    def error(self) -> Floats:
        """Return how far the sum of all parts is from the model's logit, [step]."""
        return self.total - self.logit


def check_stack(model: Model) -> Stack:
    """Return the stack below the head; refuse one whose parts do not sum up."""
    problem = f"Cannot split the logits of {model.name} into parts"
    stack = model.anatomy.stacks[-1]
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
    model: Model,
    question: Question,
    entry: Site,
    reader: Unembedding | Tensor,
    *,
    neurons: int,
) -> Parts:
    """Return what every part adds to the logits that are asked for.

    With a vector [width] as the reader, that is what they add to the state of the
    entry along it. A PassError says that the parts do not sum to the model's logit.
    """
    sites = list(_sites(model, entry, neurons=neurons > 0))
    states = record_rows(model, question.inputs, sites, question.rows)
    last = states[entry]
    probability = torch.full((1,), torch.nan)
    with model.lock:
        if isinstance(reader, Tensor):
            weight = reader.to(last.device)[None]
            bias = torch.zeros_like(weight[:, 0])
            unnormed = torch.ones_like(weight), torch.zeros_like(weight[0])
            norm = FrozenNorm(*unnormed, False, last.double(), 0.0)
        else:
            norm = freeze_norm(reader, last)
            weight, bias = reader.word_rows(question.words)
            # They came from this dtype, so that nothing is rounded.
            output = HeadInputs(norm.output.to(reader.head_dtype), entry)
            logits = reader.logits(output).double()
            answers = torch.tensor(question.answers, device=logits.device)
            probability = logits.softmax(-1).gather(1, answers[:, None])[:, 0]
        if question.others is not None:
            # The difference of two words reads the difference of their logits.
            steps = len(question.answers)
            weight = weight[:steps] - weight[steps:]
            bias = bias[:steps] - bias[steps:]
        directions = norm.directions(weight)
        attribution = _Attribution(model, entry, states, directions)
        attribution.split()
        strongest = attribution.strongest_neurons(neurons) if neurons else None
    attribution.arrays["norm_bias"] = _numbers(weight @ norm.bias)
    attribution.arrays["head_bias"] = _numbers(bias)
    parts = Parts(
        attribution.arrays,
        strongest,
        logit=_numbers((weight * norm.output).sum(-1) + bias),
        allowed=attribution.rounding(norm, weight),
        probability=_numbers(probability),
        dtype=str(last.dtype).removeprefix("torch."),
        centred=norm.centred,
        notes=attribution.notes,
    )
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


def _sites(model: Model, entry: Site, *, neurons: bool) -> Iterator[Site]:
    """Yield the sites that are needed: the stream, the parts, and what is inside."""
    name = entry.stack
    yield Site(0, "", name)
    for layer, block in enumerate(model.anatomy.stacks[-1].blocks[: entry.layer], 1):
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
    """The states of one pass, the directions that they are read along, and what the
    parts add.
    """

    def __init__(
        self,
        model: Model,
        entry: Site,
        states: Mapping[Site, Tensor],
        directions: Tensor,
    ) -> None:
        self.model = model
        self.name = entry.stack
        self.depth = entry.layer or 0
        self.states = states
        self.directions = directions
        self.arrays: dict[str, Floats] = {}
        self.notes: list[str] = []

    def split(self) -> None:
        """Put in what the embeddings and all blocks add."""
        self.arrays["embedding"] = self._along(Site(0, "", self.name))
        blocks = self.model.anatomy.stacks[-1].blocks[: self.depth]
        for branch in BRANCHES:
            if all(branch in block.parts for block in blocks):
                self._split_attention(self._layers(branch))
        mlp = map(self._along, self._layers("mlp"))
        self.arrays["mlp"] = np.stack(list(mlp), axis=1)

    def _layers(self, part: str) -> list[Site]:
        """Return the sites of a part in all blocks."""
        return [Site(layer, part, self.name) for layer in range(1, self.depth + 1)]

    def _split_attention(self, sites: list[Site]) -> None:
        """Put in what the heads and biases of an attention add, in every block."""
        branch = sites[0].branch
        # A block whose heads are not known counts as having none.
        counts = []
        for site in sites:
            heads = self._inside(site).heads
            counts.append(0 if heads is None else heads.heads)
        shape = len(self.directions), len(sites)
        by_head = np.full((*shape, max(counts)), np.nan)
        biases = np.full(shape, np.nan)
        whole = np.full(shape, np.nan)
        for row, count in enumerate(counts):
            if not count:
                whole[:, row] = self._along(sites[row])
                continue
            z = Site(row + 1, f"{branch}.z", self.name)
            columns, bias = self._columns(z)
            # The columns of a head stand side by side.
            sums = columns.reshape(len(columns), count, -1).sum(-1)
            by_head[:, row, :count] = _numbers(sums)
            biases[:, row] = _numbers(bias)
        self.arrays[f"{branch}_head"] = by_head
        self.arrays[f"{branch}_bias"] = biases
        if 0 in counts:
            self.arrays[f"{branch}_whole"] = whole
            refused = self._inside(sites[counts.index(0)]).refused
            noun = NOUNS[branch]
            note = f"The {noun} of some blocks is not split into heads: {refused}."
            self.notes.append(note)

    def _along(self, site: Site) -> Floats:
        """Return what the state at a site adds, [step]."""
        state = self.states[site].to(self.directions)
        return _numbers((state * self.directions).sum(-1))

    def _inside(self, site: Site) -> Branch:
        return self.model.anatomy.block_inside(site).branches[site.branch]

    def _columns(self, site: Site) -> tuple[Tensor, Tensor]:
        """Return what each column of a projection's input adds, and its bias."""
        inputs = self.states[site]
        # The blocks of a large model may be on several devices.
        directions = self.directions.to(inputs.device)
        projection = self.model.anatomy.projection(site)
        return effects_along(self.model.module, projection, inputs, directions)

    def strongest_neurons(self, most: int) -> Neurons | None:
        """Return the neurons that add or take most, over all blocks."""
        effects = []
        indices = []
        layers = []
        refused = ""
        for layer, site in enumerate(self._layers("mlp.neurons"), 1):
            if site not in self.states:
                refused = refused or self._inside(site).refused
                continue
            columns, _ = self._columns(site)
            # The strongest of all are among the strongest of each block.
            strongest, places = _largest(columns.to(self.directions), most)
            effects.append(strongest)
            indices.append(places)
            layers += [layer] * places.shape[1]
        if refused:
            self.notes.append(f"Neurons of some blocks were left out: {refused}.")
        if not effects:
            return None
        effect, places = _largest(torch.cat(effects, 1), most)
        number = torch.cat(indices, 1).gather(1, places).cpu().numpy()
        layer_of = np.array(layers)[places.cpu().numpy()]
        return Neurons(_numbers(effect), layer_of, number)

    def rounding(self, norm: FrozenNorm, weight: Tensor) -> Floats:
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


def _largest(columns: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the largest columns of each row, whatever their sign, and their places."""
    places = columns.abs().topk(min(most, columns.shape[1])).indices
    return columns.gather(1, places), places


def _numbers(values: Tensor) -> Floats:
    return values.double().cpu().numpy()

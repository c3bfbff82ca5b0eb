"""Dictionary: many directions at one site, and how strongly each acts in a state.

A state is scaled and centred as `Encoding` says, goes through the encoder, and of the
products those count that pass the threshold or are among the k largest. Each of them
times its direction, summed, is the state again, or with a transcoder what another
site adds. That is how the sparse dictionaries of all libraries work; they differ in
the details that `Encoding` names.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from hiddenscope import texts as shipped
from hiddenscope.arguments import checked, integer
from hiddenscope.directions.direction import Direction
from hiddenscope.directions.encoding import Encoding, largest
from hiddenscope.directions.feed import feed_of
from hiddenscope.directions.layouts import ORIGINS, read_layout, write_saelens
from hiddenscope.directions.proof import Proof, normed_as, prove
from hiddenscope.directions.training import Training, train
from hiddenscope.discovery.anatomy import Write
from hiddenscope.errors import ArgumentError, NotFinite, SiteError, StatesError
from hiddenscope.files import PathLike
from hiddenscope.loading.checkpoint import usable_device
from hiddenscope.measures import RunningStatistics, chunks
from hiddenscope.measures.massive import is_massive, length_limit
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.modules import autograd
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Facts
from hiddenscope.sites import Site
from hiddenscope.states import Readable, States
from hiddenscope.states.pooling import refuse_pooled
from hiddenscope.store import Store

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

# About how many activations are computed at once.
AT_ONCE = 2**26
LAYER_NORM_EPS = 1e-5
# States that are drawn to scale random directions.
DRAWN = 512
# Texts of an analysis on which a dictionary is proved that was not when it was read.
FEWEST_TEXTS, MOST_TEXTS = 8, 40


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Dictionary:
    """Directions at a site, and how their activations are computed from a state.

    `directions` is [feature, width], and `dictionary[17]` one of them as a `Direction`.
    `encoder` is [width, feature], or None where the states read are the activations
    themselves, as those of neurons are. Activations come from the states of `reads`,
    and the directions lie at `writes`: the same site, unless it is a transcoder. `skip`
    is what such a transcoder adds linearly, [width, width]. The features of a
    cross-layer transcoder have directions at `later` sites as well, see `at`. `facts`
    say where it comes from, and `proof` how it did on states of a model.

    Make one with `Dictionary.of`, `.neurons`, `.pca`, `.random`, `.fit` or `.read`.
    """

    directions: Tensor
    encoder: Tensor | None
    encoder_bias: Tensor
    bias: Tensor
    reads: str
    writes: str
    encoding: Encoding = field(default_factory=Encoding)
    skip: Tensor | None = None
    facts: Facts = field(default_factory=dict)
    later: Mapping[str, Tensor] | None = None
    proof: Proof | None = None

    def __post_init__(self) -> None:
        problem = "Cannot make a dictionary"
        for name in ("directions", "encoder"):
            rows = getattr(self, name)
            if rows is not None and rows.ndim != 2:
                reason = f"{name} has the shape {list(rows.shape)}"
                raise StatesError(problem, reason, "Give a matrix.")
        count, width_out = self.directions.shape
        width_in = self.width
        encoding = self.encoding
        shapes = {
            "directions": (self.directions, (count, width_out)),
            "encoder": (self.encoder, (width_in, count)),
            "encoder_bias": (self.encoder_bias, (count,)),
            "bias": (self.bias, (width_out,)),
            "skip": (self.skip, (width_in, width_out)),
            "threshold": (encoding.threshold, (count,)),
            "gate_bias": (encoding.gate_bias, (count,)),
            "gain": (encoding.gain, (count,)),
        }
        if not count * width_in * width_out:
            reason = "it has no features, or states have no width"
            raise StatesError(problem, reason, "Give at least one direction.")
        for name, (tensor, shape) in shapes.items():
            if tensor is not None and tensor.shape != shape:
                reason = f"{name} has the shape {list(tensor.shape)}"
                raise StatesError(problem, reason, f"Give {list(shape)}.")
        if encoding.k is not None and not 0 < encoding.k <= count:
            reason = f"k is {encoding.k}, and there are {count:,} features"
            raise StatesError(problem, reason, f"Give k from 1 to {count}.")
        if encoding.gate == "groups" and count % (encoding.k or 1):
            reason = f"{count:,} features cannot be cut into {encoding.k} equal groups"
            raise StatesError(problem, reason, "Give a k that divides them.")
        if encoding.centred and width_in != width_out:
            reason = "a bias of another width cannot be subtracted from its input"
            raise StatesError(problem, reason, "Leave `centred` out.")

    @property
    def width(self) -> int:
        """Return the width of the states that are read."""
        return len(self) if self.encoder is None else len(self.encoder)

    def __len__(self) -> int:
        return len(self.directions)

    def __repr__(self) -> str:
        at = self.reads
        if self.reads != self.writes:
            at = f"{self.reads} to {self.writes}"
        words = [f"{len(self):,} features at {at}", self.encoding.gate]
        if self.encoding.k is not None:
            words[-1] += f" {self.encoding.k}"
        if self.proof is not None:
            words.append(f"{self.proof.stated.unexplained:.1%} unexplained")
        return f"Dictionary({', '.join(words)})"

    def __getitem__(self, feature: int) -> Direction:
        """Return one feature as a direction at the site that it writes to.

        >>> from hiddenscope.directions.dictionary import Dictionary
        >>> dictionary = Dictionary.of([[0.0, 2.0], [3.0, 0.0]], "layer.2")
        >>> dictionary[1]
        Direction(origin feature, feature 1)
        """
        if not -len(self) <= feature < len(self):
            raise SiteError(
                f"No feature {feature:,}",
                f"the dictionary has {len(self):,}",
                f"Choose 0 to {len(self) - 1}.",
            )
        number = feature % len(self)
        noun = "neuron" if self.encoder is None else "feature"
        facts = {"origin": noun, "feature": number}
        vector = self.directions[number].double().cpu()
        return Direction({self.writes: vector}, self.writes, facts=facts)

    def __iter__(self) -> Iterator[Direction]:
        # Without it Python would count on until there is an IndexError.
        return map(self.__getitem__, range(len(self)))

    @classmethod
    def of(
        cls, directions: "ArrayLike | Tensor | Sequence[Direction]", site: str = ""
    ) -> "Dictionary":
        """Take vectors [feature, width], or directions that lie at one site.

        The activation of each is the product of the state with its unit vector, as of a
        probe or a principal component: no more than that is known of a direction.

        >>> from hiddenscope.directions.dictionary import Dictionary
        >>> dictionary = Dictionary.of([[0.0, 2.0], [3.0, 0.0]], "layer.2")
        >>> dictionary.activations(torch.tensor([[1.0, 5.0]]))
        tensor([[5., 1.]])
        """
        several = directions
        if isinstance(directions, Sequence) and len(directions):
            rows = [_row(item, site) for item in directions]
            several, sites = zip(*rows, strict=True)
            if not site and len(set(sites)) == 1:
                site = sites[0]
        if not site:
            raise SiteError(
                "A dictionary lies at one site",
                "these directions name none, or several",
                "Give site='layer.12'.",
            )
        vectors = _matrix(several)
        norms = vectors.norm(dim=1)
        if not (norms > 0).all():
            number = int((norms == 0).nonzero()[0])
            reason = f"direction {number} is zero"
            raise StatesError("Cannot make a dictionary", reason, "Leave it out.")
        site = str(Site.parse(site))
        units = (vectors / norms[:, None]).float()
        zero = units.new_zeros
        return cls(
            units,
            units.T.contiguous(),
            zero(len(units)),
            zero(units.shape[1]),
            site,
            site,
            Encoding("linear"),
            facts={"origin": "directions"},
        )

    @classmethod
    def neurons(cls, model: ModelLike, site: str) -> "Dictionary":
        """Take the neurons of an MLP: what each writes, and how strongly it acts.

        >>> import hiddenscope as hs
        >>> from hiddenscope.testing import tiny_model
        >>> model = hs.load((tiny_model("llama"), None))
        >>> hs.Dictionary.neurons(model, "layer.2.mlp.neurons")
        Dictionary(64 features at layer.2.mlp.neurons to layer.2.mlp, linear)
        """
        model = as_model(model)
        (place, *others) = model.anatomy.select(site)
        problem = f"Cannot take the neurons of {place}"
        if others or place.kind != "mlp.neurons":
            reason = "it has none, or others are named too"
            raise SiteError(problem, reason, "Give 'layer.3.mlp.neurons'.")
        projection = model.anatomy.projection(place)
        if projection.norm:
            reason = "a norm after the MLP scales what they write, token by token"
            raise StatesError(problem, reason, "Use hs.contributions.")
        write = Write(model.module, projection, slice(None))
        with autograd.restored(), torch.no_grad():
            units = torch.eye(projection.width, device=model.device)
            directions = write.linear(units.to(model.dtype)).float()
            bias = write.bias(units[:1].to(model.dtype))[0].float()
        return cls(
            directions,
            None,
            directions.new_zeros(len(directions)),
            bias,
            str(place),
            str(Site(place.layer, "mlp", place.stack)),
            Encoding("linear"),
            facts={"origin": "neurons"},
        )

    @classmethod
    def pca(cls, states: Readable, count: int, site: str = "") -> "Dictionary":
        """Take the principal components of states or of a store, in one stream.

        First tokens are left out, and whatever else is longer than 4 times the median:
        such states are often a hundred times as large as the others.
        """
        site, statistics = _statistics(states, site)
        most = min(statistics.count - 1, len(statistics.mean))
        if not 0 < count <= most:
            width = len(statistics.mean)
            reason = f"{statistics.count:,} states of width {width} have {most:,}"
            raise StatesError(
                f"Cannot take {count:,} principal components", reason, "Take fewer."
            )
        return principal_components(statistics, count, site)

    @classmethod
    def random(
        cls, states: Readable, count: int, active: int, site: str = "", *, seed: int = 0
    ) -> "Dictionary":
        """Draw directions at random, of which the `active` largest act in a state.

        It is what a learned dictionary must beat: the directions know nothing of the
        states but their mean and how long what they say must be.
        """
        integer(count, "count", 1)
        integer(active, "active", 1)
        site, statistics = _statistics(states, site)
        return random_directions(statistics, count, active, site, seed)

    @classmethod
    def fit(
        cls,
        source: ModelLike | Store | States,
        site: str = "",
        *,
        features: int,
        k: int = 32,
        texts: Texts | Inputs | None = None,
        training: Training | None = None,
        checkpoint: PathLike | None = None,
    ) -> "Dictionary":
        """Train a sparse dictionary on states: of a store, in memory, or of texts.

        `k` features act in a state on average (BatchTopK). `Training` says for how
        long, and the rest. With a `checkpoint` the run is saved there every minute and
        when it is interrupted, and the same call goes on from it, to the same numbers.

        >>> import hiddenscope as hs
        >>> from hiddenscope.testing import tiny_model
        >>> model = hs.load((tiny_model("gpt2"), None))
        >>> texts = [[5, 6, 7, 8, 9]] * 10
        >>> brief = hs.Training(tokens=400, batch=40)
        >>> hs.Dictionary.fit(
        ...     model, "layer.2", features=16, k=4, texts=texts, training=brief
        ... )
        Dictionary(16 features at layer.2, threshold)
        """
        if not isinstance(source, Store | States):
            source = as_model(source)
        training = training or Training()
        feed = feed_of(source, site, texts, training.first_tokens)
        path = None if checkpoint is None else Path(checkpoint)
        # What inference mode makes has no gradient.
        with autograd.restored(inference=False):
            return cls(**train(feed, features, k, training, path)._asdict())

    @classmethod
    def read(
        cls,
        path: PathLike,
        model: ModelLike | None = None,
        site: str = "",
        texts: Texts | None = None,
    ) -> "Dictionary":
        """Read a dictionary that another library saved, and prove it on a model.

        `path` is its folder: of SAELens, Gemma Scope, Llama Scope, sparsify,
        dictionary_learning, circuit-tracer, Goodfire or Qwen Scope. `site` is where it
        lies, if the file does not say, or which of a set to read; another one than what
        the file says is refused. With a model, what the file
        states is tried on states of `texts`, or of 40 plain sentences, beside what it
        might have meant, and refused if that fits better; without, it is taken at its
        word.
        """
        dictionary = cls(**read_layout(path, site)._asdict())
        if model is None:
            if texts is not None:
                reason = "texts are for a proof, and no model is given"
                remedy = "Give read(path, model, texts=...), or leave them out."
                raise ArgumentError("Cannot use these texts", reason, remedy)
            return dictionary
        lower = []
        if dictionary.later is not None:
            # What features of lower layers write there belongs to its output too.
            for layer in range(1, Site.parse(dictionary.reads).layer or 1):
                member = cls.read(path, site=f"layer.{layer}")
                lower.append(member.at(dictionary.writes))
        return dictionary.proved(as_model(model), texts, lower)

    def proved(
        self,
        model: Model,
        texts: Texts | Inputs | None = None,
        lower: Sequence["Dictionary"] = (),
    ) -> "Dictionary":
        """Return the dictionary with its proof, or raise; see `read`.

        `lower` are the features of lower layers that write to the same site.
        """
        self._check_module(model)
        inputs = model.encode(shipped.read("plain").texts if texts is None else texts)
        members = []
        for member in (self, *lower):
            members.append(normed_as(model, inputs, member.to(model.device)))
        proof = prove(members, model, inputs)
        facts = {**self.facts, "unexplained": proof.stated.unexplained}
        return replace(members[0], proof=proof, facts=facts)

    def _check_module(self, model: Model) -> None:
        """Refuse the output of a module that is not what its branch adds."""
        place = Site.parse(self.writes)
        is_module = self.facts.get("origin") in ("sparsify", "dictionary_learning")
        if not is_module or place.part not in ("attn", "mlp"):
            return
        branch = model.anatomy.block_inside(place).branches.get(place.part)
        projection = branch and branch.projection
        if projection and (projection.norm or projection.scale != 1):
            raise StatesError(
                f"Cannot use this dictionary with {model.name}",
                f"it is of what a module gives, and {place} comes after a norm or a"
                " number that multiplies it",
                "Take one of the layer.",
            )

    @property
    def is_believed(self) -> bool:
        """Tell whether it comes from a file, and is taken at its word."""
        return self.facts.get("origin") in ORIGINS and self.proof is None

    def assured(self, model: Model | None, inputs: Inputs | None) -> "Dictionary":
        """Return it proved on some of these texts, if it is believed and they suffice.

        A cross-layer transcoder is proved with its lower layers, by `read` alone.
        """
        count = len(inputs or ())
        can_be_proved = count >= FEWEST_TEXTS and self.later is None
        if model is None or inputs is None or not (self.is_believed and can_be_proved):
            return self
        return self.proved(model, inputs.some(range(min(count, MOST_TEXTS))))

    def at(self, site: str) -> "Dictionary":
        """Return a cross-layer transcoder's features, with what they write at a site.

        The output of an MLP is the sum of what the features of its own layer and of all
        lower ones write there; the bias comes with those of its own.
        """
        if site == self.writes:
            return self
        later = self.later or {}
        if site not in later:
            problem = f"These features do not write to {site}"
            reason = f"they write to {', '.join([self.writes, *later])}"
            raise SiteError(problem, reason, "Give one of these.")
        return replace(
            self,
            directions=later[site],
            bias=torch.zeros_like(self.bias),
            writes=site,
            skip=None,
            later={},
        )

    def save(self, path: PathLike) -> None:
        """Write a folder that SAELens reads: cfg.json and sae_weights.safetensors."""
        write_saelens(path, self)

    def to(
        self, device: str | torch.device, dtype: torch.dtype = torch.float32
    ) -> "Dictionary":
        """Return the dictionary on a device, in a dtype."""

        device = usable_device(device)

        def moved(value: Any) -> Any:
            return value.to(device, dtype) if isinstance(value, Tensor) else value

        encoding = {name: moved(value) for name, value in vars(self.encoding).items()}
        fields = {name: moved(value) for name, value in vars(self).items()}
        fields["encoding"] = Encoding(**encoding)
        if self.later is not None:
            fields["later"] = {at: moved(rows) for at, rows in self.later.items()}
        return Dictionary(**fields)

    def activations(self, states: Tensor) -> Tensor:
        """Return the activations [..., feature] of states [..., width], as they are.

        They are computed in the dtype and on the device of the dictionary.
        """
        inputs = self.normed(self._checked(states))
        encoding = self.encoding
        if encoding.centred:
            inputs = inputs - self.bias
        if encoding.gate == "gated":
            assert encoding.gate_bias is not None
            assert encoding.gain is not None
            products = inputs if self.encoder is None else inputs @ self.encoder
            sizes = products * encoding.gain + self.encoder_bias
            return sizes.relu() * (products + encoding.gate_bias > 0)
        if self.encoder is None:
            sizes = inputs + self.encoder_bias
        else:
            sizes = linear(inputs, self.encoder.T, self.encoder_bias)
        if encoding.gate == "linear":
            return sizes
        positive = sizes.relu()
        if encoding.gate == "relu":
            return positive
        if encoding.by_norm:
            sizes = sizes * self.directions.norm(dim=1)
        if encoding.gate == "threshold":
            assert encoding.threshold is not None
            return positive * (sizes > encoding.threshold)
        assert encoding.k is not None
        # The largest of each of k groups, or the k largest of one.
        groups = encoding.k if encoding.gate == "groups" else 1
        parts = torch.unflatten(sizes, -1, (groups, -1))
        mask = largest(parts, encoding.k // groups)
        return positive * mask.flatten(-2)

    def encode(self, states: States | np.ndarray[Any, Any] | Tensor) -> Tensor:
        """Return the activations [token, feature] as a sparse tensor.

        Of `States` those at the site that the dictionary reads are taken. They are
        computed a block of tokens at a time.
        """
        rows = torch.as_tensor(
            states[self.reads] if isinstance(states, States) else states
        )
        flat = rows.reshape(-1, (1, *rows.shape)[-1])
        blocks = [activations.to_sparse() for _, activations in self.blocks(flat)]
        activations = torch.cat(blocks).coalesce()
        if not activations.values().isfinite().all():
            raise NotFinite(
                "Cannot encode these states",
                "they hold a NaN or an infinity",
                "Give finite states.",
            )
        return activations

    def decode(self, activations: Tensor, states: Tensor | None = None) -> Tensor:
        """Return what activations [token, feature], dense or sparse, stand for.

        A dictionary with a linear skip, or that norms each state, also needs the states
        that were encoded.
        """
        # A bare number is one of something.
        count = (1, *activations.shape)[-1]
        if count != len(self):
            raise StatesError(
                f"Cannot decode {count:,} activations of a state",
                f"the dictionary has {len(self):,} features",
                "Give what its encode returned.",
            )
        decoded = activations.to(self.directions) @ self.directions + self.bias
        normed = self.encoding.state_norm and self.reads == self.writes
        if states is None:
            if normed or self.skip is not None:
                raise StatesError(
                    "Cannot decode these activations alone",
                    "this dictionary also uses the states that were encoded",
                    "Give decode(activations, states).",
                )
            return decoded
        inputs = self._checked(states)
        if normed:
            centre, size = self._norms(inputs)
            decoded = decoded * size + centre
        if self.skip is not None:
            decoded = decoded + self.normed(inputs) @ self.skip
        return decoded

    def reconstruct(self, states: Tensor) -> Tensor:
        """Return what is left of states when only their features are kept."""
        return self.decode(self.activations(states), states)

    def blocks(self, states: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of states with their activations, dense."""
        for block in torch.split(states, max(1, AT_ONCE // len(self))):
            yield block, self.activations(block)

    def normed(self, states: Tensor) -> Tensor:
        """Return the states that the encoder reads, and the skip of a transcoder."""
        # Each step that changes nothing would copy every state.
        if not self.encoding.state_norm:
            return states
        centre, size = self._norms(states)
        if self.encoding.state_norm == "layer":
            # SAELens does not multiply by it when it decodes.
            size = size + LAYER_NORM_EPS
        return (states - centre) / size

    def _norms(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is subtracted from each state, and what it is divided by."""
        mean = states.mean(-1, keepdim=True)
        root = self.width**0.5
        match self.encoding.state_norm:
            case "length":
                return torch.zeros_like(mean), states.norm(dim=-1, keepdim=True) / root
            case "centred":
                return mean, (states - mean).norm(dim=-1, keepdim=True) / root
            case "mean":
                return mean, torch.ones_like(mean)
            case "layer":
                return mean, states.std(-1, keepdim=True)
        raise StatesError(
            "Cannot norm these states",
            "the dictionary reads them as the model norms them, and some models take"
            " the mean out before",
            "Read it with its model: Dictionary.read(path, model).",
        )

    def _checked(self, states: Tensor) -> Tensor:
        width = (1, *states.shape)[-1]
        if width != self.width:
            raise StatesError(
                f"Cannot encode states of width {width}",
                f"the dictionary is for {self.reads} of width {self.width}",
                "Give the states of that site, of the model that it was made for.",
            )
        return states.to(self.directions)


def principal_components(
    statistics: RunningStatistics, count: int, site: str
) -> Dictionary:
    """Return the first components of states whose mean and covariance are known."""
    # In rising order.
    _, components = torch.linalg.eigh(statistics.covariance)
    dictionary = Dictionary.of(components.T.flip(0)[:count], site)
    return replace(
        dictionary,
        bias=statistics.mean.float(),
        encoding=replace(dictionary.encoding, centred=True),
        facts={"origin": "principal components"},
    )


def random_directions(
    statistics: RunningStatistics, count: int, active: int, site: str, seed: int
) -> Dictionary:
    """Draw directions that point anywhere, each as likely as any other.

    Directions that are alike overshoot when they are summed. So they are scaled as fits
    states best that are drawn with the mean and the covariance of these.
    """
    values, vectors = torch.linalg.eigh(statistics.covariance)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(DRAWN, len(values), generator=generator, dtype=torch.float64)
    states = drawn.to(values) * values.clamp_min(0).sqrt() @ vectors.T
    directions = torch.randn(count, len(values), generator=generator)
    dictionary = replace(
        Dictionary.of(directions.to(values.device), site),
        bias=statistics.mean.float(),
        encoding=Encoding("topk", k=active, centred=True),
        facts={"origin": "random", "seed": seed},
    )
    decoded = dictionary.reconstruct(states + statistics.mean) - statistics.mean
    scale = float((decoded * states).sum() / decoded.square().sum())
    return replace(dictionary, directions=dictionary.directions * scale)


def _statistics(states: Readable, site: str) -> tuple[str, RunningStatistics]:
    """Return the site, or the only one, and the statistics of ordinary tokens."""
    if not site:
        if len(states.sites) != 1:
            raise SiteError(
                "A dictionary lies at one site",
                f"these states are of {len(states.sites)}",
                "Give site='layer.12'.",
            )
        (site,) = map(str, states.sites)
    problem = f"Cannot make a dictionary of the states at {site}"
    refuse_pooled(states, problem)
    later = torch.from_numpy(states.tokens.positions > 0)
    limit = length_limit(states.blocks(site))
    statistics = RunningStatistics()
    start = 0
    for block in chunks(states.blocks(site)):
        is_used = later[start : start + len(block)].to(block.device)
        statistics.add(block[is_used & ~is_massive(block, limit)])
        start += len(block)
    if not statistics.count:
        reason = "there are none, first tokens left out"
        raise StatesError(problem, reason, "Give texts of two tokens or more.")
    if not statistics.covariance.isfinite().all():
        reason = "they have a NaN or an infinity"
        raise NotFinite(problem, reason, "Look at them with hs.profile.")
    # The squares of what is but rounding are smaller still.
    if statistics.covariance.trace() <= 1e-12 * statistics.mean.square().sum():
        raise StatesError(problem, "all states are equal", "Give other texts.")
    return site, statistics


def _row(item: Any, site: str) -> tuple[Any, str]:
    """Return a vector, and the site that it names, if it is a direction with one."""
    if not isinstance(item, Direction):
        return item, ""
    if site:
        return item.vector_at(Site.parse(site)), site
    sites = {key or str(item.sites or "") for key in item.vectors}
    return next(iter(item.vectors.values())), sites.pop() if len(sites) == 1 else ""


def _matrix(vectors: Any) -> Tensor:
    """Return vectors [feature, width] in float64."""
    try:
        if not isinstance(vectors, Tensor):
            vectors = torch.tensor(np.stack([np.asarray(row) for row in vectors]))
        if vectors.is_complex():
            raise TypeError
        matrix: Tensor = vectors.detach().double()
    except (TypeError, ValueError):
        matrix = torch.empty(0)
    # Of numbers that are too large the length is infinite.
    lengths = matrix.norm(dim=-1)
    if matrix.ndim != 2 or not matrix.numel() or not lengths.isfinite().all():
        raise StatesError(
            "Cannot make a dictionary",
            "its directions are not vectors of one width with finite numbers",
            "Give [feature, width], or directions at one site.",
        )
    return matrix

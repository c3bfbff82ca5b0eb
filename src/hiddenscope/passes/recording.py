"""Recording: keep the states of passes that the user runs, and what probes say of them.

A pass with a cache may go on with the texts of the pass before it. Between the two,
beam search puts its rows into another order, and assisted generation cuts off tokens
that it rejected: the cache shows whether it was left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.arguments import checked
from hiddenscope.discovery import EVERYTHING, Anatomy, OperationTap, Tap
from hiddenscope.errors import PassError, SiteError, StatesError
from hiddenscope.linear.probe import Probe
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.weights import check_finite
from hiddenscope.passes.buffers import one_or_pair, stacks_in
from hiddenscope.passes.inputs import Inputs
from hiddenscope.passes.protocol import (
    PassModel,
    named_arguments,
    pass_roots,
    user_module,
)
from hiddenscope.passes.record import Watcher
from hiddenscope.passes.text_encoder import TextEncoder
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Pair, Source, States, Tokens, join
from hiddenscope.states.arrays import Floats
from hiddenscope.states.mixed import stack_sites


@dataclass(frozen=True, eq=False)
class ProbeScores:
    """The scores of probes by name, one row for each token, in float64.

    A score is what `decision_function` of the probe returns: a number, or one for each
    of three or more classes.
    """

    tokens: Tokens
    scores: Mapping[str, Floats]

    def __getitem__(self, name: str) -> Floats:
        return self.scores[name]

    def of(self, text: int) -> ProbeScores:
        """Return the scores of one text; -1 is the last."""
        rows = self.tokens.rows(text)
        scores = {name: values[rows] for name, values in self.scores.items()}
        return ProbeScores(self.tokens.of(text), scores)


@dataclass
class RecordedPass:
    """One pass of the user's: its arguments, and its states [text, token, width].

    `scores` are those of probes, of the tokens in the mask `scored`. A pass that
    `continues` another began with tokens in its cache; `follows` says that the cache
    was as the pass before had left it.
    """

    root: nn.Module
    arguments: Mapping[str, Any]
    states: dict[Site, Tensor] = field(default_factory=dict)
    scores: dict[str, Floats] = field(default_factory=dict)
    scored: Tensor | None = None
    continues: bool = False
    follows: bool = False

    def argument(self, stack: str | None, name: str) -> Tensor | None:
        """Return a tensor that a stack was called with; None without it."""
        prefix = "decoder_" if stack == "decoder" else ""
        value = self.arguments.get(f"{prefix}{name}")
        return value if isinstance(value, Tensor) else None

    def length(self, stack: str | None) -> int | None:
        """Return how many tokens a stack worked on; None where it does not show."""
        for name in ("input_ids", "inputs_embeds"):
            tensor = self.argument(stack, name)
            if tensor is not None:
                return tensor.shape[1]
        return None

    def real(self, stack: str | None, shape: Sequence[int]) -> Tensor:
        """Return which tokens [text, token] are no padding."""
        mask, length = self.argument(stack, "attention_mask"), self.length(stack)
        if length is None or mask is None or mask.ndim != 2:
            return torch.ones(tuple(shape), dtype=torch.bool)
        # With a cache the mask covers the tokens of earlier passes too.
        return mask[:, -length:].bool().cpu()

    def tokens(self, encoder: TextEncoder, stack: str | None, real: Tensor) -> Tokens:
        """Return the tokens that are no padding."""
        ids = self.argument(stack, "input_ids")
        # A pass over embeddings has no ids.
        known = torch.full(real.shape, -1) if ids is None else ids.cpu()
        texts = []
        for row, is_real in zip(known, real, strict=True):
            texts.append(tuple(row[is_real].tolist()))
        return encoder.tokens(Inputs(tuple(texts)))


class Recording:
    """The recorded states: `passes` has those of each pass, `states` all of them.

    `scored` has the scores of probes for each pass, `scores` those of all.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        text_encoder: TextEncoder,
        sources: Mapping[str | None, Source],
    ) -> None:
        self.anatomy = anatomy
        self.text_encoder = text_encoder
        self.sources = sources
        self.scored_stack: str | None = None
        self.recorded: list[RecordedPass] = []

    @property
    def passes(self) -> list[States | Pair]:
        """Return the states of each pass, of real tokens only."""
        passes = []
        for recorded in self.recorded:
            if recorded.states:
                stacks = dict.fromkeys(site.stack for site in recorded.states)
                parts = [self._stack(recorded, stack) for stack in stacks]
                passes.append(one_or_pair(parts))
        return passes

    @property
    def states(self) -> States | Pair:
        """Return the states of every pass, text after text."""
        by_stack: dict[str | None, list[States]] = {}
        for states in self.passes:
            for part in stacks_in(states):
                by_stack.setdefault(part.sites[0].stack, []).append(part)
        if not by_stack:
            reason = "no pass was run inside the `with`"
            remedy = "Call the module there."
            if self.recorded:
                reason, remedy = "probes alone were asked for", "Name sites to keep."
            raise PassError("No recorded states", reason, remedy)
        return one_or_pair([join(parts) for parts in by_stack.values()])

    @property
    def scored(self) -> list[ProbeScores]:
        """Return the scores of the probes in each pass, of real tokens only."""
        scored = []
        stack = self.scored_stack
        for recorded in self.recorded:
            if recorded.scored is not None:
                tokens = recorded.tokens(self.text_encoder, stack, recorded.scored)
                scored.append(ProbeScores(tokens, recorded.scores))
        return scored

    @property
    def scores(self) -> ProbeScores:
        """Return the scores of the probes, of each text from its first token on.

        A pass with a cache goes on with the texts of the pass before it, as `generate`
        makes them; any other begins new texts. The last token that was generated has
        no score: nothing was computed from it. If the cache was changed between two
        passes, as by beam search, no row need be one text, which is an error.
        """
        recorded = [part for part in self.recorded if part.scored is not None]
        for later in recorded[1:]:
            if later.continues and not later.follows:
                raise PassError(
                    "Cannot join the scores of these passes",
                    "the cache was changed between two of them, or does not show its"
                    " rows, so that a row need not go on with its text (beam search"
                    " reorders rows, and assisted generation rejects tokens)",
                    "Read `rec.scored`, the scores of each pass.",
                )
        return _joined(self.scored, [part.continues for part in recorded])

    def _stack(self, recorded: RecordedPass, stack: str | None) -> States:
        """Return the states of one stack, with padding left out on either side."""
        sites = sorted(site for site in recorded.states if site.stack == stack)
        shape = recorded.states[sites[0]].shape[:2]
        real = recorded.real(stack, shape)
        tokens = recorded.tokens(self.text_encoder, stack, real)
        rows = [recorded.states[site][real] for site in sites]
        values = stack_sites(sites, rows)
        return States(tuple(sites), values, tokens, self.sources[stack])


@checked
@contextmanager
def recording(
    model: PassModel | nn.Module,
    sites: SitePatterns | None = None,
    *,
    probes: Mapping[str, Probe] | Probe | None = None,
) -> Iterator[Recording]:
    """Keep the states of every pass that is run inside the `with`.

    `model` is a Model, or a module, whose states are then found and proved first.
    Every layer and final are kept, or `sites`. `probes` score each token as it is
    computed, by what each reads at its own site; then only the states at `sites` are
    kept, and none without.

    >>> import torch
    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> module = tiny_model("llama")
    >>> with recording(module, "layer.1,final") as rec:
    ...     _ = module(torch.tensor([[5, 6, 7]]))
    >>> rec.states.values.shape
    torch.Size([2, 3, 64])
    >>> probe = hs.Probe(site="layer.1").fit(rec.states["layer.1"], ["a", "b", "b"])
    >>> with recording(module, probes={"b": probe}) as rec:
    ...     _ = module.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
    >>> rec.scores["b"].shape
    (6,)
    """
    anatomy, module, lock = user_module(model, "record")
    encoder = TextEncoder(None, None, 0)
    sources: dict[str | None, Source] = {}
    for name in {site.stack for site in anatomy.sites}:
        stack = anatomy.stack_named(name)
        sources[name] = Source(
            anatomy.name,
            dtype=str(stack.proof.dtype).removeprefix("torch."),
            depth=stack.depth,
            final=stack.proof.final is not None,
            reported=anatomy.reported_names(stack),
        )
    if not isinstance(model, nn.Module):
        encoder = model.text_encoder
        sources = {name: model.source(name) for name in sources}
    recorded = Recording(anatomy, encoder, sources)
    check_finite(module)
    if sites is None:
        sites = EVERYTHING if probes is None else ()
    scoring = {} if probes is None else _probes_by_site(probes, anatomy)
    for site in scoring:
        recorded.scored_stack = site.stack
    follower = _PassFollower(recorded, module, anatomy.select(sites), scoring)
    watches = follower.watches()
    checked = hooks.finite_attention(module)
    # Where a `torch.no_grad` of the user's ends, torch asks the check of attention
    # before it turns gradients on again. Ctrl-C at that moment would leave them off.
    unchanged = autograd.restored_after_error()
    with lock, unchanged, checked, hooks.watching(watches):
        yield recorded


def _probes_by_site(
    probes: Mapping[str, Probe] | Probe, anatomy: Anatomy
) -> dict[Site, dict[str, Probe]]:
    """Find the sites of probes in a model, and check that they fit.

    A single probe is named by its site.
    """
    if isinstance(probes, Probe):
        probes = {probes.site or "probe": probes}
    by_site: dict[Site, dict[str, Probe]] = {}
    by_name: Mapping[str, Any] = probes
    for name, probe in by_name.items():
        problem = f"Cannot use the probe {str(name)[:60]!r} in this recording"
        if not isinstance(probe, Probe):
            reason = f"it is a {type(probe).__name__}"
            raise StatesError(problem, reason, "Give hs.Probe.load(path).")
        if not hasattr(probe, "coef_"):
            raise StatesError(problem, "it is not fitted", "Fit it, or load one.")
        if not probe.site:
            remedy = "Set probe.site, such as 'layer.3'."
            raise SiteError(problem, "it does not say which site it reads", remedy)
        (site, *others) = anatomy.select(probe.site)
        if others:
            reason = f"{probe.site} names {1 + len(others)} sites"
            raise SiteError(problem, reason, "Name one, with its stack.")
        width = anatomy.width(site)
        if probe.n_features_in_ != width:
            raise StatesError(
                problem,
                f"it was fitted to width {probe.n_features_in_}, and {site} of"
                f" {anatomy.name} is {width} wide",
                "Give a probe of this model.",
            )
        by_site.setdefault(site, {})[name] = probe
    if len({site.stack for site in by_site}) != 1:
        raise StatesError(
            "Cannot use these probes in one recording",
            "there are none, or they read the encoder and the decoder",
            "Give probes of one stack.",
        )
    return by_site


def _joined(parts: Sequence[ProbeScores], continues: Sequence[bool]) -> ProbeScores:
    """Join the scores of passes: one that continues goes on with the same texts."""
    groups: list[list[ProbeScores]] = []
    for part, goes_on in zip(parts, continues, strict=True):
        if not goes_on or not groups:
            groups.append([part])
            continue
        if part.tokens.count != groups[-1][0].tokens.count:
            raise PassError(
                "Cannot join the scores of these passes",
                f"one goes on with {part.tokens.count} texts after a pass over"
                f" {groups[-1][0].tokens.count}",
                "Read `rec.scored`, the scores of each pass.",
            )
        groups[-1].append(part)
    if not groups:
        raise PassError(
            "No scores of probes",
            "no pass was run inside the `with`, or no probes were given",
            "Give probes=, and call the module there.",
        )
    ids: list[int] = []
    strings: list[str] = []
    lengths = []
    columns: dict[str, list[Floats]] = {}
    for group in groups:
        # The parts of each text stand together, one text after another.
        for text in range(group[0].tokens.count):
            parts = [part.of(text) for part in group]
            lengths.append(sum(len(part.tokens) for part in parts))
            for part in parts:
                ids += part.tokens.ids.tolist()
                strings += part.tokens.strings
                for name, values in part.scores.items():
                    columns.setdefault(name, []).append(values)
    tokens = Tokens(
        None,
        text=np.repeat(np.arange(len(lengths)), lengths),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        ids=np.array(ids, dtype=np.int64),
        strings=tuple(strings),
        count=len(lengths),
    )
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    return ProbeScores(tokens, joined)


@dataclass(frozen=True, eq=False)
class _CacheMark:
    """What a cache held at the end of a pass: how many tokens, and one tensor of it.

    The tensor has a row for each text. It is None if the cache shows none.
    """

    length: int
    rows: Tensor | None

    @classmethod
    def of(cls, cache: Any) -> _CacheMark:
        """Mark a cache as it is now."""
        return cls(_cached_tokens(cache), next(_tensors(cache), None))

    def is_left(self, cache: Any) -> bool:
        """Tell whether a cache still holds what it held, in the same rows."""
        now = _CacheMark.of(cache)
        if self.rows is None or now.rows is None or self.length != now.length:
            return False
        # Every change of the rows makes a new tensor.
        if self.rows is now.rows:
            return True
        return torch.equal(self.rows.cpu(), now.rows.cpu())


def _cached_tokens(cache: Any) -> int:
    """Return how many tokens a cache holds; None stands for an empty cache."""
    if cache is None:
        return 0
    get_length: Any = getattr(cache, "get_seq_length", None)
    if get_length is not None:
        return int(get_length())
    # The tuples of older versions hold keys [text, head, token, width].
    keys = next(_tensors(cache), None)
    return 0 if keys is None else keys.shape[-2]


def _tensors(cache: Any) -> Iterator[Tensor]:
    """Yield the tensors of a cache that have a row for each text, layer by layer."""
    # An encoder-decoder has another cache for the encoder's states.
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", cache)
    if not isinstance(layers, list | tuple):
        return
    for layer in layers:
        held = layer
        if not isinstance(layer, list | tuple):
            held = getattr(layer, "__dict__", {}).values()
        for value in held:
            if isinstance(value, Tensor) and value.ndim > 1:
                yield value


class _PassFollower:
    """Tells the user's passes apart.

    Each is a call of the whole module, or of its encoder alone, as `generate` makes it.
    """

    def __init__(
        self,
        recording: Recording,
        module: nn.Module,
        sites: Sequence[Site],
        probes: Mapping[Site, Mapping[str, Probe]],
    ) -> None:
        self.recording = recording
        self.module = module
        self.sites = set(sites)
        self.probes = probes
        watched = sorted({*sites, *probes})
        self.watcher = Watcher(recording.anatomy, watched, self._keep)
        self.current: RecordedPass | None = None
        self.cache_mark: _CacheMark | None = None

    def watches(self) -> list[hooks.Watch]:
        """Return the hooks; a pass that ends in an error is not recorded."""
        begin = []
        end = []
        for root in pass_roots(self.module, self.recording.anatomy):
            begin.append(hooks.Watch(root, "input", partial(self._begin, root)))
            end.append(hooks.Watch(root, "output", partial(self._end, root)))
        return [*begin, *self.watcher.watches(self.module), *end]

    def _begin(self, root: nn.Module, args: hooks.Args, kwargs: hooks.Kwargs) -> None:
        # The encoder is called as a part of the whole module.
        if (
            root is not self.module
            and self.current is not None
            and not self.current.states
            and not self.current.scores
        ):
            return
        arguments = named_arguments(root, args, kwargs)
        cache = arguments.get("past_key_values")
        mark, self.cache_mark = self.cache_mark, None
        self.current = RecordedPass(
            root,
            arguments,
            continues=_cached_tokens(cache) > 0,
            follows=mark is not None and mark.is_left(cache),
        )
        self.watcher.begin()

    def _keep(self, site: Site, tap: Tap | OperationTap, tensor: Tensor) -> None:
        if self.current is None:
            raise PassError(
                f"Cannot place the state at {site}",
                f"the {tap} was reached, and {type(self.module).__name__} itself was"
                " not called",
                "Call the whole module, or record the part.",
            )
        length = self.current.length(site.stack) or tap.layout.length(tensor)
        states = tap.layout.states(tensor.detach(), length)
        probes = self.probes.get(site, {})
        if probes and self.current.scored is None:
            self.current.scored = self.current.real(site.stack, states.shape[:2])
        for name, probe in probes.items():
            assert self.current.scored is not None
            rows = states[self.current.scored.to(states.device)]
            self.current.scores[name] = probe.decision_function(rows)
        if site in self.sites:
            self.current.states[site] = states.to("cpu", copy=True)

    def _end(self, root: nn.Module, output: Any) -> None:
        current = self.current
        if current is not None and current.root is root:
            self.recording.recorded.append(current)
            self.current = None
            if self.probes:
                cache = current.arguments.get("past_key_values")
                returned = getattr(output, "past_key_values", cache)
                self.cache_mark = _CacheMark.of(returned)

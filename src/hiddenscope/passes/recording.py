"""Recording: keep the states of passes that the user runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.arguments import checked, require
from hiddenscope.discovery import EVERYTHING, Anatomy, OperationTap, Tap, find
from hiddenscope.errors import ModuleError, PassError
from hiddenscope.linear.probe import Probe
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.weights import check_finite
from hiddenscope.passes.buffers import one_or_pair, stacks_in
from hiddenscope.passes.cache_mark import CacheMark, cached_tokens
from hiddenscope.passes.inputs import Inputs
from hiddenscope.passes.probe_scores import (
    ProbeScores,
    SiteProbes,
    join_scores,
    probes_of,
)
from hiddenscope.passes.protocol import PassModel, named_arguments
from hiddenscope.passes.record import Watcher
from hiddenscope.passes.text_encoder import TextEncoder
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Pair, Source, States, Tokens, join
from hiddenscope.states.arrays import Floats
from hiddenscope.states.mixed import stack_sites


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

    def length(self, stack: str | None) -> int | None:
        """Return how many tokens a stack worked on; None where it does not show."""
        for name in ("input_ids", "inputs_embeds"):
            tensor = self._argument(stack, name)
            if isinstance(tensor, Tensor):
                return tensor.shape[1]
        return None

    def ids(self, stack: str | None) -> Tensor | None:
        """Return the ids that a stack worked on; None where the pass has none."""
        ids: Tensor | None = self._argument(stack, "input_ids")
        return ids

    def mask(self, stack: str | None) -> Tensor | None:
        """Return the mask of the texts that a stack worked on; None without one."""
        mask = self._argument(stack, "attention_mask")
        length = self.length(stack)
        if length is None or not isinstance(mask, Tensor) or mask.ndim != 2:
            return None
        # With a cache the mask covers the tokens of earlier passes too.
        return mask[:, -length:]

    def real(self, stack: str | None, shape: Sequence[int]) -> Tensor:
        """Return which tokens [text, token] are no padding."""
        mask = self.mask(stack)
        if mask is None:
            return torch.ones(tuple(shape), dtype=torch.bool)
        return mask.bool().cpu()

    def tokens(self, encoder: TextEncoder, stack: str | None, real: Tensor) -> Tokens:
        """Return the tokens that are no padding."""
        ids = self.ids(stack)
        # A pass over embeddings has no ids.
        known = torch.full(real.shape, -1) if ids is None else ids.cpu()
        texts = []
        for row, is_real in zip(known, real, strict=True):
            texts.append(tuple(row[is_real].tolist()))
        return encoder.tokens(Inputs(tuple(texts)))

    def _argument(self, stack: str | None, name: str) -> Any:
        prefix = "decoder_" if stack == "decoder" else ""
        return self.arguments.get(f"{prefix}{name}")


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
            reason, remedy = (
                "no pass was run inside the `with`",
                "Call the module there.",
            )
            if self.recorded:
                reason, remedy = "probes alone were asked for", "Name sites to keep."
            raise PassError("No recorded states", reason, remedy)
        return one_or_pair([join(parts) for parts in by_stack.values()])

    @property
    def scored(self) -> list[ProbeScores]:
        """Return the scores of the probes in each pass, of real tokens only."""
        scored = []
        for recorded in self._with_scores():
            assert recorded.scored is not None
            scored.append(
                ProbeScores(
                    recorded.tokens(
                        self.text_encoder, self.scored_stack, recorded.scored
                    ),
                    recorded.scores,
                )
            )
        return scored

    @property
    def scores(self) -> ProbeScores:
        """Return the scores of the probes, of each text from its first token on.

        A pass with a cache goes on with the texts of the pass before it, as `generate`
        makes them; any other begins new texts. The last token that was generated has
        no score: nothing was computed from it. If the cache was changed between two
        passes, as by beam search, no row need be one text, which is an error.
        """
        recorded = self._with_scores()
        for later in recorded[1:]:
            if later.continues and not later.follows:
                raise PassError(
                    "Cannot join the scores of these passes",
                    "the cache was changed between two of them, or does not show its"
                    " rows, so that a row need not go on with its text (beam search"
                    " reorders rows, and assisted generation rejects tokens)",
                    "Read `rec.scored`, the scores of each pass.",
                )
        continues = [one_pass.continues for one_pass in recorded]
        return join_scores(self.scored, continues)

    def _with_scores(self) -> list[RecordedPass]:
        return [recorded for recorded in self.recorded if recorded.scores]

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
    lock: AbstractContextManager[Any] = nullcontext()
    if isinstance(model, nn.Module):
        if hasattr(model, "_orig_mod"):
            raise ModuleError(
                "Cannot record the passes of this module",
                "it is compiled, and compiled code calls no hooks",
                "Give and call the module inside it.",
            )
        anatomy, module = find(model), model
        encoder = TextEncoder(None, None, 0)
        sources = _sources_of_module(anatomy)
    else:
        require(model, PassModel | nn.Module, "model", "recording")
        anatomy, module, lock = model.anatomy, model.module, model.lock
        encoder = model.text_encoder
        stacks = {site.stack for site in anatomy.sites}
        sources = {stack: model.source(stack) for stack in stacks}
    recorded = Recording(anatomy, encoder, sources)
    check_finite(module)
    if sites is None:
        sites = EVERYTHING if probes is None else ()
    scoring = None if probes is None else probes_of(probes, anatomy)
    if scoring is not None:
        recorded.scored_stack = scoring.stack
    follower = _PassFollower(recorded, module, anatomy.select(sites), scoring)
    watches = follower.watches()
    checked = hooks.finite_attention(module)
    # Where a `torch.no_grad` of the user's ends, torch asks the check of attention
    # before it turns gradients on again. Ctrl-C at that moment would leave them off.
    unchanged = autograd.restored_after_error()
    with lock, unchanged, checked, hooks.watching(watches):
        yield recorded


def _sources_of_module(anatomy: Anatomy) -> dict[str | None, Source]:
    """Describe where the states of a bare module come from, for each stack."""
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
    return sources


class _PassFollower:
    """Tells the user's passes apart.

    Each is a call of the whole module, or of its encoder alone, as `generate` makes it.
    """

    def __init__(
        self,
        recording: Recording,
        module: nn.Module,
        sites: Sequence[Site],
        probes: SiteProbes | None,
    ) -> None:
        self.recording = recording
        self.module = module
        self.sites = set(sites)
        self.probes = probes
        watched = set(sites)
        if probes is not None:
            watched.update(probes.sites.values())
        self.watcher = Watcher(recording.anatomy, sorted(watched), self._keep)
        self.current: RecordedPass | None = None
        self.cache_mark: CacheMark | None = None

    def watches(self) -> list[hooks.Watch]:
        """Return the hooks; a pass that ends in an error is not recorded."""
        roots = [self.module]
        get_encoder: Any = getattr(self.module, "get_encoder", None)
        if get_encoder is not None and len(self.recording.anatomy.stacks) > 1:
            roots.append(get_encoder())
        begin = []
        end = []
        for root in roots:
            begin.append(hooks.Watch(root, "input", partial(self._begin, root)))
            end.append(hooks.Watch(root, "output", partial(self._end, root)))
        return [*begin, *self.watcher.watches(self.module), *end]

    def _begin(self, root: nn.Module, args: hooks.Args, kwargs: hooks.Kwargs) -> None:
        if not self.watcher.here:
            return
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
            continues=cached_tokens(cache) > 0,
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
        if self.probes is not None:
            self._score(site, states, self.probes.at(site))
        if site in self.sites:
            self.current.states[site] = states.to("cpu", copy=True)

    def _score(self, site: Site, states: Tensor, probes: Mapping[str, Probe]) -> None:
        """Score the real tokens of a pass, and let its states go."""
        current = self.current
        if not probes or current is None:
            return
        if current.scored is None:
            current.scored = current.real(site.stack, states.shape[:2])
        rows = states[current.scored.to(states.device)]
        for name, probe in probes.items():
            current.scores[name] = probe.decision_function(rows)

    def _end(self, root: nn.Module, output: Any) -> None:
        current = self.current
        if self.watcher.here and current is not None and current.root is root:
            self.recording.recorded.append(current)
            self.current = None
            if self.probes is not None:
                cache = current.arguments.get("past_key_values")
                returned = getattr(output, "past_key_values", cache)
                self.cache_mark = CacheMark.of(returned)

"""Recording: keep the states of passes that the user runs, and what probes say of them.

A pass with a cache may go on with the texts of the pass before it. Between the two,
beam search puts its rows into another order, and assisted generation cuts off tokens
that it rejected: the cache shows whether it was left alone.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.arguments import checked, require
from hiddenscope.discovery import EVERYTHING, Anatomy, OperationTap, Tap, find
from hiddenscope.errors import ModuleError, PassError, SiteError, StatesError
from hiddenscope.linear.probe import Probe
from hiddenscope.modules import autograd, calls, hooks
from hiddenscope.modules.weights import check_finite
from hiddenscope.passes.buffers import one_or_pair, stacks_in
from hiddenscope.passes.inputs import Inputs, PassModel
from hiddenscope.passes.record import Watcher, record, shown_blocks
from hiddenscope.passes.text_encoder import TextEncoder
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Pair, Source, States, Tokens, join
from hiddenscope.states.arrays import Bools, Floats, Ints
from hiddenscope.states.mixed import stack_sites
from hiddenscope.states.pooling import SINKLESS


@dataclass(frozen=True, eq=False)
class ProbeScores:
    """The scores of probes by name, one row for each token, in float64.

    A score is what `decision_function` of the probe returns: a number, or one for each
    of three or more classes; `readings` have the input of attention too. In a pass
    that `continues` another, the first token is none of a text.
    """

    tokens: Tokens
    readings: Mapping[str, Floats]
    probes: Mapping[str, Probe]
    continues: bool = False

    def __getitem__(self, name: str) -> Floats:
        return self._probe(name).scores(self.readings[name])

    def _probe(self, name: str) -> Probe:
        if name not in self.probes:
            reason = f"there are {', '.join(self.probes)}"
            raise StatesError(f"No probe {str(name)[:40]!r}", reason, "Name one.")
        return self.probes[name]

    def of(self, text: int) -> ProbeScores:
        """Return the scores of one text; -1 is the last."""
        rows = self.tokens.rows(text)
        readings = {name: values[rows] for name, values in self.readings.items()}
        return replace(self, tokens=self.tokens.of(text), readings=readings)

    def so_far(self, name: str) -> Floats:
        """Return the score of each text up to each token, as the probe pools them."""
        probe = self._probe(name)
        starts = self.tokens.lengths.cumsum()[:-1]
        texts = np.split(self.readings[name], starts)
        return np.concatenate([probe.so_far(text) for text in texts])

    def alarms(self, name: str) -> Bools:
        """Return at which tokens a probe rings.

        It does where the score of the text up to there is above its threshold, but not
        at the first token of a text (see `Probe.threshold`).
        """
        threshold = self._probe(name).threshold_
        if threshold is None:
            raise StatesError(
                f"No alarms of the probe {name[:40]!r}",
                "it has no threshold",
                "Call probe.threshold(negatives, false_positives=0.01) first.",
            )
        rings: Bools = self.so_far(name) > threshold.value
        return rings & (self.continues | (self.tokens.positions > 0))


def named_arguments(
    module: nn.Module, args: hooks.Args, kwargs: hooks.Kwargs
) -> dict[str, Any]:
    """Return the arguments of a call of a module by their names.

    Ids are called `input_ids`, whatever a module in plain PyTorch calls them.

    >>> named_arguments(nn.Linear(2, 2), (1,), {})
    {'input_ids': 1}
    """
    names = inspect.signature(module.forward).parameters
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    for name in calls.plain_parameters(module) or ():
        if name in arguments:
            arguments["input_ids"] = arguments.pop(name)
        break
    return arguments


def user_module(
    model: PassModel | nn.Module, verb: str
) -> tuple[Anatomy, nn.Module, AbstractContextManager[Any]]:
    """Return the module whose passes a user runs, with its anatomy and its lock.

    A bare module has no lock, and its states are found and proved first.
    """
    if not isinstance(model, nn.Module):
        require(model, PassModel | nn.Module, "model", f"{verb}ing")
        return model.anatomy, model.module, model.lock
    if hasattr(model, "_orig_mod"):
        raise ModuleError(
            f"Cannot {verb} the passes of this module",
            "it is compiled, and compiled code calls no hooks",
            "Give and call the module inside it.",
        )
    return find(model), model, nullcontext()


def take_over(lock: Any) -> None:
    """Let this thread release a model's lock, where another one took it.

    A generator that holds `hs.editing` may be closed by another thread than the one
    that started it.
    """
    if isinstance(lock, nullcontext) or lock._is_owned():
        return
    depth, _ = lock._release_save()
    lock._acquire_restore((depth, threading.get_ident()))


def pass_roots(module: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """Return what a pass is a call of: the module, or what `generate` calls, which is
    the model inside a wrapper, or an encoder.
    """
    roots = dict.fromkeys([module, handed_on(module)])
    get_encoder: Any = getattr(module, "get_encoder", None)
    if get_encoder is not None and len(anatomy.stacks) > 1:
        roots[get_encoder()] = None
    return list(roots)


def handed_on(module: nn.Module) -> nn.Module:
    """Return the model that a wrapper hands a pass on to as it is; else the module."""
    base = calls.below_wrapper(module)
    # PEFT names another one where it learns a prompt, which it puts before every text.
    return module if base is getattr(module, "base_model", None) else base


def cached_tokens(cache: Any) -> int | None:
    """Return how many tokens a cache holds; None if it does not say.

    No cache is an empty one.
    """
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):
        # A recurrent state has no length.
        return None


# How many tokens a cache holds, and one tensor of it with a row for each text; None if
# it does not show these.
_CacheMark: TypeAlias = tuple[int | None, Tensor | None]


@dataclass
class UserPass:
    """A call of a module by the user, with its arguments by name."""

    root: nn.Module
    arguments: Mapping[str, Any]

    def argument(self, stack: str | None, name: str) -> Tensor | None:
        """Return a tensor that a stack was called with; None without it."""
        prefix = "decoder_" if stack == "decoder" else ""
        value = self.arguments.get(f"{prefix}{name}")
        return value if isinstance(value, Tensor) else None

    def shape(self, stack: str | None) -> torch.Size | None:
        """Return how many texts and tokens a stack worked on; None if unknown."""
        for name in ("input_ids", "inputs_embeds"):
            tensor = self.argument(stack, name)
            if tensor is not None:
                return tensor.shape[:2]
        return None


@dataclass
class RecordedPass(UserPass):
    """One pass of the user's, with its states [text, token, width].

    `readings` [text, token, output] of probes stay on the device until they are read,
    so that no pass waits for them. A pass that `continues` another began with tokens in
    its cache; `follows` says that the cache was as the pass before had left it.
    """

    states: dict[Site, Tensor] = field(default_factory=dict)
    readings: dict[str, Tensor] = field(default_factory=dict)
    continues: bool = False
    follows: bool = False

    def real(self, stack: str | None, shape: Sequence[int]) -> Tensor:
        """Return which tokens [text, token] are no padding."""
        mask, called = self.argument(stack, "attention_mask"), self.shape(stack)
        if called is None or mask is None or mask.ndim != 2:
            return torch.ones(tuple(shape), dtype=torch.bool)
        # With a cache the mask covers the tokens of earlier passes too.
        return mask[:, -called[1] :].bool().cpu()

    def next_ids(self, stack: str | None) -> Tensor | None:
        """Return the ids [text, 1] if it goes on with a token each, as `generate`."""
        ids = self.argument(stack, "input_ids")
        return ids if self.follows and ids is not None and ids.shape[1] == 1 else None

    def tokens(self, encoder: TextEncoder, stack: str | None, real: Tensor) -> Tokens:
        """Return the tokens that are no padding."""
        ids = self.argument(stack, "input_ids")
        # A pass over embeddings has no ids.
        known = torch.full(real.shape, -1) if ids is None else ids.cpu()
        rows = zip(known, real, strict=True)
        texts = tuple(tuple(row[is_real].tolist()) for row, is_real in rows)
        return encoder.tokens(Inputs(texts))


@dataclass(eq=False, repr=False)
class Recording:
    """The recorded states: `passes` has those of each pass, `states` all of them.

    `scored` has the scores of probes for each pass, `scores` those of all. `ends` are
    the tokens at which `generate` ends a text.
    """

    anatomy: Anatomy
    text_encoder: TextEncoder
    sources: Mapping[str | None, Source]
    probes: dict[str, Probe] = field(default_factory=dict)
    scored_stack: str | None = None
    ends: Sequence[int] = ()
    recorded: list[RecordedPass] = field(default_factory=list)

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

    def by_stack(self) -> dict[str | None, list[States]]:
        """Return the states of each stack, pass after pass."""
        by_stack: dict[str | None, list[States]] = {}
        for states in self.passes:
            for part in stacks_in(states):
                by_stack.setdefault(part.sites[0].stack, []).append(part)
        return by_stack

    @property
    def states(self) -> States | Pair:
        """Return the states of every pass, text after text."""
        by_stack = self.by_stack()
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
        passes = [part for part in self.recorded if part.readings]
        return list(map(self._scores_of, passes, self._unfinished(passes)))

    def _unfinished(self, passes: Sequence[RecordedPass]) -> list[Tensor]:
        """Return which texts [text, 1] have not ended in each pass.

        `generate` pads a text that ended, and its mask does not say so. A text ended at
        a generated end after which one and the same token is repeated.
        """
        unfinished = [torch.ones(1, 1, dtype=torch.bool)] * len(passes)
        steps = [part.next_ids(self.scored_stack) for part in passes]
        numbered = enumerate(steps)
        for is_step, run in groupby(numbered, lambda item: item[1] is not None):
            if is_step:
                places, ids = zip(*run, strict=True)
                text = torch.cat(ids, 1).cpu()
                ended = torch.isin(text, torch.tensor(self.ends, dtype=text.dtype))
                # How often the tokens after each change.
                changes = (text[:, 1:-1] != text[:, 2:]).flip(1).cumsum(1).flip(1)
                ended[:, :-2] &= changes == 0
                goes_on = ended.cumsum(1) == 0
                unfinished[places[0] : places[-1] + 1] = torch.split(goes_on, 1, 1)
        return unfinished

    def _scores_of(self, recorded: RecordedPass, unfinished: Tensor) -> ProbeScores:
        """Return the scores of one pass, once they are known to be finite."""
        readings = {}
        shape = next(iter(recorded.readings.values())).shape[:2]
        real = recorded.real(self.scored_stack, shape) & unfinished
        for name, values in recorded.readings.items():
            readings[name] = values.cpu()[real].double().numpy()
            if not np.isfinite(readings[name]).all():
                raise StatesError(
                    f"Cannot score tokens by the probe {name[:40]!r}",
                    "a state that it reads has a NaN or an infinity",
                    "Load the model in a wider dtype.",
                )
        tokens = recorded.tokens(self.text_encoder, self.scored_stack, real)
        return ProbeScores(tokens, readings, self.probes, recorded.continues)

    @property
    def scores(self) -> ProbeScores:
        """Return the scores of the probes, of each text from its first token on.

        A pass with a cache goes on with the texts of the pass before it, as `generate`
        makes them; any other begins new texts. The last token that was generated has
        no score: nothing was computed from it; nor have pads after a text that ended
        while others of its batch went on. If the cache was changed between two
        passes, as by beam search, no row need be one text, which is an error.
        """
        for later in [part for part in self.recorded if part.readings][1:]:
            if later.continues and not later.follows:
                raise PassError(
                    "Cannot join the scores of these passes",
                    "the cache was changed between two of them, or does not show its"
                    " rows, so that a row need not go on with its text (beam search"
                    " reorders rows, and assisted generation rejects tokens)",
                    "Read `rec.scored`, the scores of each pass.",
                )
        parts = self.scored
        # The number of the first text of a pass, and of its texts.
        first = count = 0
        texts: list[Ints] = []
        for part in parts:
            if not part.continues or not texts:
                first += count
                count = part.tokens.count
            texts.append(first + part.tokens.text)
        if not texts:
            raise PassError(
                "No scores of probes",
                "no pass was run inside the `with`, or no probes were given",
                "Give probes=, and call the module there.",
            )
        text = np.concatenate(texts)
        # The parts of each text stand together, one text after another.
        order = np.argsort(text, kind="stable")
        ids = np.concatenate([part.tokens.ids for part in parts])[order]
        ends = np.bincount(text, minlength=first + count).cumsum()[:-1]
        rows = tuple(tuple(row.tolist()) for row in np.split(ids, ends))
        joined = {}
        for name in self.probes:
            readings = [part.readings[name] for part in parts]
            joined[name] = np.concatenate(readings)[order]
        tokens = self.text_encoder.tokens(Inputs(rows))
        return ProbeScores(tokens, joined, self.probes)

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
    probes: Mapping[str, Probe] | Sequence[Probe] | Probe | None = None,
) -> Iterator[Recording]:
    """Keep the states of every pass that is run inside the `with`.

    `model` is a Model, or a module, whose states are then found and proved first.
    Every layer and final are kept, or `sites`. `probes` score each token as it is
    computed, by what each reads at its own site, by which those of a list are named;
    then only the states at `sites` are kept, and none without. A text of a batch is
    scored until it ends, if the generation config of the module says by what token.

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
    generation: Any = getattr(module, "generation_config", None)
    end = getattr(generation, "eos_token_id", None)
    ends = [] if end is None else np.ravel(end).tolist()
    recorded = Recording(anatomy, encoder, sources, ends=ends)
    check_finite(module)
    if sites is None:
        sites = EVERYTHING if probes is None else ()
    scoring = {} if probes is None else _probes_by_site(probes, anatomy)
    for site, by_name in scoring.items():
        recorded.scored_stack = site.stack
        recorded.probes |= by_name
    follower = _PassFollower(recorded, module, anatomy.select(sites), scoring)
    watches = follower.watches()
    shown = None
    if scoring and not follower.sites:
        # Scores of states that are not finite are refused, so that none goes unseen.
        shown = shown_blocks(anatomy, tuple(scoring), logits=False)
    if shown is not None and not isinstance(model, nn.Module):
        # A pass shows that attention has room, so that no later one need be checked.
        trial = partial(record, model, [[0, 1, 2]], tuple(scoring), keep="device")
        model.trials.once("attention has room", trial, key=shown)
    checked = hooks.finite_attention(module, shown=shown)
    # Where a `torch.no_grad` of the user's ends, torch asks the check of attention
    # before it turns gradients on again. Ctrl-C at that moment would leave them off.
    unchanged = autograd.restored_after_error()
    with lock, unchanged, checked, hooks.watching(watches):
        try:
            yield recorded
        finally:
            take_over(lock)


def _probes_by_site(
    probes: Mapping[str, Probe] | Sequence[Probe] | Probe, anatomy: Anatomy
) -> dict[Site, dict[str, Probe]]:
    """Find the sites of probes in a model, and check that they fit.

    Those without names are named by their sites; if the third repeats one, it is
    "layer.1 (3)".
    """
    by_site: dict[Site, dict[str, Probe]] = {}
    by_name: dict[str, Any] = {}
    if isinstance(probes, Mapping):
        by_name |= probes
    else:
        for probe in [probes] if isinstance(probes, Probe) else probes:
            name = site_name = getattr(probe, "site", "") or "probe"
            while name in by_name:
                name = f"{site_name} ({len(by_name) + 1})"
            by_name[name] = probe
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


def _is_left(mark: _CacheMark, now: _CacheMark) -> bool:
    """Tell whether a cache still holds what it held, in the same rows."""
    (length, rows), (length_now, rows_now) = mark, now
    if rows is None or rows_now is None or length != length_now:
        return False
    # Every change of the rows makes a new tensor.
    return rows is rows_now or torch.equal(rows.cpu(), rows_now.cpu())


def _mark(cache: Any) -> _CacheMark:
    return cached_tokens(cache), next(_tensors(cache), None)


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


@dataclass(eq=False)
class _PassFollower:
    """Tells the user's passes apart.

    Each is a call of the whole module, or of its encoder alone, as `generate` makes it.
    """

    recording: Recording
    module: nn.Module
    sites: Sequence[Site]
    probes: Mapping[Site, Mapping[str, Probe]]
    current: RecordedPass | None = None
    cache_mark: _CacheMark = (None, None)
    on_device: dict[Any, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        watched = sorted({*self.sites, *self.probes})
        self.watcher = Watcher(self.recording.anatomy, watched, self._keep)

    def watches(self) -> list[hooks.Watch]:
        """Return the hooks; a pass that ends in an error is not recorded."""
        begin = []
        end = []
        for root in pass_roots(self.module, self.recording.anatomy):
            begin.append(hooks.Watch(root, "input", partial(self._begin, root)))
            end.append(hooks.Watch(root, "output", partial(self._end, root)))
        return [*begin, *self.watcher.watches(self.module), *end]

    def _begin(self, root: nn.Module, args: hooks.Args, kwargs: hooks.Kwargs) -> None:
        # It is called as a part of the whole module.
        if (
            root is not self.module
            and self.current is not None
            and not self.current.states
            and not self.current.readings
        ):
            return
        arguments = named_arguments(root, args, kwargs)
        cache = arguments.get("past_key_values")
        mark, self.cache_mark = self.cache_mark, (None, None)
        self.current = RecordedPass(
            root,
            arguments,
            continues=cached_tokens(cache) != 0,
            follows=_is_left(mark, _mark(cache)),
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
        called = self.current.shape(site.stack)
        length = tap.layout.length(tensor) if called is None else called[1]
        states = tap.layout.states(tensor.detach(), length)
        for name, probe in self.probes.get(site, {}).items():
            self.current.readings[name] = self._read(probe, states)
        if site in self.sites:
            self.current.states[site] = states.to("cpu", copy=True)

    def _read(self, probe: Probe, states: Tensor) -> Tensor:
        """Return the readings of a probe, on the device of the states.

        On a CPU they are those of `decision_function`, bit for bit.
        """
        if states.device.type == "cpu":
            rows = states.flatten(0, 1).double().numpy()
            coef, intercept = probe.outputs
            products = np.vecdot(rows[:, None], coef[None]) + intercept
            readings = torch.from_numpy(products).view(*states.shape[:2], -1)
        else:
            key = id(probe), states.device
            if key not in self.on_device:
                parts = [torch.from_numpy(part).float() for part in probe.outputs]
                self.on_device[key] = [part.to(states.device) for part in parts]
            readings = nn.functional.linear(states.float(), *self.on_device[key])
        if probe.pool == SINKLESS:
            lengths = states.to(readings).norm(dim=-1, keepdim=True)
            readings = torch.cat([readings, lengths], -1)
        return readings

    def _end(self, root: nn.Module, output: Any) -> None:
        current = self.current
        if current is not None and current.root is root:
            self.recording.recorded.append(current)
            self.current = None
            if self.probes:
                cache = current.arguments.get("past_key_values")
                returned = getattr(output, "past_key_values", cache)
                self.cache_mark = _mark(returned)

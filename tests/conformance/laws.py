"""What each analysis must tell of a model, by plain passes of it.

Every law returns what is wrong, or an empty string. A pass is a call of the module, or
one with a single state replaced (`hs.edit`) or looked at (`hs.record`), which the
oracle of the anatomy has checked against plain hooks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import Any

import inside
import numpy as np
import oracle
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.discovery import arguments
from hiddenscope.testing import Subject

TEXT, OTHER, SHORT, TARGET = (
    [5, 6, 7, 8, 9, 10],
    [5, 6, 11, 8, 9, 10],
    [12, 13, 14, 18],
    [15, 16, 17],
)
ANSWER, RIVAL = 20, 21
# Of a difference of logits that is about 1; wrong states are off by as much as the
# states.
TOLERANCE = 2e-3
# In float64. Norms round to float32 even there, so that a step is no smaller than this
# for finite differences of fourth order.
EXACTLY, STEP = 1e-5, 0.05
OPERANDS = ("q", "k", "v")

Edges = Collection[tuple[str, str]]


class NothingToCompare(Exception):
    """A model of which no other way to the same numbers is known."""


@dataclass(eq=False)
class Trial:
    """A subject under trial, and what a plain pass of it gives."""

    subject: Subject
    touching: Edges = ()

    @property
    def module(self) -> nn.Module:
        """Its module."""
        return self.subject.module

    @property
    def model(self) -> hs.Model:
        """Its model."""
        return self.subject.model

    @property
    def two(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return self.model.encoder_decoder

    @cached_property
    def exactly(self) -> "Trial":
        """The same subject in float64, or as it is where its code has no float64."""
        exactly = Trial(self.subject.in_float64)
        try:
            assert exactly.model
        except hs.errors.AnatomyError:
            return self
        return exactly

    @property
    def rounding(self) -> float:
        """What a logit may be off by."""
        return EXACTLY if self.subject.dtype == torch.float64 else TOLERANCE

    @property
    def text(self) -> list[int]:
        """The first text; the token that is predicted last is masked where the model
        fills in tokens.
        """
        return self.masked(TEXT)

    def masked(self, ids: list[int]) -> list[int]:
        """Return a text as a prompt: with one mask token in its fifth place where the
        model fills in tokens.
        """
        if not self.subject.fills_in:
            return ids
        return [*ids[:4], self.model.tokenizer.mask_token_id, *ids[5:]]

    @property
    def read_at(self) -> int:
        """Where the answer to a prompt is read."""
        if self.subject.fills_in:
            return 4
        return len(TARGET if self.two else TEXT) - 1

    @property
    def contrast(self) -> hs.Contrast:
        """Two prompts that differ in their third token."""
        targets = TARGET if self.two else None
        clean, corrupt = self.text, self.masked(OTHER)
        return hs.Contrast(clean, corrupt, ANSWER, RIVAL, targets=targets)

    def inputs(self, *texts: list[int]) -> hs.Inputs:
        """Return texts as the model takes them; an encoder-decoder is given the same
        targets for each.
        """
        targets = [TARGET] * len(texts) if self.two else None
        return self.model.encode(list(texts), targets=targets)

    def logits(self, ids: list[int]) -> Tensor:
        """Return the logits [token, word] of a plain pass."""
        targets = torch.tensor([TARGET]) if self.two else None
        with torch.no_grad():
            given = arguments(self.module, torch.tensor([ids]), targets=targets)
            logits: Tensor = self.module(**given, return_dict=True).logits[0]
        return logits.double()

    def seen(
        self, ids: list[int], sites: Sequence[str], changes: Mapping[str, Any] = {}
    ) -> Any:
        """Return states of a pass, with some of them replaced."""
        if not changes:
            return hs.record(self.model, self.inputs(ids), list(sites)).states
        made = {site: _change(change) for site, change in changes.items()}
        return hs.edit(self.model, self.inputs(ids), made, list(sites)).states

    def edited(self, ids: list[int], changes: Mapping[str, Any]) -> Tensor:
        """Return the logits at the answer's place while states are changed, by one
        whole pass.
        """
        made: Any = {site: _change(change) for site, change in changes.items()}
        logits = hs.edit(self.model, self.inputs(ids), made, (), logits=True).logits
        assert logits is not None
        return logits[self.read_at].double()


def _change(change: Any) -> Any:
    return hs.Replace(change) if isinstance(change, Tensor) else change


def _difference(logits: Tensor) -> float:
    return float(logits[ANSWER] - logits[RIVAL])


def anatomy(trial: Trial) -> str:
    """The oracle confirms every claim of the anatomy."""
    return "; ".join(oracle.wrongs(trial.module, trial.model.anatomy))


def lens(trial: Trial) -> str:
    """At the last layer the lens gives the logits of the model."""
    targets = [TARGET] if trial.two else None
    result = hs.lens(trial.model, [trial.text], k=1, targets=targets)
    last, logits = result.data.isel(site=-1, rank=0), trial.logits(trial.text)
    likeliest, best = logits.softmax(-1).max(-1)
    if not np.allclose(last["probability"].values, likeliest.numpy(), rtol=TOLERANCE):
        return (
            f"the likeliest words have {last['probability'].values}, and those of the"
            f" model {likeliest.numpy()}"
        )
    close = logits.topk(2, dim=-1).values.diff(dim=-1).abs()[:, 0] < TOLERANCE
    differ = (torch.from_numpy(last["word_id"].values) != best) & ~close
    if differ.any():
        return f"words at the last layer are others at {differ.sum()} tokens"
    return ""


def visibility(trial: Trial) -> str:
    """Every number is finite, states see themselves, and a causal model sees nothing
    that comes later.
    """
    result = hs.visibility(trial.model, trial.inputs(trial.text))
    stack = trial.model.anatomy.stacks[-1]
    tokens = slice(len(TEXT), None) if trial.two else slice(None)
    name = trial.subject.prefix
    sites = {
        "site": f"{name}layer.{stack.depth}",
        "source_site": f"{name}layer.{stack.depth - 1}",
    }
    seen = result.data["l1"].sel(sites).values[tokens, tokens]
    if not np.isfinite(seen).all():
        return "some numbers are not finite"
    if stack.causal and np.triu(seen, 1).any():
        return "a causal model sees later tokens"
    return "" if np.diagonal(seen).all() else "a state does not see the one below it"


def patch(trial: Trial) -> str:
    """A cell is what a whole edited pass gives, and tokens whose states are equal in
    both runs change nothing.
    """
    clean, corrupt = trial.text, trial.masked(OTHER)
    result = hs.patch(trial.model, trial.contrast, layers=0)
    place, name = trial.read_at, "encoder." if trial.two else ""
    whole, broken = (_difference(trial.logits(ids)[place]) for ids in (clean, corrupt))
    if abs(whole - broken) < 1e-3:
        return ""  # the prompts hardly differ there, and shares of nothing say nothing
    # Some layers are seen in passing, and cannot be changed.
    changed = set(result.data["site"].values)
    for site in changed & {f"{name}layer.0", f"{name}layer.1"}:
        states = trial.seen(clean, [site])
        change = hs.Replace(states[site][2], tokens=2)
        after = _difference(trial.edited(corrupt, {site: change}))
        expected = (after - broken) / (whole - broken)
        found = float(result.data["effect"].sel(site=site).values[2])
        if not abs(found - expected) <= TOLERANCE * max(1.0, 1 / abs(whole - broken)):
            return (
                f"token 2 at {site} restores {found:.4f}, and an edited pass"
                f" {expected:.4f}"
            )
    return ""


def contributions(trial: Trial) -> str:
    """The parts of the answer's logit sum to that of a plain pass."""
    targets = [TARGET] if trial.two else None
    result = hs.contributions(trial.model, [TEXT], ANSWER, targets=targets)
    total = float(result.data["total"].values[0])
    softcap = result.facts["softcap"]
    if softcap is not None:
        total = softcap * np.tanh(total / softcap)
    expected = float(trial.logits(TEXT)[-1][ANSWER])
    if not abs(total - expected) <= TOLERANCE * max(1.0, abs(expected)):
        return f"the parts sum to {total:.4f}, and the logit is {expected:.4f}"
    return ""


def steer(trial: Trial) -> str:
    """A cell is what a whole edited pass gives, and without steering the probability is
    the model's own.
    """
    stack = trial.model.anatomy.stacks[-1]
    site = f"{trial.subject.prefix}layer.{max(1, stack.depth - 1)}"
    vector = torch.linspace(-1, 1, stack.proof.width)
    result = hs.steer(
        trial.model,
        trial.inputs(trial.text),
        hs.Direction.of(vector, sites=site),
        strengths=[0.0, 1.0],
        answers=[ANSWER],
        quality=trial.inputs(TEXT, SHORT),
        new_tokens=0,
    )
    before = trial.logits(trial.text)[trial.read_at].softmax(-1)[ANSWER]
    after = trial.edited(trial.text, {site: hs.Add(vector)}).softmax(-1)[ANSWER]
    for strength, expected in ((0.0, before), (1.0, after)):
        cell = result.data["probability"].sel(site=site, strength=strength)
        found = float(cell.values.ravel()[0])
        if not abs(found - float(expected)) <= TOLERANCE * max(float(expected), 0.01):
            return (
                f"at strength {strength:g} the probability is {found:.6f}, and that of"
                f" a plain pass {expected:.6f}"
            )
    return ""


def compare(trial: Trial) -> str:
    """A text does not differ from itself, and another does."""
    same, other = (
        hs.compare(trial.model, trial.inputs(TEXT), trial.inputs(ids))
        for ids in (TEXT, OTHER)
    )
    if float(np.nanmax(same.data["l2"].values)) != 0:
        return "a text differs from itself"
    differs = float(np.nanmax(other.data["l2"].values)) > 0
    return "" if differs else "two texts are the same"


def profile(trial: Trial) -> str:
    """Norms are those of the captured states."""
    texts = [TEXT, SHORT]
    result = hs.profile(trial.model, texts)
    states: Any = trial.model.capture(texts)
    parts = [states.encoder, states.decoder] if trial.two else [states]
    norms = [part[site].double().norm(dim=-1) for part in parts for site in part.sites]
    found = sorted(_finite(result.data["norm"].values))
    expected = sorted(_finite(torch.cat(norms)))
    same = len(found) == len(expected) and np.allclose(found, expected, rtol=1e-4)
    return "" if same else "its norms are not those of the states"


def _finite(values: Any) -> list[float]:
    array = np.asarray(values, dtype=np.float64).ravel()
    return [float(value) for value in array[np.isfinite(array)]]


def embed(trial: Trial) -> str:
    """Vectors in a batch are those of each text alone, with norm 1."""
    both = hs.embed(trial.model, [TEXT, SHORT])
    alone = np.concatenate([hs.embed(trial.model, [ids]) for ids in (TEXT, SHORT)])
    if not np.allclose(np.linalg.norm(both, axis=1), 1, atol=1e-5):
        return "norms are not 1"
    same = np.allclose(both, alone, atol=1e-4)
    return "" if same else "a text has another vector in a batch"


def attention(trial: Trial) -> str:
    """The weights are those that transformers reports with eager attention."""
    inputs = trial.inputs(TEXT)
    result = hs.attention(trial.model, inputs, draws=0)
    targets = torch.tensor([TARGET]) if trial.two else None
    given = arguments(trial.module, torch.tensor([TEXT]), targets=targets)
    report = inside.reported_by(trial.module, given)
    stack = trial.model.anatomy.stacks[-1]
    of_part = inside.REPORTS.get((stack.name, "attn"), ())
    reported = inside.weights_in(report, of_part, stack.depth)
    if reported is None:
        raise NothingToCompare("transformers reports no attention weights")
    for row, layer in enumerate(result.data["layer"].values.tolist()):
        weights = reported[layer - 1]
        found = result.data["pattern"].values[row]
        if weights is None or tuple(weights.shape[1:]) != found.shape:
            continue
        off = np.abs(found - weights[0].float().numpy()).max()
        if not off <= TOLERANCE:
            return f"weights of layer {layer} are off by {off:.4f}"
    return ""


def features(trial: Trial) -> str:
    """The activation of a feature is the product of the state and its unit vector."""
    subject = trial.subject
    dictionary = subject.dictionary
    result = hs.features(trial.model, trial.inputs(TEXT, SHORT), dictionary)
    states = _answering(trial, TEXT, SHORT)
    rows = torch.as_tensor(np.asarray(dictionary.directions), dtype=torch.float64)
    expected = states.double() @ (rows / rows.norm(dim=1, keepdim=True)).T
    strongest = result.data["strongest"].values[0]
    activations = result.data["activation"].values[0]
    for token, rank in zip(*np.nonzero(strongest != ""), strict=True):
        found = activations[token, rank]
        wanted = float(expected[token, int(strongest[token, rank])])
        if not abs(found - wanted) <= TOLERANCE * float(expected.abs().max()):
            return f"at token {token} one acts with {found:.4f}, and not {wanted:.4f}"
    return ""


def examples(trial: Trial) -> str:
    """The strongest example of a direction is the largest product with a state."""
    subject = trial.subject
    result = hs.examples(trial.model, subject.direction, trial.inputs(TEXT, SHORT))
    vector = torch.as_tensor(np.asarray(subject.direction.vector_at(subject.site)))
    states = _answering(trial, TEXT, SHORT).double()
    along = states @ (vector.double() / vector.double().norm())
    lengths = [len(TARGET)] * 2 if trial.two else [len(TEXT), len(SHORT)]
    firsts = [0, lengths[0]]
    counted = [token for token in range(len(along)) if token not in firsts]
    found = float(result.data["activation"].values[0, 0])
    expected = float(along[counted].max())
    if not abs(found - expected) <= TOLERANCE * float(along.abs().max()):
        return f"the strongest token has {found:.4f}, and not {expected:.4f}"
    return ""


def _answering(trial: Trial, *texts: list[int]) -> Tensor:
    """Return the states of texts at the subject's site, each text alone."""
    site = trial.subject.site
    return torch.cat([trial.seen(text, [site])[site] for text in texts])


def graft(trial: Trial) -> str:
    """Grafted states give what a run with the donor's states gives, and blocks what the
    module gives with the donor's block in that call of it.
    """
    model, donor = trial.model, trial.subject.donor
    depth = model.anatomy.stacks[0].depth
    site = f"layer.{max(1, depth - 1)}"
    data = [(TEXT, ANSWER)]
    of_states = hs.graft(model, donor, data, sites=site).data
    of_donor = Trial(Subject.of(donor)).seen(TEXT, [site])[site]
    ways = {"states": (of_states, trial.edited(TEXT, {site: of_donor}))}
    path = model.anatomy.stacks[0].blocks[int(site[6:]) - 1].path
    call = model.anatomy.stacks[0].proof.taps[int(site[6:])].call
    try:
        of_blocks = hs.graft(model, donor, data).data
    except hs.errors.Error:
        # Blocks that are one module, called again and again, are no blocks to graft.
        of_blocks = None
    if of_blocks is not None:
        grafted = deepcopy(trial.module)
        own = grafted.get_submodule(path)
        theirs = deepcopy(donor.module.get_submodule(path))
        # A layer is one call of its block; the others are left as they are.
        forwards = chain([own.forward] * call, [theirs], repeat(own.forward))
        own.forward = lambda *args, **kwargs: next(forwards)(*args, **kwargs)
        with torch.no_grad():
            given = arguments(grafted, torch.tensor([TEXT]))
            logits = grafted(**given, return_dict=True).logits[0, -1]
        ways["blocks"] = of_blocks, logits.double()
    for way, (found, logits) in ways.items():
        expected = float(logits.softmax(-1)[ANSWER])
        number = float(found["probability"].sel(site=site))
        if not abs(number - expected) <= TOLERANCE * max(expected, 0.01):
            return f"{way} at {site} give {number:.6f}, and plain passes {expected:.6f}"
    return ""


def variable(trial: Trial) -> str:
    """Whole states that are exchanged give the answers of edited passes, and what is
    not exchanged those of the model.
    """
    site, at = trial.subject.site, trial.read_at
    bases = [trial.masked([5, 30 + k, 7, 8, 9, 10]) for k in range(8)]
    sources = [trial.masked([5, 50 + k, 11, 12, 13, 14]) for k in range(8)]
    own, exchanged = [], []
    for base, source in zip(bases, sources, strict=True):
        state = trial.seen(source, [site])[site][at]
        own.append(trial.logits(base)[at])
        exchanged.append(trial.edited(base, {site: hs.Replace(state, tokens=at)}))
    # Half of the pairs are to be hit, if their answer is above all that are asked.
    answers = [int(logits.argmax()) for logits in own]
    targets = []
    for k, logits in enumerate(exchanged):
        order = logits.argsort(descending=True).tolist()
        targets.append(order[0] if k % 2 else order[-1])
    pairs = [
        hs.Interchange(base, source, answer, target)
        for base, source, answer, target in zip(
            bases, sources, answers, targets, strict=True
        )
    ]
    result = hs.variable(trial.model, pairs, sites=site, tokens=[at], subspace="pca")
    candidates = sorted({*answers, *targets})
    for name, logits in (("whole", exchanged), ("unchanged", own)):
        hits = []
        for row, target in zip(logits, targets, strict=True):
            above = (row[candidates] >= row[target] - 1e-6).sum()
            hits.append(float(above == 1))
        found = float(result.data[name].values.ravel()[0])
        if not abs(found - float(np.mean(hits))) < 1e-6:
            return f"{name} has {found:.3f} of the answers, and not {np.mean(hits):.3f}"
    return ""


def path_patched(
    trial: Trial,
    runs: tuple[list[int], list[int]],
    wiring: tuple[Sequence[str], Sequence[str]],
    changed: Edges,
) -> Tensor:
    """Return the logits where readers get what the other run writes, through edges.

    Every reader whose edges are changed has a pass of its own, in which the whole state
    below it is replaced by the sum that it reads.
    """
    (text, other), (writers, readers) = runs, wiring
    written: dict[str, Tensor] = {}
    theirs = trial.seen(other, writers)
    rest = torch.zeros(())
    rewired = {reader for _, reader in changed}
    depth = max(int(_layer(writer)) for writer in writers)

    def read(reader: str, known: Mapping[str, Tensor]) -> Tensor:
        total = rest
        for writer, state in known.items():
            total = total + (theirs[writer] if (writer, reader) in changed else state)
        return total

    written["layer.0"] = trial.seen(text, ["layer.0"])["layer.0"]
    for layer in range(1, depth + 1):
        below, name = f"layer.{layer - 1}", f"layer.{layer}."
        stream = rest + sum(written.values())
        changes = {below: stream}
        for kind in OPERANDS:
            site = f"{name}attn.{kind}"
            mine = [reader for reader in readers if reader.startswith(f"{site}.")]
            if not rewired & set(mine):
                continue
            heads = []
            for number, reader in enumerate(mine):
                entering = read(reader, written) if reader in rewired else stream
                state = trial.seen(text, [site], {below: entering})[site]
                heads.append(state.unflatten(-1, (len(mine), -1))[..., number, :])
            changes[site] = torch.cat(heads, -1)
        attn, mlp = f"{name}attn", f"{name}mlp"
        of_layer = [writer for writer in writers if writer.startswith(f"{attn}.")]
        seen = trial.seen(text, [*of_layer, attn, mlp], changes)
        beside = dict(written)
        written |= {writer: seen[writer] for writer in of_layer}
        bias = seen[attn] - sum(seen[writer] for writer in of_layer)
        parallel = (of_layer[0], mlp) not in trial.touching
        if mlp in rewired and parallel:
            seen = trial.seen(text, [mlp], {below: read(mlp, beside)})
        rest = rest + bias
        if mlp in rewired and not parallel:
            mid = {**changes, f"{name}mid": read(mlp, written)}
            seen = trial.seen(text, [mlp], mid)
        written[mlp] = seen[mlp]
    return trial.edited(text, {f"layer.{depth}": read("logits", written)})


def _layer(name: str) -> str:
    return name.split(".")[1]


def _wired(trial: Trial, result: hs.Result) -> tuple[list[str], list[str]]:
    """Return the writers and readers of a result, and note which touch."""
    data = result.data
    writers, readers = data["writer"].values.tolist(), data["reader"].values.tolist()
    places = np.argwhere(np.isfinite(data["effect"].values))
    trial.touching = {(writers[w], readers[r]) for w, r in places}
    return writers, readers


def edges(trial: Trial) -> str:
    """Exact effects are path patching, and estimates the slope along what the reader
    makes of the change.
    """
    trial = trial.exactly
    contrast = trial.contrast
    # One of each kind of reader, in the last block and in the first.
    depth = trial.model.anatomy.stacks[0].depth
    names = [f"layer.{depth}.attn.{kind}.0" for kind in OPERANDS]
    names += [f"layer.{depth}.mlp", "layer.1.attn.q.0", "layer.1.mlp", "logits"]
    paths = [f"layer.0 > {name}" for name in names]
    paths += [
        f"layer.1.attn.head.0 > layer.{depth}.{kind}" for kind in ("attn.v.0", "mlp")
    ]
    if depth == 1:
        paths.pop(-2)
    result = hs.edges(
        trial.model, contrast, method="gradient", exact=2, sample=0, paths=paths
    )
    writers, readers = wiring = _wired(trial, result)
    text, other = trial.masked(OTHER), trial.text
    at = trial.read_at
    base, clean = (_difference(trial.logits(ids)[at]) for ids in (text, other))
    span = clean - base
    allowed = trial.rounding * max(1.0, 1 / abs(span))
    for w, r in np.argwhere(np.isfinite(result.data["exact"].values)):
        if readers[r] == "logits" and writers[w] not in ("layer.0", writers[-1]):
            continue
        edge = writers[w], readers[r]
        patched = path_patched(trial, (text, other), wiring, {edge})
        expected = (_difference(patched) - base) / span
        found = float(result.data["exact"].values[w, r])
        if not abs(found - expected) <= allowed * max(1.0, abs(expected)):
            return (
                f"{edge[0]} to {edge[1]} is {found:.6f}, and path patching gives"
                f" {expected:.6f}"
            )
    for reader in (
        f"layer.{depth}.attn.v.0",
        f"layer.{depth}.attn.q.0",
        f"layer.{depth}.mlp",
    ):
        if reader not in readers:
            continue
        expected = _slope(trial, text, other, reader, wiring) / span
        found = float(result.data["effect"].sel(writer="layer.0", reader=reader))
        if not abs(found - expected) <= 100 * allowed * max(1.0, abs(expected)):
            return (
                f"layer.0 to {reader} is estimated as {found:.6f}, and finite"
                f" differences give {expected:.6f}"
            )
    return ""


def _slope(
    trial: Trial,
    text: list[int],
    other: list[int],
    reader: str,
    wiring: tuple[Sequence[str], Sequence[str]],
) -> float:
    """Return how fast the answer moves along what a reader makes of the change of
    layer.0, by finite differences.
    """
    layer = int(_layer(reader))
    below, name = f"layer.{layer - 1}", f"layer.{layer}."
    away = trial.seen(other, ["layer.0"])["layer.0"]
    away = away - trial.seen(text, ["layer.0"])["layer.0"]
    entering = below
    if reader.endswith("mlp"):
        inner = trial.model.anatomy.block_inside(hs.Site(layer)).mlp_input
        site = f"{name}mlp.input" if inner else f"{name}mlp"
        if (f"{name}attn.head.0", f"{name}mlp") in trial.touching:
            entering = f"{name}mid"
        before = trial.seen(text, [entering, site])
        after = trial.seen(text, [site], {entering: before[entering] + away})[site]
    else:
        site, operand = f"{name}attn.z", reader.rpartition(".")[0]
        heads = sum(name.startswith(f"{operand}.") for name in wiring[1])
        before = trial.seen(text, [below, operand, site])
        changes = {below: before[below] + away}
        new = trial.seen(text, [operand], changes)[operand].unflatten(-1, (heads, -1))
        state = before[operand].clone().unflatten(-1, (heads, -1))
        state[..., 0, :] = new[..., 0, :]
        after = trial.seen(text, [site], {operand: state.flatten(-2)})[site]
    slope = 0.0
    for steps, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
        moved = before[site] + steps * STEP * (after - before[site])
        answer = _difference(trial.edited(text, {site: moved}))
        slope += weight * answer / (12 * STEP)
    return slope


def circuit(trial: Trial) -> str:
    """The faithfulness of a circuit is that of path patching all edges outside it."""
    trial = trial.exactly
    result = hs.circuit(trial.model, trial.contrast, method="gradient", random=0)
    writers, readers = wiring = _wired(trial, result)
    data, at = result.data, trial.read_at
    clean, corrupt = trial.text, trial.masked(OTHER)
    whole, none = (_difference(trial.logits(ids)[at]) for ids in (clean, corrupt))
    for share in (0.5, 0.1):
        outside = ~(data["chosen_by"].values <= share)
        outside &= np.isfinite(data["effect"].values)
        changed = {(writers[w], readers[r]) for w, r in np.argwhere(outside)}
        left = _difference(path_patched(trial, (clean, corrupt), wiring, changed))
        expected = (left - none) / (whole - none)
        found = float(data["faithfulness"].sel(way="circuit", share=share))
        if not abs(found - expected) <= trial.rounding * max(
            1.0, 1 / abs(whole - none)
        ):
            return (
                f"with {share:g} of the edges it is {found:.6f}, and path patching"
                f" gives {expected:.6f}"
            )
    return ""


LAWS: dict[str, Callable[[Trial], str]] = {
    law.__name__: law
    for law in (
        anatomy,
        lens,
        visibility,
        contributions,
        patch,
        steer,
        compare,
        profile,
        embed,
        attention,
        features,
        examples,
        graft,
        variable,
        edges,
        circuit,
    )
}

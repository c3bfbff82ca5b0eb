"""Every analysis on one model: it works and keeps its laws, or it raises an error of
ours.

Each law compares the analysis with a plain pass of the module, or with another way
through the passes.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.discovery import arguments
from hiddenscope.testing import tiny_tokenizer

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


@dataclass
class Subject:
    """A module under trial: its model, and what a plain pass of it gives."""

    module: nn.Module

    @cached_property
    def model(self) -> hs.Model:
        """The module with a tokenizer whose unknown token is its mask."""
        tokenizer = tiny_tokenizer()
        tokenizer.mask_token = tokenizer.unk_token
        return hs.load((self.module, tokenizer))

    @property
    def two(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return self.model.encoder_decoder

    @property
    def text(self) -> list[int]:
        """The first text; the token that is predicted last is masked where the model
        fills in tokens.
        """
        return self.masked(TEXT)

    def masked(self, ids: list[int]) -> list[int]:
        """A text as a prompt: with one mask token in its fifth place where the model
        fills in tokens.
        """
        filled_in = not self.two and not self.model.anatomy.stacks[-1].causal
        return (
            [*ids[:4], self.model.tokenizer.mask_token_id, *ids[5:]]
            if filled_in
            else ids
        )

    @property
    def read_at(self) -> int:
        """Where the answer to a prompt is read."""
        return 4 if self.masked(TEXT) != TEXT else len(TARGET if self.two else TEXT) - 1

    def inputs(self, *texts: list[int]) -> hs.Inputs:
        """Texts as the model takes them; an encoder-decoder is given the same targets
        for each.
        """
        targets = [TARGET] * len(texts) if self.two else None
        return self.model.encode(list(texts), targets=targets)

    def logits(self, ids: list[int]) -> Tensor:
        """The logits [token, word] of a plain pass."""
        targets = torch.tensor([TARGET]) if self.two else None
        with torch.no_grad():
            given = arguments(self.module, torch.tensor([ids]), targets=targets)
            logits: Tensor = self.module(**given, return_dict=True).logits[0]
        return logits.double()

    def edited(self, ids: list[int], site: str, change: Any) -> Tensor:
        """The logits at the answer's place while a state is changed, by one whole pass."""
        logits = hs.edit(
            self.model, self.inputs(ids), {site: change}, (), logits=True
        ).logits
        assert logits is not None
        return logits[self.read_at].double()


def lens(subject: Subject) -> str:
    """At the last layer the lens gives the logits of the model."""
    targets = [TARGET] if subject.two else None
    result = hs.lens(subject.model, [subject.text], k=1, targets=targets)
    last, logits = result.data.isel(site=-1, rank=0), subject.logits(subject.text)
    likeliest, best = logits.softmax(-1).max(-1)
    if not np.allclose(last["probability"].values, likeliest.numpy(), rtol=TOLERANCE):
        return (
            f"the likeliest words have {last['probability'].values}, and those of the"
            f" model {likeliest.numpy()}"
        )
    close = logits.topk(2, dim=-1).values.diff(dim=-1).abs()[:, 0] < TOLERANCE
    differ = (torch.from_numpy(last["word_id"].values) != best) & ~close
    return (
        f"its words at the last layer are not those of the model at {differ.sum()}"
        " tokens"
        if differ.any()
        else ""
    )


def visibility(subject: Subject) -> str:
    """Every number is finite, states see themselves, and a causal model sees nothing
    that comes later.
    """
    result = hs.visibility(subject.model, subject.inputs(subject.text))
    stack = subject.model.anatomy.stacks[-1]
    name, tokens = (
        ("decoder.", slice(len(TEXT), None)) if subject.two else ("", slice(None))
    )
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


def patch(subject: Subject) -> str:
    """A cell is what a whole edited pass gives, and tokens whose states are equal in
    both runs change nothing.
    """
    clean, corrupt = subject.text, subject.masked(OTHER)
    targets = TARGET if subject.two else None
    contrast = hs.Contrast(clean, corrupt, ANSWER, RIVAL, targets=targets)
    result = hs.patch(subject.model, contrast, layers=0)
    place, name = subject.read_at, "encoder." if subject.two else ""
    whole, broken = (
        _difference(subject.logits(ids)[place]) for ids in (clean, corrupt)
    )
    if abs(whole - broken) < 1e-3:
        return ""  # the prompts hardly differ there, and shares of nothing say nothing
    # Some layers are seen in passing, and cannot be changed.
    changed = set(result.data["site"].values)
    for site in changed & {f"{name}layer.0", f"{name}layer.1"}:
        states: Any = hs.record(subject.model, subject.inputs(clean), site).states
        change = hs.Replace(states[site][2], tokens=2)
        expected = (_difference(subject.edited(corrupt, site, change)) - broken) / (
            whole - broken
        )
        data = result.data["effect"].sel(site=site)
        found = float(data.values[2])
        if not abs(found - expected) <= TOLERANCE * max(1.0, 1 / abs(whole - broken)):
            return (
                f"token 2 at {site} restores {found:.4f}, and an edited pass"
                f" {expected:.4f}"
            )
    return ""


def _difference(logits: Tensor) -> float:
    return float(logits[ANSWER] - logits[RIVAL])


def contributions(subject: Subject) -> str:
    """The parts of the answer's logit sum to that of a plain pass."""
    model = subject.model
    targets = [TARGET] if subject.two else None
    result = hs.contributions(model, [TEXT], ANSWER, targets=targets)
    total = float(result.data["total"].values[0])
    softcap = result.facts["softcap"]
    if softcap is not None:
        total = softcap * np.tanh(total / softcap)
    expected = float(subject.logits(TEXT)[-1][ANSWER])
    if not abs(total - expected) <= TOLERANCE * max(1.0, abs(expected)):
        return f"the parts sum to {total:.4f}, and the logit is {expected:.4f}"
    return ""


def steer(subject: Subject) -> str:
    """A cell is what a whole edited pass gives, and without steering the probability is
    the model's own.
    """
    stack = subject.model.anatomy.stacks[-1]
    name = "decoder." if subject.two else ""
    site = f"{name}layer.{max(1, stack.depth - 1)}"
    vector = torch.linspace(-1, 1, stack.proof.width)
    result = hs.steer(
        subject.model,
        subject.inputs(subject.text),
        hs.Direction.of(vector, sites=site),
        strengths=[0.0, 1.0],
        answers=[ANSWER],
        quality=subject.inputs(TEXT, SHORT),
        new_tokens=0,
    )
    before = subject.logits(subject.text)[subject.read_at].softmax(-1)[ANSWER]
    after = subject.edited(subject.text, site, hs.Add(vector)).softmax(-1)[ANSWER]
    for strength, expected in ((0.0, before), (1.0, after)):
        found = float(
            result.data["probability"]
            .sel(site=site, strength=strength)
            .values.ravel()[0]
        )
        if not abs(found - float(expected)) <= TOLERANCE * max(float(expected), 0.01):
            return (
                f"at strength {strength:g} the probability is {found:.6f}, and that of"
                f" a plain pass {expected:.6f}"
            )
    return ""


def compare(subject: Subject) -> str:
    """A text does not differ from itself, and another does."""
    same, other = (
        hs.compare(subject.model, subject.inputs(TEXT), subject.inputs(ids))
        for ids in (TEXT, OTHER)
    )
    if float(np.nanmax(same.data["l2"].values)) != 0:
        return "a text differs from itself"
    return (
        ""
        if float(np.nanmax(other.data["l2"].values)) > 0
        else "two texts are the same"
    )


def profile(subject: Subject) -> str:
    """Norms are those of the captured states."""
    texts = [TEXT, SHORT]
    result = hs.profile(subject.model, texts)
    states: Any = subject.model.capture(texts)
    parts = [states.encoder, states.decoder] if subject.two else [states]
    norms = [part[site].double().norm(dim=-1) for part in parts for site in part.sites]
    found, expected = (
        sorted(values)
        for values in (_finite(result.data["norm"].values), _finite(torch.cat(norms)))
    )
    same = len(found) == len(expected) and np.allclose(found, expected, rtol=1e-4)
    return "" if same else "its norms are not those of the states"


def _finite(values: Any) -> list[float]:
    array = np.asarray(values, dtype=np.float64).ravel()
    return [float(value) for value in array[np.isfinite(array)]]


def embed(subject: Subject) -> str:
    """Vectors in a batch are those of each text alone, with norm 1."""
    both = hs.embed(subject.model, [TEXT, SHORT])
    alone = np.concatenate([hs.embed(subject.model, [ids]) for ids in (TEXT, SHORT)])
    if not np.allclose(np.linalg.norm(both, axis=1), 1, atol=1e-5):
        return "norms are not 1"
    return (
        ""
        if np.allclose(both, alone, atol=1e-4)
        else "a text has another vector in a batch"
    )


LAWS: dict[str, Callable[[Subject], str]] = {
    law.__name__: law
    for law in (lens, visibility, contributions, patch, steer, compare, profile, embed)
}


def tried(module: nn.Module) -> dict[str, tuple[str, str]]:
    """What came of each analysis: kept, refused, wrong or crashed, and why."""
    torch.manual_seed(0)
    if (
        module.config.is_encoder_decoder
        and getattr(module.config, "decoder_start_token_id", None) is None
    ):  # type: ignore[union-attr]
        module.config.decoder_start_token_id = 1  # type: ignore[union-attr]
    subject = Subject(module)
    return {name: _tried(law, subject) for name, law in LAWS.items()}


def _tried(law: Callable[[Subject], str], subject: Subject) -> tuple[str, str]:
    try:
        wrong = law(subject)
    except hs.errors.Error as error:
        return "refused", f"{error.reason}. {error.remedy}"
    except Exception as error:
        places = traceback.extract_tb(error.__traceback__)
        ours = [
            f"{Path(place.filename).name}:{place.lineno}"
            for place in places
            if "hiddenscope" in place.filename
        ]
        return (
            "crashed",
            f"{type(error).__name__}: {str(error)[:200]} ({' '.join(ours[-2:])})",
        )
    return ("wrong", wrong) if wrong else ("kept", "")

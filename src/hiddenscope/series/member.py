"""A member of a series: a model, the name it is shown by, and how it is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from hiddenscope.arguments import checked, shown
from hiddenscope.errors import ArgumentError
from hiddenscope.loading.variants import Adapted, Quantised
from hiddenscope.loading.zoo import DEFAULT
from hiddenscope.model import Model, ModelLike
from hiddenscope.model.model import is_loadable

FEWEST_MEMBERS = 2


@checked
@dataclass(frozen=True)
class Member:
    """One model of a series, where its source alone does not say enough.

    `revision` is a branch, tag or commit of a model on the hub, such as a training
    step. `name` is shown in pictures. `at` is its place along the series, such as the
    number of training steps. `dtype` and `device` are those of `hs.load`.

    >>> Member("EleutherAI/pythia-70m", revision="step1000", at=1000).label
    'pythia-70m step1000'
    """

    source: ModelLike
    name: str = ""
    revision: str | None = None
    at: float | None = None
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, Model):
            # These are options of `hs.load`.
            for option in ("revision", "dtype", "device"):
                value = getattr(self, option)
                if value is not None:
                    raise ArgumentError(
                        "Cannot make a member of a series",
                        f"{option}={shown(value)} is for a model that is still to be"
                        " loaded, and this one is loaded already",
                        f"Leave {option} out, or give what hs.load takes.",
                    )
        if self.at is not None and not math.isfinite(self.at):
            raise ArgumentError(
                "Cannot make a member of a series",
                f"at is {self.at}, which is no place on an axis",
                "Give a finite number.",
            )

    @property
    def label(self) -> str:
        """Return the name, or one that is made of the source."""
        if self.name:
            return self.name
        parts = [source_name(self.source), self.revision, self.dtype]
        return " ".join(part for part in parts if part)


Members: TypeAlias = Sequence[Member | ModelLike]


def members_of(models: Members) -> list[Member]:
    """Return the members of a series, each with a name of its own.

    >>> [member.name for member in members_of(["gpt2", Member("gpt2", name="again")])]
    ['gpt2', 'again']
    >>> [member.name for member in members_of(["gpt2", "gpt2"])]
    ['gpt2 (1)', 'gpt2 (2)']
    """
    # A path, a pair of a module with its tokenizer, or anything else that is no list.
    is_list = isinstance(models, list | tuple) and not is_loadable(models)
    if not is_list:
        raise ArgumentError(
            "Cannot make a series",
            f"its models must be a list, got {shown(models)}",
            "Give a list of at least two.",
        )
    if len(models) < FEWEST_MEMBERS:
        held = "the list is empty" if not models else "it has one member"
        raise ArgumentError(
            "Cannot make a series",
            f"{held}, and there is nothing to compare it with",
            "Give at least two models.",
        )
    members = []
    for number, model in enumerate(models, 1):
        if isinstance(model, Member):
            members.append(model)
        elif isinstance(model, Model) or is_loadable(model):
            members.append(Member(model))
        else:
            remedy = "Give a model, what hs.load takes, or an hs.Member of it."
            if isinstance(model, tuple) and len(model) == 2:
                remedy = "A revision is given as hs.Member(source, revision=...)."
            raise ArgumentError(
                "Cannot make a series",
                f"member {number} is {shown(model)}, which is not a model",
                remedy,
            )
    labels = [member.label for member in members]
    named = []
    for place, member in enumerate(members):
        name = labels[place]
        if labels.count(name) > 1:
            name = f"{name} ({labels[: place + 1].count(name)})"
        named.append(replace(member, name=name))
    return named


def source_name(source: Any) -> str:
    """Return what a source is called before it is loaded.

    >>> source_name(Adapted("smollm2", "runs/lora", strength=0.5))
    'smollm2 + lora x 0.5'
    """
    if isinstance(source, Model):
        return source.name
    if isinstance(source, Quantised):
        return f"{source_name(source.base)} {source.scheme}"
    if isinstance(source, Adapted):
        adapters = [Path(folder).name for folder in source.folders]
        name = " + ".join([source_name(source.base), *adapters])
        if source.strength != 1:
            name += f" x {source.strength:g}"
        return f"{name} merged" if source.merged else name
    if isinstance(source, tuple):
        source = source[0]
    if isinstance(source, nn.Module):
        return type(source).__name__
    return Path(os.fspath(source or DEFAULT)).name

"""What an analysis needs of a model is refused in one voice, before anything runs."""

from collections.abc import Callable
from typing import Any

import pytest

import hiddenscope as hs
from hiddenscope.app.cells import Models
from hiddenscope.app.questions import answer
from hiddenscope.catalog import ANALYSES
from hiddenscope.errors import PassError, SiteError
from hiddenscope.interface import CAUSAL, HEAD, ONE_STACK, describe
from hiddenscope.testing import tiny_model

Tiny = Callable[..., hs.Model]

DECLARED = [entry.word for entry in ANALYSES if entry.word != "extract"]
NEEDY = [word for word in DECLARED if describe(word).needs]
SUBJECTS = [
    ("llama", None),
    ("llama", "base"),
    ("bert", None),
    ("bert", "base"),
    ("t5", None),
    ("mamba", None),
]


def sentence(word: str, model: hs.Model) -> str:
    """Return what is said of a model that lacks something; empty where it has all."""
    for need in describe(word).needs:
        if not need.is_met(model.anatomy):
            problem = f"Cannot {describe(word).verb} {model.name}"
            return f"{problem}: {need.reason}. {need.remedy}"
    return ""


def refused(word: str, model: Any) -> tuple[str, int]:
    """Return the error about an analysis of nonsense, and how often the model ran."""
    required = [each for each in describe(word).parameters if each.required]
    nonsense = [object() for _ in required]
    passes: list[int] = []
    hook = model.module.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            getattr(hs, word)(model, *nonsense)
    finally:
        hook.remove()
    return str(caught.value), len(passes)


@pytest.mark.parametrize("word", NEEDY)
@pytest.mark.parametrize(("family", "task"), SUBJECTS)
def test_what_a_model_lacks_is_said_before_anything_is_read(
    tiny: Tiny, word: str, family: str, task: str | None
) -> None:
    model = tiny(family, task)
    said, passes = refused(word, model)
    expected = sentence(word, model)
    if expected:
        assert (said, passes) == (expected, 0)
    else:
        assert not any(need.reason in said for need in (HEAD, ONE_STACK, CAUSAL))


def test_each_need_is_lacked_by_a_model_and_declared_by_an_analysis(
    tiny: Tiny,
) -> None:
    lacking = {HEAD: tiny("llama", "base"), ONE_STACK: tiny("t5"), CAUSAL: tiny("bert")}
    for need, model in lacking.items():
        assert not need.is_met(model.anatomy) and need.is_met(tiny("llama").anatomy)
        assert any(need in describe(word).needs for word in NEEDY)


def test_an_unnamed_model_is_still_missed_and_a_name_loaded(tiny: Tiny) -> None:
    module = tiny("llama", "base").module
    with pytest.raises(PassError, match="Cannot patch LlamaModel: it has no head"):
        hs.patch(contrasts=None, model=(module, None))  # type: ignore[arg-type]
    with pytest.raises(hs.errors.ArgumentError, match="missing.*'model'"):
        hs.patch(contrasts=None)  # type: ignore[call-arg, arg-type]


def test_a_direction_is_split_without_a_head(tiny: Tiny) -> None:
    model = tiny("llama", "base")
    direction = hs.Direction.of([1.0] * 64, sites="layer.2")
    result = hs.contributions(model, [5, 6, 7], direction)
    assert abs(float(result.data["error"].item())) < 1e-4


def test_the_workbench_says_the_same_before_a_direction_is_made(tiny: Tiny) -> None:
    model = tiny("llama", "base")

    class One(Models):
        def get(self, choice: Any) -> hs.Model:
            return model

    request = {
        "analysis": "steer",
        "model": {"name": "tiny"},
        "arguments": {
            "prompts": "The cat",
            "direction": {"toward": ["The cat"], "away": ["A rest"]},
        },
    }
    passes: list[int] = []
    hook = model.module.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises(PassError) as caught:
            answer(request, One.__new__(One), lambda early: None)
    finally:
        hook.remove()
    assert str(caught.value) == sentence("steer", model) and not passes


CONTRAST = hs.Contrast([5, 6, 7], [5, 9, 7], 11, 12, at=1)
ASKED: dict[str, Callable[[hs.Model, Any], Any]] = {
    "patch": lambda model, site: hs.patch(model, CONTRAST, sites=site),
    "steer": lambda model, site: hs.steer(
        model, [[5, 6, 7]], hs.Direction.of([1.0] * 64, sites=site), answers=[3]
    ),
    "graft": lambda model, site: hs.graft(
        model, hs.load((tiny_model("gemma3_text", seed=1), None)), [[5, 6]], sites=site
    ),
    "variable": lambda model, site: hs.variable(
        model, [hs.Interchange([5, 6], [5, 7], 11, 12)], sites=site
    ),
}


def test_every_analysis_that_changes_states_is_asked_here() -> None:
    assert set(ASKED) == {word for word in DECLARED if describe(word).changes}


@pytest.mark.parametrize(
    ("word", "family", "site"),
    [
        ("patch", "squeezebert", "layer.0"),
        ("patch", "squeezebert", ["layer.0", "layer.0"]),
        ("steer", "gemma3_text", "layer.1.attn.head.0"),
        ("steer", "gemma3_text", "*.attn.head.*"),
        ("graft", "gemma3_text", "layer.1.attn.head.0"),
        ("variable", "gemma3_text", "layer.1.attn.head.0"),
        ("variable", "squeezebert", "layer.0"),
    ],
)
def test_a_site_that_cannot_be_changed_is_refused_as_an_edit_refuses_it(
    tiny: Tiny, word: str, family: str, site: Any
) -> None:
    model = tiny(family)
    passes: list[int] = []
    hook = model.module.register_forward_pre_hook(lambda *_: passes.append(1))
    # What is inside the blocks is looked for again in a module with a hook.
    (first, *_) = model.anatomy.select(site)
    passes.clear()
    try:
        with pytest.raises(SiteError) as caught:
            ASKED[word](model, site)
    finally:
        hook.remove()
    with pytest.raises(SiteError) as edited:
        hs.edit(model, [[5, 6, 7]], {first: hs.Scale(1.0)}, ())
    assert str(caught.value) == str(edited.value) and not passes

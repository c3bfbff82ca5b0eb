"""Every analysis that has an oracle agrees with it, on families of several shapes."""

import copy
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import hiddenscope as hs
from hiddenscope.testing import tiny_tokenizer
from tests.configurations import configured
from tests.oracles import disagreements
from tests.planted import exchanges
from tests.registry import CONTRAST, CONTRASTS, IDS, OTHER, TEXT, tiny
from tests.slices import with_slow

# `tests/checks` asks the smallest questions of every subject; these ask others.
slow = pytest.mark.slow

CLASSES = {
    "phi": "PhiForCausalLM",
    "cohere": "CohereForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "mpt": "MptForCausalLM",
    "xglm": "XGLMForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
}
FAMILIES = ("llama", "gpt2", "phi", "granite", "gemma3_text")


@cache
def subject(family: str) -> hs.Model:
    """Return a tiny model of a family."""
    if family in CLASSES:
        return hs.load((configured(CLASSES[family]), tiny_tokenizer()))
    return tiny(family)


def check(word: str, family: str, *args: Any, **options: Any) -> None:
    """Ask a question of a family, and compare the result with its oracle."""
    function: Callable[..., hs.Result] = getattr(hs, word)
    model = subject(family)
    asked = inspect.signature(function).bind(model, *args, **options)
    asked.apply_defaults()
    result = function(model, *args, **options)
    # The first is the model, whatever it is called.
    arguments = dict([*asked.arguments.items()][1:])
    assert disagreements(word, model, arguments, result) == []


def shifted(model: hs.Model) -> tuple[Any, None]:
    """Copy a module, with a matrix of its second block a little larger."""
    copied: Any = copy.deepcopy(model.module)
    for name, weight in copied.named_parameters():
        if weight.ndim >= 2 and ".1." in name and "mlp" in name:
            weight.data.mul_(1.05)
    return copied, None


WIRED = ("phi", "granite", "gemma3_text", "cohere", "mpt", "olmo2", "gptj")
MORE_WIRED = ("qwen3", "opt", "bloom", "gpt_neox", "falcon", "mixtral")


@slow
@pytest.mark.parametrize("family", [*FAMILIES, "bert", "t5"])
def test_a_lens_reads_what_a_pass_that_ends_with_the_state_gives(family: str) -> None:
    check("lens", family, TEXT, target=20)


@slow
def test_a_lens_of_parts_and_of_several_texts_is_that_of_passes() -> None:
    check("lens", "granite", TEXT, sites="*.attn.head.*,*.mlp", target=20)
    check("lens", "llama", [TEXT, OTHER], target="next", sites="*")


@slow
@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_patching_is_a_pass_for_each_cell(family: str) -> None:
    check("patch", family, CONTRAST, method="both")


@slow
@pytest.mark.parametrize(
    "options",
    [
        {"method": "mean"},
        {"method": "zero", "sites": "*.attn,*.mlp"},
        {"method": "both", "sites": "*.attn.head.*,*.mlp.neuron.3"},
        {"method": "resample", "sites": "layer.2.attn.head.*"},
        {"into": "clean", "window": 2, "layers": 2},
        {"sites": "layer.2.attn.head.*", "window": [1, -1]},
    ],
)
@slow
def test_every_way_to_patch_is_a_pass_for_each_cell(options: dict[str, Any]) -> None:
    check("patch", "gemma3_text", CONTRAST, **options)


@slow
def test_patching_prompts_of_two_lengths_is_a_pass_for_each_cell() -> None:
    check("patch", "llama", hs.Contrast([5, 6, 7], [5, 9, 3, 7], 11, 12))
    # Zeros also replace tokens that only the clean prompt has.
    longer = hs.Contrast([5, 9, 3, 7], [5, 6, 7], 11, 12)
    check("patch", "llama", longer, method="zero", sites="layer.*,*.mlp")


# Four pairs in three groups: two of one name, and two of the same prompts.
GROUPED = [
    hs.Contrast([5, 20, 7], [5, 40, 7], 11, 12, group="a"),
    hs.Contrast([5, 21, 7], [5, 41, 7], 11, 12, group="a"),
    hs.Contrast([5, 22, 7], [5, 42, 7], 11, 12),
    hs.Contrast([5, 42, 7], [5, 22, 7], 11, 12),
    hs.Contrast([5, 23, 7], [5, 43, 7], 13, 12, group="b"),
    hs.Contrast([5, 23, 7], [5, 43, 7], 13, 12, group="b"),
]


def test_pairs_are_averaged_with_the_error_of_leaving_out_groups() -> None:
    check("patch", "llama", GROUPED, method="both")
    check("patch", "gpt2", GROUPED, sites="layer.1.attn.head.*")
    check("edges", "llama", GROUPED, method="exact")
    longer = [hs.Contrast([5, 6, 20, 7], [5, 6, 40, 8], 11, 12), *GROUPED[:2]]
    check("patch", "llama", longer, sites="layer.2.attn.head.*")
    check("edges", "gpt2", longer, method="gradient", exact=3, sample=0)


def test_an_answer_is_read_where_it_is_asked() -> None:
    contrast = hs.Contrast([5, 6, 7, 9], [5, 9, 7, 6], 11, 12, at=2)
    check("patch", "llama", contrast, method="both")
    check("edges", "llama", contrast, exact=3, sample=0)


@slow
@pytest.mark.parametrize("family", [*FAMILIES, "cohere", "t5"])
def test_contributions_are_what_the_head_makes_of_each_part(family: str) -> None:
    check("contributions", family, [5, 6, 7], 11, 12, neurons=3)


@slow
@pytest.mark.parametrize("family", [*FAMILIES, "olmo2", "t5"])
def test_attention_is_what_an_eager_copy_reports(family: str) -> None:
    check("attention", family, [5, 6, 7, 8, 9], draws=0)


@slow
def test_scores_of_heads_are_means_over_the_random_texts() -> None:
    check("attention", "llama", [5, 6, 7, 8, 9], draws=6)


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_steering_is_a_pass_for_each_text_site_and_strength(family: str) -> None:
    direction = hs.Direction.between(
        subject(family), [[5, 6]], [[7, 8]], sites="layer.1-2"
    )
    options = {"answers": [3, 4], "quality": [[9, 8, 7, 6]], "new_tokens": 0}
    check("steer", family, [[5, 6, 7]], direction, strengths=[-1, 0, 2], **options)


@slow
def test_ablating_a_direction_is_a_pass_for_each_text_and_site() -> None:
    direction = hs.Direction.of(np.ones(64), sites="layer.*", spare_first=True)
    options = {"answers": [3, 4], "quality": [[9, 8, 7, 6], [4, 6, 8]]}
    check("steer", "t5", IDS, direction, strengths="ablate", new_tokens=0, **options)


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graft_is_a_copy_with_the_weights_of_the_donor(family: str) -> None:
    examples = [([5, 6, 7], 11), ([8, 9], 12)]
    check("graft", family, shifted(subject(family)), examples)


def test_a_graft_of_states_is_a_pass_with_the_states_of_the_donor() -> None:
    examples = [([5, 6, 7], 11), ([8, 9, 4, 3], 12), ([5, 9], 13)]
    sites = "layer.*,*.attn,*.mlp,*.mid,final"
    check("graft", "llama", shifted(subject("llama")), examples, sites=sites)


@slow
@pytest.mark.parametrize("options", [{"sites": "*.attn", "layers": 2}, {"layers": 2}])
def test_a_graft_changes_the_loss_as_passes_do(options: dict[str, Any]) -> None:
    texts = [[5, 6, 7], [8, 9], [4, 5], [9, 3, 7], [6, 6, 8]]
    check("graft", "granite", shifted(subject("granite")), texts, **options)


@slow
@pytest.mark.parametrize("family", [*FAMILIES, "bert", "mamba"])
def test_influence_is_a_gradient_for_each_pair_of_states(family: str) -> None:
    check("visibility", family, [[5, 6, 7, 8, 9]])


@slow
def test_influence_of_two_stacks_is_a_gradient_for_each_pair_of_states() -> None:
    model = subject("t5")
    check("visibility", "t5", model.encode("The cat", targets="on the mat"))


@slow
@pytest.mark.parametrize("influence", ["relative", "logit"])
def test_every_influence_is_made_of_gradients(influence: str) -> None:
    sites = "layer.0,layer.3"
    check("visibility", "llama", [[5, 6, 7]], influence=influence, sites=sites)


@slow
@pytest.mark.parametrize("family", [*FAMILIES, "mamba"])
def test_drift_is_that_of_blocks_on_the_same_input(family: str) -> None:
    check("drift", family, shifted(subject(family)), [[5, 6, 7, 8, 9], [4, 5, 6]])


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_exchanging_is_a_pass_for_each_pair(family: str) -> None:
    sites = "layer.1,layer.2.mlp"
    check("variable", family, exchanges(4), sites=sites, subspace="pca", rank=2)


def test_a_subspace_that_is_given_is_exchanged() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 64))
    options = {"sites": "layer.2", "tokens": [1, -1], "subspace": rows, "seed": 5}
    check("variable", "gpt2", exchanges(6), **options)


@slow
@pytest.mark.parametrize("method", ["exact", "integrated"])
@pytest.mark.parametrize("family", with_slow(["llama", "gpt2", *WIRED], MORE_WIRED))
def test_edges_are_paths_that_hooks_patch(family: str, method: str) -> None:
    check("edges", family, CONTRAST, method=method, exact=2, sample=2)


@slow
def test_named_edges_dropped_gradients_and_both_runs_are_as_hooks_give_them() -> None:
    paths = ["layer.1.mlp.neuron.7 > *"]
    check("edges", "phi", CONTRAST, method="gradient", paths=paths, sample=0)
    # The span of one of the two is below zero, and sizes are not.
    check("edges", "granite", CONTRAST, method="dropped", into="clean", sample=0)
    check("edges", "granite", CONTRAST, method="dropped", sample=0)


@slow
@pytest.mark.parametrize("ablation", ["resample", "mean", "zero"])
@pytest.mark.parametrize("family", ["llama", "phi", "granite", "gemma3_text"])
def test_faithfulness_is_that_of_paths_in_float64(family: str, ablation: str) -> None:
    options = {"random": 1, "method": "gradient"}
    check("circuit", family, CONTRASTS[:2], ablation=ablation, **options)


def test_a_seed_draws_other_edges_and_other_contrasts() -> None:
    options = {"random": 2, "method": "exact", "seed": 3}
    check("circuit", "gpt2", CONTRASTS[:3], **options)


def test_an_oracle_finds_a_number_that_is_off() -> None:
    result = hs.lens(subject("llama"), IDS)
    result.data["kl"][0, 0] += 0.1
    wrong = disagreements("lens", subject("llama"), {"texts": IDS}, result)
    assert len(wrong) == 1
    assert wrong[0].startswith("lens kl at [0, 0]: found ")

"""Every analysis that has an oracle agrees with it, on families of several shapes."""

import copy
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import hiddenscope as hs
from hiddenscope.testing import SUBJECTS, tiny_tokenizer
from tests.configurations import configured
from tests.oracles import disagreements
from tests.planted import exchanges
from tests.registry import CONTRAST, CONTRASTS, IDS, OTHER, TEXT, tiny
from tests.slices import with_slow

# `tests/checks` asks the smallest questions of every subject; these ask others.
pytestmark = pytest.mark.slow

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


def check(word: str, family: str | hs.Model, *args: Any, **options: Any) -> None:
    """Ask a question of a family, and compare the result with its oracle."""
    function: Callable[..., hs.Result] = getattr(hs, word)
    model = subject(family) if isinstance(family, str) else family
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


@pytest.mark.parametrize("family", [*FAMILIES, "cohere", "bert", "t5"])
def test_a_lens_reads_what_a_pass_that_ends_with_the_state_gives(family: str) -> None:
    check("lens", family, TEXT, target=20)


def test_a_lens_of_parts_and_of_several_texts_is_that_of_passes() -> None:
    check("lens", "granite", TEXT, sites="*.attn.head.*,*.mlp", target=20)
    check("lens", "llama", [TEXT, OTHER], target="next", sites="*")


@pytest.mark.parametrize(
    "sites", ["layer.0-1", "layer.1-2", "layer.2,final", "layer.1,final", "final"]
)
def test_a_lens_of_some_layers_says_what_is_known_of_the_others(sites: str) -> None:
    check("lens", "gpt2", TEXT, sites=sites)


@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_patching_is_a_pass_for_each_cell(family: str) -> None:
    check("patch", family, CONTRAST, method="both")


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
def test_every_way_to_patch_is_a_pass_for_each_cell(options: dict[str, Any]) -> None:
    check("patch", "gemma3_text", CONTRAST, **options)


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


@pytest.mark.parametrize("family", [*FAMILIES, "cohere", "t5"])
def test_contributions_are_what_the_head_makes_of_each_part(family: str) -> None:
    check("contributions", family, [5, 6, 7], 11, 12, neurons=3)


@pytest.mark.parametrize("answers", [([11, 12], None), ([11, 12, 30], [11, 20])])
def test_each_token_of_an_answer_follows_those_before_it(answers: Any) -> None:
    check("contributions", "llama", [5, 6, 7], *answers)


@pytest.mark.parametrize("family", [*FAMILIES, "olmo2", "t5"])
def test_attention_is_what_an_eager_copy_reports(family: str) -> None:
    check("attention", family, [5, 6, 7, 8, 9], draws=0)


@pytest.mark.parametrize("sites", ["decoder.*.attn", "decoder.*.cross"])
def test_every_attention_of_two_stacks_is_what_an_eager_copy_reports(
    sites: str,
) -> None:
    inputs = subject("t5").encode([[5, 6, 7, 8, 9]], targets=[[3, 9, 4]])
    check("attention", "t5", inputs, sites, draws=0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_scores_of_heads_are_means_over_the_random_texts(family: str) -> None:
    check("attention", family, [5, 6, 7, 8, 9], draws=6)
    # Without a tokenizer they begin with no special token.
    bare = hs.load((subject(family).module, None))
    check("attention", bare, [5, 6, 7, 8, 9], draws=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_steering_is_a_pass_for_each_text_site_and_strength(family: str) -> None:
    direction = hs.Direction.between(
        subject(family), [[5, 6]], [[7, 8]], sites="layer.1-2"
    )
    options = {"answers": [3, 4], "quality": [[9, 8, 7, 6]], "new_tokens": 0}
    # An even number of tokens: their median norm lies between two.
    check("steer", family, [[5, 6, 7, 8]], direction, strengths=[-1, 0, 2], **options)


def test_ablating_a_direction_is_a_pass_for_each_text_and_site() -> None:
    direction = hs.Direction.of(np.ones(64), sites="layer.*", spare_first=True)
    options = {"answers": [3, 4], "quality": [[9, 8, 7, 6], [4, 6, 8]]}
    check("steer", "t5", IDS, direction, strengths="ablate", new_tokens=0, **options)


@pytest.mark.parametrize("strengths", [[0.7, 2], "ablate"], ids=str)
@pytest.mark.parametrize("sites", ["layer.1,layer.2.attn,layer.2.mid,final", "layer.2"])
def test_steering_inside_blocks_and_upwards_is_a_pass_for_each(
    sites: str, strengths: Any
) -> None:
    upwards = sites == "layer.2"
    direction = hs.Direction.of(np.linspace(-1, 1, 64), sites=sites, upwards=upwards)
    options = {"answers": [3, 4], "quality": [[9, 8, 7, 6]], "new_tokens": 0}
    check("steer", "gpt2", [[5, 6, 7]], direction, strengths=strengths, **options)


@pytest.mark.parametrize("site", ["encoder.layer.2", "decoder.layer.1"])
def test_steering_either_stack_is_a_pass_for_each(site: str) -> None:
    direction = hs.Direction.of(np.linspace(-1, 1, 64), sites=site)
    options = {"answers": [3, 4], "quality": [[9, 8, 7, 6], [4, 6, 8]]}
    check("steer", "t5", IDS, direction, strengths=[2], new_tokens=0, **options)


def test_a_masked_model_is_asked_at_its_mask_and_judged_by_masking() -> None:
    prompts = ["The <unk> sat on the mat", "A dog and a <unk>"]
    direction = hs.Direction.of(np.linspace(-1, 1, 64), sites="layer.2")
    options = {"answers": [3, 4], "quality": [TEXT, OTHER], "new_tokens": 0}
    check("steer", SUBJECTS["bert"].model, prompts, direction, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graft_is_a_copy_with_the_weights_of_the_donor(family: str) -> None:
    examples = [([5, 6, 7], 11), ([8, 9], 12)]
    check("graft", family, shifted(subject(family)), examples)


def test_a_graft_of_states_is_a_pass_with_the_states_of_the_donor() -> None:
    examples = [([5, 6, 7], 11), ([8, 9, 4, 3], 12), ([5, 9], 13)]
    sites = "layer.*,*.attn,*.mlp,*.mid,final"
    check("graft", "llama", shifted(subject("llama")), examples, sites=sites)


@pytest.mark.parametrize("options", [{"sites": "*.attn", "layers": 2}, {"layers": 2}])
def test_a_graft_changes_the_loss_as_passes_do(options: dict[str, Any]) -> None:
    texts = [[5, 6, 7], [8, 9], [4, 5], [9, 3, 7], [6, 6, 8]]
    check("graft", "granite", shifted(subject("granite")), texts, **options)


@pytest.mark.parametrize("family", [*FAMILIES, "bert", "mamba"])
def test_influence_is_a_gradient_for_each_pair_of_states(family: str) -> None:
    check("visibility", family, [[5, 6, 7, 8, 9]])


def test_influence_of_parts_is_a_gradient_for_each_pair_of_states() -> None:
    sites = "layer.*,*.mlp,layer.1.mid,layer.2.attn,final"
    check("visibility", "llama", [[5, 6, 7]], sites=sites)


def test_influence_of_two_stacks_is_a_gradient_for_each_pair_of_states() -> None:
    model = subject("t5")
    inputs = model.encode("The cat", targets="on the mat")
    check("visibility", "t5", inputs)
    parts = "decoder.layer.2,decoder.layer.2.cross,*.mlp,encoder.layer.1.attn"
    check("visibility", "t5", inputs, sites=parts)


@pytest.mark.parametrize(
    "options",
    [
        {"influence": "frobenius"},
        {"influence": "relative"},
        {"influence": "logit"},
        {"influence": "logit", "target": 6},
    ],
    ids=str,
)
def test_every_influence_is_made_of_gradients(options: dict[str, Any]) -> None:
    check("visibility", "llama", [[5, 6, 7]], sites="layer.0,layer.3", **options)


def test_influence_by_position_is_the_mean_of_gradients() -> None:
    texts, by_position = [[5, 6, 7, 8], [5, 9, 10]], hs.Sampling(align="position")
    check("visibility", "llama", texts, sites="layer.*", sampling=by_position)


@pytest.mark.parametrize("family", [*FAMILIES, "mamba"])
def test_drift_is_that_of_blocks_on_the_same_input(family: str) -> None:
    check("drift", family, shifted(subject(family)), [[5, 6, 7, 8, 9], [4, 5, 6]])


@pytest.mark.parametrize("family", FAMILIES)
def test_exchanging_is_a_pass_for_each_pair(family: str) -> None:
    sites = "layer.1,layer.2.mlp"
    check("variable", family, exchanges(4), sites=sites, subspace="pca", rank=2)


def test_a_subspace_that_is_given_is_exchanged() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 64))
    options = {"sites": "layer.2", "tokens": [1, -1], "subspace": rows, "seed": 5}
    check("variable", "gpt2", exchanges(6), **options)


@pytest.mark.parametrize("method", ["exact", "integrated"])
@pytest.mark.parametrize("family", with_slow(["llama", "gpt2", *WIRED], MORE_WIRED))
def test_edges_are_paths_that_hooks_patch(family: str, method: str) -> None:
    check("edges", family, CONTRAST, method=method, exact=2, sample=2)


def test_named_edges_dropped_gradients_and_both_runs_are_as_hooks_give_them() -> None:
    paths = ["layer.1.mlp.neuron.7 > *"]
    check("edges", "phi", CONTRAST, method="gradient", paths=paths, sample=0)
    # The span of one of the two is below zero, and sizes are not.
    check("edges", "granite", CONTRAST, method="dropped", into="clean", sample=0)
    check("edges", "granite", CONTRAST, method="dropped", sample=0)


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

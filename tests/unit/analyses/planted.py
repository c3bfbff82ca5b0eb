"""The one table of planted faults: what drift must say of every kind, and of no other.

The lab `faults` plants them and declares where each is; `hints_of` is what it looks
like. Fast tests take a few, tests/slow/faults takes all of them.
"""

import importlib.util
from typing import Any

from labs.faults.models import subject
from labs.faults.pairs import Spec
from labs.faults.planted import KINDS, UNNAMED
from labs.faults.trial import Outcome, attempt
from tests.places import ROOT

NOTHING: set[str] = set()
HINTS: dict[str, set[str]] = {
    # Weights.
    "weight_transposed": {"transposed_weight"},
    "weight_permuted": {"permuted_weight"},
    "heads_permuted": {"permuted_weight"},
    "rope_pairs_unconverted": {"permuted_weight"},
    "bias_missing": {"missing_bias"},
    "norm_bias_missing": {"missing_bias", "zeroed_weight"},
    "norm_weight_missing": {"constant_weight", "norm_weight_missing"},
    "stale_weight": {"changed_weight"},
    "earlier_checkpoint": {"changed_weight"},
    "shard_missing": {"changed_weight"},
    "weight_int8": {"changed_weight"},
    "weight_bf16": {"rounded_weight"},
    "layers_swapped": {"exchanged_weight", "swapped_layer"},
    "queries_keys_swapped": {"exchanged_weight"},
    "keys_values_swapped": {"exchanged_weight"},
    "gate_up_swapped": {"exchanged_weight"},
    "norms_swapped": {"exchanged_weight"},
    "qkv_reordered": {"permuted_weight"},
    "experts_swapped": {"permuted_weight"},
    "expert_halves_swapped": {"permuted_weight"},
    # Attention.
    "attention_scale": {"attention_scale"},
    "kv_heads_tiled": {"kv_heads"},
    "mask_off_by_one": {"mask_looks_ahead"},
    "mask_strict": {"mask_off_by_one"},
    "causal_mask_missing": {"mask_missing"},
    "causal_mask_added": {"causal_mask_added"},
    "softmax_bf16": NOTHING,
    "window_ignored": {"window_ignored"},
    "window_off_by_one": {"window_short"},
    "heads_flattened": {"heads_flattened"},
    "position_bias_missing": {"position_bias_missing"},
    "attention_softcap_missing": {"softcap_missing"},
    "rope_interleaved": {"rope_pairs"},
    "rope_keys_missing": {"rope_keys_missing"},
    "rope_reversed": {"rope_direction"},
    "rope_position_off_by_one": {"query_off_by_one"},
    # Functions.
    "activation": {"activation"},
    "norm_eps": {"attribute", "norm_eps"},
    "norm_mean": {"norm_kind"},
    "norm_skipped": {"not_applied"},
    "norm_twice": {"applied_twice"},
    "final_norm_missing": {"not_applied"},
    "final_norm_twice": {"applied_twice"},
    "final_norm_eps": {"attribute", "norm_eps"},
    "bias_twice": {"bias_twice"},
    "layer_skipped": {"layer_skipped"},
    "layer_doubled": {"layer_doubled"},
    "residual_scaled": {"residual_scale"},
    "block_bf16": NOTHING,
    "linear_bf16": NOTHING,
    "dropout_on": NOTHING,
    "wrong_half_activated": {"exchanged_parts"},
    "parallel_residual": {"attribute"},
    "router_top_k": {"attribute"},
    "router_normalisation": NOTHING,
    # The whole model.
    "rope_base": {"rope_base"},
    "rope_scaling": {"rope_scaling"},
    "rope_attention_factor": {"attribute", "scale"},
    "rope_bf16": NOTHING,
    "embedding_scale_missing": {"constant_weight", "scale"},
    "embedding_scale_added": {"scale"},
    "token_ids_shifted": NOTHING,
    "position_off_by_one": NOTHING,
    "padding_side": NOTHING,
    "rope_positions_shifted": NOTHING,
    "mask_hides_token": NOTHING,
    "logit_scale": {"scale"},
    "logit_softcap_missing": NOTHING,
    "relative_buckets": {"attribute"},
    "token_type": {"changed_weight"},
    # Unnamed.
    "noise": {"changed_weight"},
    "rows": {"permuted_weight"},
    "order": NOTHING,
    "factor": {"scale"},
    "channel": NOTHING,
    "clip": NOTHING,
}
# Where a family shows a kind otherwise.
SPECIAL: dict[tuple[str, str], set[str]] = {
    # Its Conv1D keeps zeros.
    ("gpt2", "bias_missing"): {"missing_bias", "zeroed_weight"},
    # The code that runs the blocks gives them other arguments.
    ("gpt2", "position_off_by_one"): {"block_argument"},
    ("gpt2", "padding_side"): {"block_argument"},
    ("llama", "mask_hides_token"): {"block_argument"},
}
FAMILIES = ("llama", "gpt2", "bert", "t5", "gemma2", "mixtral", "gpt_neox", "opt")


def hints_of(family: str, kind: str) -> set[str]:
    """Return what must be said of a kind of fault in a family."""
    return SPECIAL.get((family, kind), HINTS[kind])


def families_for(kind: str) -> list[str]:
    """Return the families that have a place for a kind."""
    fault = {**KINDS, **UNNAMED}[kind]
    families = [family for family in FAMILIES if fault.applies(subject(family).module)]
    # Its attention with another rotation has no cap either: two mistakes at once.
    if kind.startswith("rope_") and "gemma2" in families:
        families.remove("gemma2")
    return families


def compared(
    family: str, kind: str, dtype: str = "float32", device: str = "cpu"
) -> Outcome:
    """Plant a fault and compare, and hold what is said against what is true.

    In bfloat16 a fault need not be recognised: it may be small beside the rounding.
    """
    group = "named" if kind in KINDS else "unnamed"
    outcome = attempt(Spec(family, group, kind, 0, dtype, device))
    assert not outcome.error, outcome.error
    if outcome.drifted:
        assert outcome.first_site == outcome.site, outcome.detail
        assert outcome.module in outcome.paths, outcome.detail
        hints, expected = set(outcome.hints), hints_of(family, kind)
        assert hints <= expected, outcome.detail
        assert hints == expected or dtype == "bfloat16", outcome.detail
    return outcome


def assert_blamed_rightly(spec: Spec) -> None:
    """Hold that a fault in a port is found, and that no correct module is blamed.

    The module may be larger than need be.
    """
    outcome = attempt(spec)
    assert not outcome.error, outcome.error
    assert outcome.effective and outcome.drifted
    assert outcome.site_exact, f"{outcome.first_site} and not {outcome.site}"
    named = f"{outcome.module} and not {outcome.paths}"
    assert outcome.blame in ("right", "larger"), named
    assert not outcome.false_claim, f"it is not in the code of {outcome.module}"
    assert outcome.false_hints == ()


def plain_llama() -> Any:
    """Return the port of the examples, as a module."""
    path = ROOT / "examples" / "plain_llama.py"
    spec = importlib.util.spec_from_file_location("plain_llama", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""Laws of anatomy, on tiny real models: what is proved is so, and what is not so is
refused.
"""

import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.discovery import Anatomy, Tap, arguments, find, vocabulary, window
from hiddenscope.errors import AnatomyError, SiteError
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.sites import Site
from hiddenscope.testing import (
    build,
    identity_block,
    misreport,
    nan_weight,
    tiny_model,
)
from tests.places import TESTS

TEXTS, TOKENS, TARGETS = 2, 7, 4
TEXT = [7, 99, 23, 64, 31]
IDS = torch.arange(20, 20 + TEXTS * TOKENS).reshape(TEXTS, TOKENS)


def watched(module: nn.Module, anatomy: Anatomy) -> tuple[Any, dict[str, Tensor]]:
    """Return what a module gives back for IDS, and the state at every site, read with
    plain hooks.
    """
    counts: Counter[Site] = Counter()
    states: dict[str, Tensor] = {}
    handles = []
    two = len(anatomy.stacks) > 1
    for site, tap in anatomy.taps.items():
        tokens = TARGETS if site.stack == "decoder" else TOKENS

        def note(
            *seen: Any, site: Site = site, tap: Tap = tap, tokens: int = tokens
        ) -> None:
            tensor = tap.read(*seen)
            if counts[site] == tap.call and tensor is not None:
                states[str(site)] = tap.layout.states(tensor, tokens).clone()
            counts[site] += 1

        part = module.get_submodule(tap.path)
        if tap.side == "input":
            hook = part.register_forward_pre_hook(
                lambda _, args, kwargs, n=note: n(args, kwargs), with_kwargs=True
            )
        else:
            hook = part.register_forward_hook(lambda _, args, output, n=note: n(output))
        handles.append(hook)
    inputs = arguments(module, IDS, targets=IDS[:, :TARGETS] if two else None)
    with torch.no_grad():
        output = module(**inputs, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    return output, states


same = torch.equal


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 16 * torch.finfo(a.dtype).eps * b.abs().max())


class Proved(NamedTuple):
    """A module that no test may change, and what was found and seen in it."""

    module: Any
    anatomy: Anatomy
    output: Any
    states: dict[str, Tensor]


@cache
def proved(family: str, dtype: torch.dtype = torch.float32) -> Proved:
    module = tiny_model(family).to(dtype)
    anatomy = find(module)
    return Proved(module, anatomy, *watched(module, anatomy))


WITH_FINAL = [
    *("gpt2", "llama", "gemma3_text", "opt", "gpt_neox"),
    *("gptj", "falcon", "mixtral", "bloom", "qwen3"),
]
WITHOUT_FINAL = [
    *("bert", "roberta", "distilbert", "albert"),
    *("longformer", "xlnet", "xlm", "squeezebert"),
]
IN_FLOAT32 = [(family, torch.float32) for family in (*WITH_FINAL, *WITHOUT_FINAL)]
IN_BFLOAT16 = [(family, torch.bfloat16) for family in ("gpt2", "llama", "bert")]


@pytest.mark.parametrize(("family", "dtype"), [*IN_FLOAT32, *IN_BFLOAT16])
def test_layers_are_hidden_states_and_the_last_entry_is_final(
    family: str, dtype: torch.dtype
) -> None:
    _, anatomy, output, states = proved(family, dtype)
    entries, depth = output.hidden_states, anatomy.stacks[0].depth
    assert depth == 3
    assert len(entries) == 4
    assert anatomy.stacks[0].proof.dtype == dtype
    assert all(same(states[f"layer.{k}"], entries[k]) for k in range(depth))
    if family in WITH_FINAL:
        assert same(states["final"], entries[-1])
        assert not same(states["layer.3"], entries[-1])
    else:
        assert "final" not in states
        assert same(states["layer.3"], entries[-1])


@pytest.mark.parametrize(
    "family", ["gpt2", "bert", "falcon", pytest.param("bart", marks=pytest.mark.slow)]
)
def test_coarse_numbers_show_the_same_places_and_the_same_causality(
    family: str,
) -> None:
    fine, coarse = proved(family).anatomy, proved(family, torch.bfloat16).anatomy
    assert coarse.taps == fine.taps
    for ours, theirs in zip(coarse.stacks, fine.stacks, strict=True):
        assert (ours.causal, ours.kind) == (theirs.causal, theirs.kind)


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_a_stack_of_any_depth_is_proved(family: str) -> None:
    for layers in (1, 2, 5):
        stacks = find(tiny_model(family, layers=layers)).stacks
        assert {stack.depth for stack in stacks} == {layers}


@pytest.mark.parametrize(("family", "end"), [("t5", "final"), ("bart", "layer.3")])
def test_an_encoder_decoder_has_two_stacks(family: str, end: str) -> None:
    _, anatomy, output, states = proved(family)
    stacks = [(stack.name, stack.causal) for stack in anatomy.stacks]
    assert stacks == [("encoder", False), ("decoder", True)]
    for stack in ("encoder", "decoder"):
        entries = output[f"{stack}_hidden_states"]
        assert all(same(states[f"{stack}.layer.{k}"], entries[k]) for k in range(3))
        assert same(states[f"{stack}.{end}"], entries[3])
    assert same(states[f"encoder.{end}"], output.encoder_last_hidden_state)
    assert "decoder.layer.1.cross" in states
    assert "encoder.layer.1.cross" not in states


def test_a_module_that_is_entered_again_is_keyed_by_call() -> None:
    taps = proved("albert").anatomy.taps
    inner = {taps[Site(k)].path for k in (1, 2, 3)}
    assert len(inner) == 1
    assert [taps[Site(k)].call for k in (1, 2, 3)] == [0, 1, 2]
    assert str(taps[Site(2)]).endswith("(call 2)")


def test_blocks_that_are_no_modules_are_found_by_landmarks() -> None:
    taps = proved("xlm").anatomy.taps
    assert taps[Site(1)].path == "transformer.layer_norm2.0"
    assert taps[Site(3)].path == "transformer.layer_norm2.2"
    taps = proved("squeezebert").anatomy.taps
    assert taps[Site(2)].path.endswith("encoder.layers.1.output")
    assert (taps[Site(2)].layout.text, taps[Site(2)].layout.token) == (0, 2)
    assert proved("xlnet").anatomy.taps[Site(1)].layout.token == 0


def test_canine_takes_every_character_however_few_its_buckets() -> None:
    """In 10 buckets, 31 and 61 count characters on as a table of ids would."""
    row = conformance_rows()["CanineModel"]
    module = build({**row, "config": {**row["config"], "num_hash_buckets": 10}})
    assert vocabulary(module) == sys.maxunicode + 1
    states = hs.load((module, None)).capture([[104, 97, 12000, 104, 97]])
    assert len(states.tokens) == 5


class DividesByNothing(nn.Module):
    """Gives a NaN at the last token of texts that are longer than any first trial."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inside(x)
        if x.shape[1] > TOKENS:
            output[:, -1] = float("nan")
        return output


def test_rows_that_are_0_by_0_are_refused_in_words() -> None:
    module: Any = tiny_model("llama")
    module.model.layers[0].mlp = DividesByNothing(module.model.layers[0].mlp)
    block = find(module).inside.stacks[0][0]
    assert block.mlp_input is None
    assert block.no_input.startswith("no state that its modules take in")


def test_streams_lie_side_by_side_and_final_is_one_of_them_wide() -> None:
    _, anatomy, output, states = proved("deepseek_v4")
    assert anatomy.width(Site(1)) == 4 * anatomy.width(Site(None)) == 256
    assert same(states["layer.1"], output.hidden_states[1].flatten(2))
    assert same(states["final"], output.hidden_states[-1])


@cache
def conformance_rows() -> dict[str, dict[str, Any]]:
    with gzip.open(TESTS / "conformance" / "tiny_configs.json.gz") as file:
        return {row["model_class"]: row for row in json.load(file)}


@pytest.mark.parametrize(
    ("streams", "shared"), [(1, 0), (2, 1), (3, 0), (5, 1), (7, 0)]
)
def test_gemma3n_is_proved_however_many_streams_it_has(
    streams: int, shared: int
) -> None:
    """As many streams as a trial pass has texts or tokens must not be mistaken for
    these.
    """
    row = conformance_rows()["Gemma3nForCausalLM"]
    changes = {"altup_num_inputs": streams, "num_kv_shared_layers": shared}
    module = build({**row, "config": {**row["config"], **changes}})
    anatomy = find(module)
    output, states = watched(module, anatomy)
    assert anatomy.width(Site(1)) == streams * anatomy.width(Site(None)) == streams * 64
    for k, entry in enumerate(output.hidden_states):
        assert same(states[f"layer.{k}"], entry.movedim(0, 2).flatten(2))
    assert same(states["final"], module.model(IDS).last_hidden_state)  # type: ignore[operator, union-attr]


def test_a_tuple_without_the_embeddings_is_read_for_what_it_is() -> None:
    _, anatomy, output, states = proved("mamba")
    names = [str(anatomy.select(f"hidden_states[{k}]")[0]) for k in range(4)]
    assert names == ["layer.1", "layer.2", "layer.3", "final"]
    for name, entry in zip(names, output.hidden_states, strict=True):
        assert same(states[name], entry)


PRE_NORM, PARALLEL = ("gpt2", "llama", "t5"), ("gptj", "gpt_neox", "falcon")


@pytest.mark.parametrize("family", [*PRE_NORM, *PARALLEL])
def test_parts_add_up(family: str) -> None:
    _, anatomy, _, states = proved(family)
    for stack in anatomy.stacks:
        prefix = f"{stack.name}." if len(anatomy.stacks) > 1 else ""
        assert stack.kind == ("parallel" if family in PARALLEL else "pre-norm")
        for k in (1, 2, 3):
            into, layer = states[f"{prefix}layer.{k - 1}"], f"{prefix}layer.{k}"
            attn, mlp = states[f"{layer}.attn"], states[f"{layer}.mlp"]
            if family in PARALLEL:
                assert same(states[f"{layer}.mid"], into)
                assert near(into + attn + mlp, states[layer])
                continue
            added = into + attn + states.get(f"{layer}.cross", torch.zeros(()))
            assert near(added, states[f"{layer}.mid"])
            assert near(states[f"{layer}.mid"] + mlp, states[layer])


def test_post_norm_parts_add_up_under_the_norms() -> None:
    module = tiny_model("bert", task="base")
    anatomy = find(module)
    _, states = watched(module, anatomy)
    assert anatomy.stacks[0].kind == "post-norm"
    for k in (1, 2, 3):
        block = module.get_submodule(f"encoder.layer.{k - 1}")
        mid = block.attention.output.LayerNorm(
            states[f"layer.{k - 1}"] + states[f"layer.{k}.attn"]
        )  # type: ignore
        assert near(mid, states[f"layer.{k}.mid"])
        out = block.output.LayerNorm(
            states[f"layer.{k}.mid"] + states[f"layer.{k}.mlp"]
        )  # type: ignore
        assert near(out, states[f"layer.{k}"])


@pytest.mark.parametrize(
    ("family", "why"), [("mamba", "one part only"), ("xlm", "no modules of their own")]
)
def test_refused_parts_say_why(family: str, why: str) -> None:
    anatomy = proved(family).anatomy
    for asked in ("layer.2.attn", "*.mlp", ["layer.0", "layer.1.mid"]):
        with pytest.raises(SiteError, match=why):
            anatomy.select(asked)
    absent = r"No site 'layer.2.cross' in GPT2LMHeadModel: it has layer.0 to layer.3"
    with pytest.raises(SiteError, match=absent):
        proved("gpt2").anatomy.select("layer.2.cross")


def test_a_block_whose_mlp_writes_nothing_is_not_called_parallel() -> None:
    module: Any = tiny_model("gpt2")
    silent = module.transformer.h[1].mlp.c_proj
    with torch.no_grad():
        silent.weight.zero_()
        silent.bias.zero_()
    anatomy = find(module)
    kinds = [block.kind for block in anatomy.stacks[0].blocks]
    assert kinds == ["pre-norm", "single", "pre-norm"]
    with pytest.raises(SiteError, match="one part only"):
        anatomy.select("layer.2.mid")


def test_attention_that_writes_to_two_channels_is_attention() -> None:
    module: Any = tiny_model("gpt2")
    with torch.no_grad():
        for block in module.transformer.h:
            block.attn.c_proj.weight[:, 2:] = 0
            block.attn.c_proj.bias.zero_()
    assert len(find(module).select("*.attn")) == 3


def test_attention_that_looks_away_from_one_change_is_attention() -> None:
    module: Any = tiny_model("gpt2")
    width = module.config.n_embd
    heads = module.config.n_head
    first = module.transformer.h[0]
    with torch.no_grad():
        # Keys grow with the first channel alone, and every query likes large ones.
        first.ln_1.weight.fill_(1.0)
        first.attn.c_attn.weight[:, : 2 * width] = 0
        first.attn.c_attn.bias[:] = 0
        first.attn.c_attn.bias[: width : width // heads] = 1e4
        first.attn.c_attn.weight[0, width : 2 * width : width // heads] = 1e4
    assert find(module).select("layer.1.attn")


def test_an_identity_block_is_no_proof() -> None:
    for block in (1, 2, 3):
        module = tiny_model("gpt2")
        path = identity_block(module, block)
        reason = rf"block {block} \({path}\) changes nothing"
        with pytest.raises(AnatomyError, match=reason):
            find(module)


States = tuple[Tensor, ...]
# What a module reports in the place of its states.
FAULTS: dict[str, Callable[[States], States]] = {
    "swapped": lambda states: (states[0], states[2], states[1], states[3]),
    "moved": lambda states: (*states[:2], states[2].roll(1, dims=1), states[3]),
    "nudged": lambda states: (*states[:3], states[3] * (1 + 2**-20)),
    "one missing": lambda states: states[:2] + states[3:],
    "one twice": lambda states: (states[0], *states),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_module_that_reports_other_states_is_refused(fault: str) -> None:
    families = ("gpt2", "bert", "t5") if fault in ("moved", "nudged") else ("gpt2",)
    for family in families:
        with pytest.raises(AnatomyError, match=r"hidden_states|last hidden state"):
            find(misreport(tiny_model(family), FAULTS[fault]))


class LooksUp(nn.Module):
    """A module that names no vocabulary: it looks up a row for each id."""

    def __init__(self, rows: int, row_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(rows, 4), nn.Embedding(64, 4)
        self.row_of = row_of

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1])[None]
        looked_up: Tensor = self.table(self.row_of(input_ids)) + self.positions(places)
        return looked_up


def test_a_vocabulary_that_nothing_names_is_what_is_looked_up() -> None:
    assert vocabulary(LooksUp(300, lambda ids: ids)) == 300
    assert vocabulary(LooksUp(300, lambda ids: ids + 2)) == 298
    assert vocabulary(LooksUp(16, lambda ids: ids * 31 % 16)) == sys.maxunicode + 1


def with_positions(family: str, positions: int) -> nn.Module:
    config = tiny_model(family, layers=2).config
    name = config.attribute_map.get(
        "max_position_embeddings", "max_position_embeddings"
    )
    row = {"config_class": type(config).__name__, "config": config.to_dict()}
    row["config"][name] = positions
    module = type(tiny_model(family)).__name__
    return build({**row, "model_class": module})


def test_a_part_of_the_configuration_limits_the_texts() -> None:
    rows = conformance_rows()
    assert window(build(rows["Gemma3ForConditionalGeneration"])) == 128
    row = rows["EncoderDecoderModel"]
    row["config"]["decoder"]["max_position_embeddings"] = 24
    composed = hs.load((build(row), None))
    assert composed.text_encoder.window == 128
    assert composed.text_encoder.target_window == 24
    # Thirty states fill two of the decoder's texts.
    logits = Unembedding(composed).logits_of(
        torch.randn(30, 64), Site(3, "", "decoder")
    )
    assert logits.shape == (30, 128)


@pytest.mark.parametrize("family", ["albert", "gpt2", "roberta", "bart"])
@pytest.mark.parametrize("positions", [8, 5, 3])
def test_a_proof_fits_into_few_positions(family: str, positions: int) -> None:
    # RoBERTa leaves the places up to its padding token's free.
    rows = positions + (family == "roberta")
    model = hs.load((with_positions(family, rows), None))
    assert model.text_encoder.window == positions
    whole = model.anatomy.look_inside().stacks[0][0]
    assert not whole.branches["attn"].refused
    ids = [list(range(20, 20 + positions)), [30, 31]]
    together = model.capture(ids, "layer.*" if family != "bart" else "encoder.layer.*")
    alone = model.capture(ids[1:], [str(site) for site in together.sites])
    torch.testing.assert_close(together.of(1).values, alone.values)


@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("family", ["albert", "gpt2", "bart"])
def test_texts_too_short_for_a_proof_are_refused(family: str, positions: int) -> None:
    with pytest.raises(AnatomyError, match=f"at most {positions} tokens"):
        hs.load((with_positions(family, positions), None))


# The blocks, how many entries are states of others, and which layer the next one is.
LAST_LISTS = {
    "canine": ("final_char_encoder.layer", 6, 0),
    "funnel": ("funnel.decoder.layers", 5, 0),
    "hrm_text": ("model.H_module.layers", 16, 1),
}


@pytest.mark.parametrize("family", LAST_LISTS)
def test_where_lists_of_blocks_make_no_chain_the_stack_is_the_last_list(
    family: str,
) -> None:
    blocks, before, first = LAST_LISTS[family]
    _, anatomy, output, states = proved(family)
    (stack,) = anatomy.stacks
    paths = [block.path for block in stack.blocks]
    assert paths == [f"{blocks}.{k}" for k in range(stack.depth)]
    end = "final" if "final" in states else f"layer.{stack.depth}"
    ours = [*(f"layer.{k}" for k in range(first, stack.depth)), end]
    entries = output.hidden_states
    assert stack.proof.earlier == before
    for site, entry in zip(ours, entries[before:], strict=True):
        assert same(states[site], entry)
    assert anatomy.reported(stack) == (None,) * before + tuple(map(Site.parse, ours))
    assert stack.kind in ("pre-norm", "post-norm")


def test_entries_of_other_blocks_have_no_site_and_it_is_said() -> None:
    model = hs.load((tiny_model("funnel"), None))
    states = model.capture([[7, 99, 23, 64, 31]], "hidden_states[6]")
    assert [str(site) for site in states.sites] == ["layer.1"]
    with pytest.raises(SiteError, match=r"hidden_states\[4\]"):
        model.capture([[7, 99, 23, 64, 31]], "hidden_states[4]")
    (note,) = model.notes
    assert "funnel.decoder.layers" in note
    assert "hidden_states[0] to hidden_states[4]" in note
    result = hs.anatomy(model)
    assert note in result.facts["notes"]
    assert "the last 4 entries of hidden_states" in result.summary()
    (facts,) = result.facts["stacks"]
    assert (facts["proved_entries"], facts["earlier_entries"]) == (4, 5)
    entries = result.data["entry"].values.tolist()
    assert entries == [f"hidden_states[{k}]" for k in (5, 6, 7, 8)]


def test_part_of_a_list_of_blocks_is_no_stack() -> None:
    module: Any = tiny_model("llama")
    module.model.layers[1].register_forward_pre_hook(
        lambda _, args: (args[0] + 1, *args[1:])
    )
    reason = "model.layers.1 takes in something else than model.layers.0 gives out"
    with pytest.raises(AnatomyError, match=reason):
        find(module)


REFUSED = {
    "BltModel": r"local_decoder\.layers\.1 takes in something else than local_decoder",
    "PerceiverForMaskedLM": (
        r"\[2, 8, 32\] for 2 texts of 7 tokens, so that its rows are not those of the"
        r" tokens"
    ),
    "ReformerModel": (
        r"two streams: encoder.layer_norm makes its last hidden state from layer.3"
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_told_the_very_reason(name: str) -> None:
    with pytest.raises(AnatomyError, match=REFUSED[name]):
        find(build(conformance_rows()[name]))


def test_nan_is_a_value_like_another_and_the_places_are_still_proved() -> None:
    module = tiny_model("llama")
    nan_weight(module, block=3)
    assert find(module).taps.keys() <= proved("llama").anatomy.taps.keys()


def test_every_claim_of_the_head_is_measured() -> None:
    claims = {
        "gpt2": (True, True, True),
        "llama": (True, True, False),
        "bert": (False, True, True),
        "t5": (False, True, True),
    }
    for family, claimed in claims.items():
        head = proved(family).anatomy.head
        assert head is not None
        assert (head.reads_final, head.gives_logits, head.tied) == claimed, family
    assert find(tiny_model("gpt2", task="base")).head is None


def test_the_analysis_shows_the_proof() -> None:
    result = hs.anatomy(hs.load((tiny_model("gpt2"), None)))
    assert result.kind == "anatomy"
    sites = result.data["site"].values.tolist()
    assert sites == ["layer.0", "layer.1", "layer.2", "layer.3", "final"]
    differences = result.data["difference"].values.tolist()
    assert differences[:3] == [0, 0, 0]
    assert differences[3] > 0
    assert differences[4] == 0
    assert result.data["entry"].values.tolist()[-2:] == ["hidden_states[3]"] * 2
    assert result.data["module"].values.tolist()[1] == "output of transformer.h.0"
    assert "pre-norm" in result.summary()
    assert "transformer.ln_f" in result.summary()


def test_the_analysis_of_two_stacks_and_of_an_unusual_tuple() -> None:
    two = hs.anatomy(hs.load((tiny_model("t5"), None))).data
    sites, entries = two["site"].values.tolist(), two["entry"].values.tolist()
    assert sites[3:6] == ["encoder.layer.3", "encoder.final", "decoder.layer.0"]
    assert entries[4:6] == ["encoder_hidden_states[3]", "decoder_hidden_states[0]"]
    mamba = hs.anatomy(hs.load((tiny_model("mamba"), None))).data.sel(site="layer.0")
    assert mamba["entry"].item() == ""
    assert mamba["difference"].isnull().item()


def test_a_norm_that_changes_little_is_no_sum() -> None:
    """In bfloat16 it may pass for the middle of the block, which is less far off."""
    module: Any = tiny_model("llama")
    with torch.no_grad():
        table = module.model.embed_tokens.weight
        table /= table.square().mean(-1, keepdim=True).sqrt()
        for name, weight in module.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(1)
            elif "o_proj" in name or "down_proj" in name:
                weight *= 0.1
    for number, block in enumerate(find(module.to(torch.bfloat16)).stacks[0].blocks):
        path = f"model.layers.{number}"
        middle = f"input of {path}.post_attention_layernorm"
        assert {name: str(tap) for name, tap in block.parts.items()} == {
            "attn": f"output of {path}.self_attn",
            "mid": middle,
            "mlp": f"output of {path}.mlp",
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_branches_may_be_added_times_a_number(dtype: torch.dtype) -> None:
    """What they add is what their modules give, times what Granite multiplies it by."""
    module: Any = tiny_model("granite").to(dtype)
    model = hs.load((module, None))
    states: Any = hs.record(
        model, [TEXT], "layer.*,layer.*.*,layer.*.attn.head.*"
    ).states
    given = []
    handle = module.model.layers[1].mlp.register_forward_hook(
        lambda part, args, output: given.append(output[0].detach())
    )
    module(torch.tensor([TEXT]))
    handle.remove()
    assert torch.equal(states["layer.2.mlp"], given[0] * 0.22)
    for layer in (1, 2, 3):
        attn = states[f"layer.{layer}.attn"]
        mid = states[f"layer.{layer}.mid"]
        assert torch.equal(states[f"layer.{layer - 1}"] + attn, mid)
        assert torch.equal(mid + states[f"layer.{layer}.mlp"], states[f"layer.{layer}"])
        heads = [states[f"layer.{layer}.attn.head.{head}"] for head in range(4)]
        near = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(sum(heads), attn, rtol=near, atol=near)


@pytest.mark.parametrize("part", ["attn", "mid", "mlp", "attn.head.1", "mlp.neuron.7"])
def test_a_scaled_branch_is_changed_as_it_is_read(part: str) -> None:
    model = hs.load((tiny_model("granite").double(), None))
    site = f"layer.2.{part}"
    sites = f"layer.2,layer.2.*,{site}"
    plain: Any = hs.record(model, [TEXT], sites, logits=True)
    same = hs.edit(
        model, [TEXT], {site: hs.Replace(plain.states[site])}, (), logits=True
    )
    assert torch.equal(same.logits, plain.logits)
    step = torch.linspace(-1, 1, 64).double()
    # What a head or a neuron adds is a part of what its branch adds.
    branch = f"layer.2.{part.partition('.')[0]}"
    added: Any = hs.edit(model, [TEXT], {site: hs.Add(step)}, f"layer.2,{branch}")
    torch.testing.assert_close(added.states[branch], plain.states[branch] + step)
    if "mlp" in part:
        expected = plain.states["layer.2"] + step
        torch.testing.assert_close(added.states["layer.2"], expected)


def test_no_pass_keeps_a_cache_where_its_use_is_only_handed_on() -> None:
    class HandsOn(nn.Module):
        def forward(
            self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
        ) -> Tensor:
            return input_ids

    assert arguments(HandsOn(), IDS)["use_cache"] is False

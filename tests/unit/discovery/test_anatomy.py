"""Laws of anatomy, on tiny real models: what is proved is so, and what is not so is
refused.
"""

import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CanineConfig, CanineModel, CanineTokenizer

import hiddenscope as hs
from hiddenscope.discovery import Anatomy, Tap, arguments, find, vocabulary
from hiddenscope.errors import AnatomyError, SiteError
from hiddenscope.sites import Site
from hiddenscope.testing import (
    build,
    identity_block,
    misreport,
    nan_weight,
    tiny_model,
    tiny_tokenizer,
)
from tests.places import TESTS
from tests.slices import sliced

TEXTS, TOKENS, TARGETS = 2, 7, 4
IDS = torch.arange(20, 20 + TEXTS * TOKENS).reshape(TEXTS, TOKENS)

# torch says so once, on a processor without bfloat16 of its own.


def watched(module: nn.Module, anatomy: Anatomy) -> tuple[Any, dict[str, Tensor]]:
    """What a module gives back for IDS, and the state at every site, read with plain
    hooks.
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


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b)


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 16 * torch.finfo(a.dtype).eps * b.abs().max())


WITH_FINAL = [
    "gpt2",
    "llama",
    "gemma3_text",
    "opt",
    "gpt_neox",
    "gptj",
    "falcon",
    "mixtral",
    "bloom",
    "qwen3",
]
WITHOUT_FINAL = [
    "bert",
    "roberta",
    "distilbert",
    "albert",
    "longformer",
    "xlnet",
    "xlm",
    "squeezebert",
]


IN_FLOAT32 = [(family, torch.float32) for family in (*WITH_FINAL, *WITHOUT_FINAL)]
IN_BFLOAT16 = [(family, torch.bfloat16) for family in ("gpt2", "llama", "bert")]


@pytest.mark.parametrize(("family", "dtype"), [*IN_FLOAT32, *IN_BFLOAT16])
def test_layers_are_hidden_states_and_the_last_entry_is_final(
    family: str, dtype: torch.dtype
) -> None:
    module = tiny_model(family).to(dtype)
    anatomy = find(module)
    output, states = watched(module, anatomy)
    entries, depth = output.hidden_states, anatomy.stacks[0].depth
    assert depth == 3 and len(entries) == 4
    assert anatomy.stacks[0].proof.dtype == dtype
    assert all(same(states[f"layer.{k}"], entries[k]) for k in range(depth))
    if family in WITH_FINAL:
        assert same(states["final"], entries[-1])
        assert not same(states["layer.3"], entries[-1])
    else:
        assert "final" not in states
        assert same(states["layer.3"], entries[-1])


@pytest.mark.parametrize(
    "family", sliced(["gpt2", "mixtral", "falcon", "bert", "cpmant", "bart"], 3)
)
def test_coarse_numbers_show_the_same_places_and_the_same_causality(
    family: str,
) -> None:
    fine, coarse = find(tiny_model(family)), find(tiny_model(family).to(torch.bfloat16))
    assert coarse.taps == fine.taps
    assert [stack.causal for stack in coarse.stacks] == [
        stack.causal for stack in fine.stacks
    ]
    assert [stack.kind for stack in coarse.stacks] == [
        stack.kind for stack in fine.stacks
    ]


@pytest.mark.parametrize("layers", [1, 2, 6])
@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_a_stack_of_any_depth_is_proved(family: str, layers: int) -> None:
    assert {
        stack.depth for stack in find(tiny_model(family, layers=layers)).stacks
    } == {layers}


@pytest.mark.parametrize(("family", "final"), [("t5", True), ("bart", False)])
def test_an_encoder_decoder_has_two_stacks(family: str, final: bool) -> None:
    module = tiny_model(family)
    anatomy = find(module)
    output, states = watched(module, anatomy)
    assert [(stack.name, stack.causal) for stack in anatomy.stacks] == [
        ("encoder", False),
        ("decoder", True),
    ]
    for stack in ("encoder", "decoder"):
        entries = output[f"{stack}_hidden_states"]
        assert all(same(states[f"{stack}.layer.{k}"], entries[k]) for k in range(3))
        assert same(
            states[f"{stack}.final" if final else f"{stack}.layer.3"], entries[3]
        )
    assert same(
        states["encoder.final" if final else "encoder.layer.3"],
        output.encoder_last_hidden_state,
    )
    assert "decoder.layer.1.cross" in states and "encoder.layer.1.cross" not in states


def test_a_module_that_is_entered_again_is_keyed_by_call() -> None:
    taps = find(tiny_model("albert")).taps
    inner = {taps[Site(k)].path for k in (1, 2, 3)}
    assert len(inner) == 1
    assert [taps[Site(k)].call for k in (1, 2, 3)] == [0, 1, 2]
    assert str(taps[Site(2)]).endswith("(call 2)")


def test_blocks_that_are_no_modules_are_found_by_landmarks() -> None:
    assert [find(tiny_model("xlm")).taps[Site(k)].path for k in (1, 3)] == [
        "transformer.layer_norm2.0",
        "transformer.layer_norm2.2",
    ]
    taps = find(tiny_model("squeezebert")).taps
    assert taps[Site(2)].path.endswith("encoder.layers.1.output")
    assert (taps[Site(2)].layout.text, taps[Site(2)].layout.token) == (0, 2)


def test_streams_lie_side_by_side_and_final_is_one_of_them_wide() -> None:
    module = tiny_model("deepseek_v4")
    anatomy = find(module)
    output, states = watched(module, anatomy)
    assert anatomy.width(Site(1)) == 4 * anatomy.width(Site(None)) == 256
    assert same(states["layer.1"], output.hidden_states[1].flatten(2))
    assert same(states["final"], output.hidden_states[-1])


def conformance_row(name: str) -> dict[str, Any]:
    with gzip.open(TESTS / "conformance" / "tiny_configs.json.gz") as file:
        row: dict[str, Any] = next(
            row for row in json.load(file) if row["model_class"] == name
        )
    return row


@pytest.mark.parametrize("streams", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("shared", [0, 1])
def test_gemma3n_is_proved_however_many_streams_it_has(
    streams: int, shared: int
) -> None:
    """As many streams as a trial pass has texts or tokens must not be mistaken for
    these.
    """
    row = conformance_row("Gemma3nForCausalLM")
    module = build(
        {
            **row,
            "config": {
                **row["config"],
                "altup_num_inputs": streams,
                "num_kv_shared_layers": shared,
            },
        }
    )
    anatomy = find(module)
    output, states = watched(module, anatomy)
    assert anatomy.width(Site(1)) == streams * anatomy.width(Site(None)) == streams * 64
    for k, entry in enumerate(output.hidden_states):
        assert same(states[f"layer.{k}"], entry.movedim(0, 2).flatten(2))
    assert same(states["final"], module.model(IDS).last_hidden_state)  # type: ignore[operator, union-attr]


def test_gemma3n_that_sees_and_hears_is_proved_on_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import Gemma3nConfig, Gemma3nForConditionalGeneration
    from transformers.models.gemma3n import modeling_gemma3n

    text = {**conformance_row("Gemma3nForCausalLM")["config"], "altup_num_inputs": 2}
    audio = {
        "hidden_size": 32,
        "conf_num_attention_heads": 4,
        "conf_num_hidden_layers": 2,
        "vocab_size": 8,
    }
    audio |= {"sscp_conv_channel_size": (16, 8), "vocab_offset": 120}
    vision = {"hidden_size": 32, "vocab_size": 8, "vocab_offset": 112}
    from_config = modeling_gemma3n.AutoModel.from_config

    # Its tower is timm's, which is not installed.
    def without_vision(config: Any, **options: Any) -> Any:
        return (
            nn.Linear(2, 2)
            if "Vision" in type(config).__name__
            else from_config(config=config, **options)
        )

    monkeypatch.setattr(
        modeling_gemma3n.AutoModel, "from_config", staticmethod(without_vision)
    )
    config = Gemma3nConfig(text_config=text, audio_config=audio, vision_config=vision)
    module = Gemma3nForConditionalGeneration(config).eval()
    anatomy = find(module)
    output, states = watched(module, anatomy)
    assert anatomy.stacks[0].causal and anatomy.stacks[0].depth == 3
    assert all(
        same(states[f"layer.{k}"], e.movedim(0, 2).flatten(2))
        for k, e in enumerate(output.hidden_states)
    )


def test_a_transposed_stack_and_a_filled_up_one_give_a_row_for_each_token() -> None:
    xlnet, longformer = find(tiny_model("xlnet")), find(tiny_model("longformer"))
    assert xlnet.taps[Site(1)].layout.token == 0
    for family, anatomy in (("xlnet", xlnet), ("longformer", longformer)):
        _, states = watched(tiny_model(family), anatomy)
        assert states["layer.2"].shape == (TEXTS, TOKENS, 64)


def test_a_tuple_without_the_embeddings_is_read_for_what_it_is() -> None:
    module = tiny_model("mamba")
    anatomy = find(module)
    output, states = watched(module, anatomy)
    names = [str(anatomy.select(f"hidden_states[{k}]")[0]) for k in range(4)]
    assert names == ["layer.1", "layer.2", "layer.3", "final"]
    assert all(
        same(states[name], entry)
        for name, entry in zip(names, output.hidden_states, strict=True)
    )


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_pre_norm_parts_add_up(family: str) -> None:
    module = tiny_model(family)
    anatomy = find(module)
    _, states = watched(module, anatomy)
    for stack in anatomy.stacks:
        prefix = f"{stack.name}." if len(anatomy.stacks) > 1 else ""
        assert stack.kind == "pre-norm"
        for k in (1, 2, 3):
            layer = f"{prefix}layer.{k}"
            added = states[f"{prefix}layer.{k - 1}"] + states[f"{layer}.attn"]
            added = (
                added + states[f"{layer}.cross"]
                if f"{layer}.cross" in states
                else added
            )
            assert near(added, states[f"{layer}.mid"])
            assert near(states[f"{layer}.mid"] + states[f"{layer}.mlp"], states[layer])


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


@pytest.mark.parametrize("family", ["gptj", "gpt_neox", "falcon"])
def test_parallel_parts_add_up_at_once(family: str) -> None:
    module = tiny_model(family)
    anatomy = find(module)
    _, states = watched(module, anatomy)
    assert anatomy.stacks[0].kind == "parallel"
    for k in (1, 2, 3):
        into, attn, mlp = (
            states[f"layer.{k - 1}"],
            states[f"layer.{k}.attn"],
            states[f"layer.{k}.mlp"],
        )
        assert near(into + attn + mlp, states[f"layer.{k}"])
        assert same(states[f"layer.{k}.mid"], into)


@pytest.mark.parametrize(
    ("family", "why"), [("mamba", "one part only"), ("xlm", "no modules of their own")]
)
def test_refused_parts_say_why(family: str, why: str) -> None:
    anatomy = find(tiny_model(family))
    for asked in ("layer.2.attn", "*.mlp", ["layer.0", "layer.1.mid"]):
        with pytest.raises(SiteError, match=why):
            anatomy.select(asked)
    with pytest.raises(
        SiteError,
        match=r"No site 'layer.2.cross' in GPT2LMHeadModel: it has layer.0 to layer.3",
    ):
        find(tiny_model("gpt2")).select("layer.2.cross")


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
    anatomy = find(module)
    assert [str(site) for site in anatomy.select("*.attn")] == [
        "layer.1.attn",
        "layer.2.attn",
        "layer.3.attn",
    ]


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


@pytest.mark.parametrize("block", [1, 2, 3])
def test_an_identity_block_is_no_proof(block: int) -> None:
    module = tiny_model("gpt2")
    path = identity_block(module, block)
    with pytest.raises(
        AnatomyError, match=rf"block {block} \({path}\) changes nothing"
    ):
        find(module)


def swapped(states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return states[0], states[2], states[1], states[3]


def moved(states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (*states[:2], states[2].roll(1, dims=1), states[3])


def nudged(states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (*states[:3], states[3] * (1 + 2**-20))


FAULTS: list[Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]] = [
    swapped,
    moved,
    nudged,
    lambda states: states[:2] + states[3:],
    lambda states: (states[0], *states),
]


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
@pytest.mark.parametrize(
    "fault", FAULTS, ids=["swapped", "moved", "nudged", "one missing", "one twice"]
)
def test_a_module_that_reports_other_states_is_refused(
    family: str, fault: Callable[..., Any]
) -> None:
    with pytest.raises(AnatomyError, match=r"hidden_states|last hidden state"):
        find(misreport(tiny_model(family), fault))


def test_a_module_without_a_report_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = (
                nn.Embedding(256, 8),
                nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]),
            )

        def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
            state: Tensor = self.embed(input_ids)
            for block in self.blocks:
                state = block(state)
            return state

    with pytest.raises(AnatomyError, match="no hidden_states"):
        find(Bare())


# How many entries are states of other blocks, and which layer the next one is.
LAST_LISTS = {
    "canine": ("final_char_encoder.layer", 6, 0),
    "funnel": ("funnel.decoder.layers", 5, 0),
    "hrm_text": ("model.H_module.layers", 16, 1),
}


@pytest.mark.parametrize("family", LAST_LISTS)
class OfOneArgument(nn.Module):
    """A module of a user's own, which takes its ids under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embedding(tokens)
        return embedded


class WithoutReport(OfOneArgument):
    """A module that takes input_ids, and not the wish for hidden states."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids)


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (
            OfOneArgument,
            "its forward takes tokens, and no input_ids or output_hidden_states",
        ),
        (WithoutReport, "its forward takes input_ids, and no output_hidden_states"),
    ],
)
def test_a_module_of_another_signature_is_told_what_is_wanted(
    own: type[nn.Module], reason: str
) -> None:
    module = own().eval()
    for ask in (
        lambda: hs.load(module, tiny_tokenizer()),
        lambda: hs.drift(module, tiny_model("gpt2"), [[5, 6]]),
    ):
        with pytest.raises(AnatomyError, match=reason) as caught:
            ask()
        assert "hs.drift(reference, module, texts)" in str(caught.value)


class LooksUp(nn.Module):
    """A module that names no vocabulary; its rows begin behind `free` others."""

    def __init__(self, rows: int, free: int = 0, buckets: int | None = None) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(rows, 4), nn.Embedding(64, 4)
        self.free, self.buckets = free, buckets

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows = (
            input_ids + self.free
            if self.buckets is None
            else input_ids * 31 % self.buckets
        )
        places = torch.arange(input_ids.shape[1])[None]
        looked_up: torch.Tensor = self.table(rows) + self.positions(places)
        return looked_up


def test_a_vocabulary_that_nothing_names_is_what_is_looked_up() -> None:
    assert vocabulary(LooksUp(300)) == 300
    assert vocabulary(LooksUp(300, free=2)) == 298
    assert vocabulary(LooksUp(16, buckets=16)) == sys.maxunicode + 1


def test_canine_takes_what_its_own_tokenizer_gives() -> None:
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "num_hash_buckets": 64,
    }
    module = CanineModel(
        CanineConfig(**sizes, num_hidden_layers=2, local_transformer_stride=16)
    ).eval()
    text = "A text with characters of every kind: é, 中, 😀."
    states = hs.load(module, CanineTokenizer()).capture(text)
    ids = CanineTokenizer()(text, return_tensors="pt")
    with torch.no_grad():
        own = module(**ids, output_hidden_states=True).hidden_states
    assert states.tokens.ids.tolist() == ids["input_ids"][0].tolist()
    assert torch.equal(states["layer.1"], own[-1][0])


@pytest.mark.parametrize("family", LAST_LISTS)
def test_where_lists_of_blocks_make_no_chain_the_stack_is_the_last_list(
    family: str,
) -> None:
    module = tiny_model(family)
    blocks, before, first = LAST_LISTS[family]
    anatomy = find(module)
    (stack,) = anatomy.stacks
    assert [block.path for block in stack.blocks] == [
        f"{blocks}.{k}" for k in range(stack.depth)
    ]
    output, states = watched(module, anatomy)
    end = "final" if "final" in states else f"layer.{stack.depth}"
    ours = [*(f"layer.{k}" for k in range(first, stack.depth)), end]
    entries = output.hidden_states
    assert len(entries) == before + len(ours) and stack.proof.earlier == before
    assert all(
        same(states[site], entry)
        for site, entry in zip(ours, entries[before:], strict=True)
    )
    assert anatomy.reported(stack) == (None,) * before + tuple(map(Site.parse, ours))
    assert stack.kind in ("pre-norm", "post-norm")


def test_entries_of_other_blocks_have_no_site_and_it_is_said() -> None:
    model = hs.load((tiny_model("funnel"), None))
    states = model.capture([[7, 99, 23, 64, 31]], "hidden_states[6]")
    assert [str(site) for site in states.sites] == ["layer.1"]
    with pytest.raises(SiteError, match=r"hidden_states\[4\]"):
        model.capture([[7, 99, 23, 64, 31]], "hidden_states[4]")
    (note,) = model.notes
    assert (
        "funnel.decoder.layers" in note
        and "hidden_states[0] to hidden_states[4]" in note
    )
    result = hs.anatomy(model)
    assert (
        note in result.facts["notes"]
        and "the last 4 entries of hidden_states" in result.summary()
    )
    (facts,) = result.facts["stacks"]
    assert (facts["proved_entries"], facts["earlier_entries"]) == (4, 5)
    assert result.data["entry"].values.tolist() == [
        f"hidden_states[{k}]" for k in (5, 6, 7, 8)
    ]


def test_part_of_a_list_of_blocks_is_no_stack() -> None:
    module = tiny_model("llama")
    add = module.model.layers[1].register_forward_pre_hook(
        lambda _, args: (args[0] + 1, *args[1:])
    )  # type: ignore
    with pytest.raises(
        AnatomyError,
        match=r"model.layers.1 takes in something else than model.layers.0 gives out",
    ):
        find(module)
    add.remove()
    find(module)


REFUSED = {
    "BltModel": (
        r"local_decoder\.layers\.1 takes in something else than"
        r" local_decoder\.layers\.0 gives out"
    ),
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
        find(build(conformance_row(name)))


def test_nan_is_a_value_like_another_and_the_places_are_still_proved() -> None:
    module = tiny_model("llama")
    honest = find(module)
    nan_weight(module, block=3)
    assert find(module).taps.keys() <= honest.taps.keys()


def all_hooks(module: nn.Module) -> list[Any]:
    """Everything that hangs on a module: its hooks, Hugging Face's flag for its own,
    and replaced forwards.
    """
    kinds = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_forward_hooks_with_kwargs",
    )
    flag = "_output_capturing_hooks_installed"
    return [
        (
            path,
            *(list(getattr(part, kind)) for kind in kinds),
            vars(part).get(flag),
            "forward" in vars(part),
        )
        for path, part in module.named_modules()
    ]


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bert"])
def test_nothing_is_left_behind(family: str) -> None:
    module = tiny_model(family)
    before, weights = (
        all_hooks(module),
        [weight.clone() for weight in module.parameters()],
    )
    find(module)
    assert all_hooks(module) == before
    assert all(
        torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True)
    )


def test_hooks_of_somebody_else_stay() -> None:
    module, calls = tiny_model("llama"), []
    handle = module.model.layers[0].register_forward_hook(lambda *_: calls.append(1))  # type: ignore
    module(IDS, output_hidden_states=True)
    before = all_hooks(module)
    find(module)
    assert all_hooks(module) == before
    handle.remove()
    assert len(calls) > 1


@pytest.mark.parametrize(
    "error", [RuntimeError("torn"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
@pytest.mark.parametrize("pass_number", [1, 2, 3])
def test_nothing_is_left_behind_when_a_pass_stops_in_the_middle(
    error: BaseException, pass_number: int
) -> None:
    module, passes = tiny_model("llama"), []

    def tear(*_: Any) -> None:
        passes.append(1)
        if len(passes) == pass_number:
            raise error

    handle = module.model.layers[1].register_forward_hook(tear)  # type: ignore[union-attr, operator, index]
    before = all_hooks(module)
    with pytest.raises((AnatomyError, type(error))):
        find(module)
    assert all_hooks(module) == before
    handle.remove()


def test_every_claim_of_the_head_is_measured() -> None:
    heads = {
        family: find(tiny_model(family)).head
        for family in ("gpt2", "llama", "bert", "t5")
    }
    seen = {
        family: head and (head.reads_final, head.gives_logits, head.tied)
        for family, head in heads.items()
    }
    assert seen == {
        "gpt2": (True, True, True),
        "llama": (True, True, False),
        "bert": (False, True, True),
        "t5": (False, True, True),
    }
    assert find(tiny_model("gpt2", task="base")).head is None


def test_the_analysis_shows_the_proof() -> None:
    model = hs.load((tiny_model("gpt2"), None))
    result = hs.anatomy(model)
    assert result.kind == "anatomy"
    assert result.data["site"].values.tolist() == [
        "layer.0",
        "layer.1",
        "layer.2",
        "layer.3",
        "final",
    ]
    differences = result.data["difference"].values.tolist()
    assert differences[:3] == [0, 0, 0] and differences[3] > 0 and differences[4] == 0
    assert result.data["entry"].values.tolist()[-2:] == [
        "hidden_states[3]",
        "hidden_states[3]",
    ]
    assert result.data["module"].values.tolist()[1] == "output of transformer.h.0"
    assert "pre-norm" in result.summary() and "transformer.ln_f" in result.summary()


def test_the_analysis_of_two_stacks_and_of_an_unusual_tuple() -> None:
    two = hs.anatomy(hs.load((tiny_model("t5"), None))).data
    assert two["site"].values.tolist()[3:6] == [
        "encoder.layer.3",
        "encoder.final",
        "decoder.layer.0",
    ]
    assert two["entry"].values.tolist()[4:6] == [
        "encoder_hidden_states[3]",
        "decoder_hidden_states[0]",
    ]
    mamba = hs.anatomy(hs.load((tiny_model("mamba"), None))).data.sel(site="layer.0")
    assert mamba["entry"].item() == "" and mamba["difference"].isnull().item()


def test_the_table_of_families_and_the_conformance_data_agree() -> None:
    ours, theirs = tiny_model("gpt2"), build(conformance_row("GPT2LMHeadModel"))
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )

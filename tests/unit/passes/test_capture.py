"""Laws of a capture: what is captured is what Hugging Face reports, alone or in a
batch, and nothing more is run.
"""

import copy
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hiddenscope as hs
from hiddenscope.errors import (
    LoadError,
    ModuleError,
    PassError,
    SiteError,
    TextError,
)
from hiddenscope.model.batching import states_disagreement
from hiddenscope.passes.inputs import compose
from hiddenscope.states import Pair, States
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.configs import configured
from tests.slices import with_slow

Tiny = Callable[..., hs.Model]

ONE_STACK = with_slow(
    ["llama", "gpt2", "bert", "gpt_neox", "mamba", "gemma3_text"],
    [
        "albert",
        "roberta",
        "opt",
        "mixtral",
        "qwen3",
        "bloom",
        "gptj",
        "falcon",
        "distilbert",
        "fnet",
        "longformer",
        "xlm",
        "squeezebert",
        "xlnet",
    ],
)
NO_FINAL = {
    "bert",
    "albert",
    "roberta",
    "distilbert",
    "fnet",
    "longformer",
    "xlm",
    "squeezebert",
    "xlnet",
}
# Padding changes what a text gives in these.
PAD_UNSAFE = with_slow(
    ["FNetForMaskedLM", "CpmAntForCausalLM"],
    ["ConvBertForMaskedLM", "MobileBertForMaskedLM", "YosoForMaskedLM"],
)
TEXT = [7, 99, 23, 64, 31, 8, 120, 45, 77]
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)
# Fixtures here are functions without a state, so that a test may be run again with
# other examples.
LAWFUL = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def texts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, 128, (length,), generator=generator).tolist()
        for length in lengths
    ]


def report(module: nn.Module, ids: Sequence[int], **more: Any) -> Any:
    """What Hugging Face says of one text; on a module of its own, for it leaves hooks
    of its own behind.
    """
    with torch.no_grad():
        return module(torch.tensor([list(ids)]), output_hidden_states=True, **more)


def parts(states: States | Pair) -> list[States]:
    return [states.encoder, states.decoder] if isinstance(states, Pair) else [states]


def same(a: States, b: States) -> bool:
    return a.sites == b.sites and torch.equal(a.values, b.values)


@pytest.mark.parametrize("family", ONE_STACK)
def test_each_state_is_hugging_faces_own_bit_for_bit(tiny: Tiny, family: str) -> None:
    states = tiny(family).capture([TEXT])
    entries = report(tiny_model(family), TEXT).hidden_states
    if family == "mamba":  # its tuple leaves the embeddings out
        entries = (states["layer.0"][None], *entries)
        assert torch.equal(states["layer.3"], entries[3][0]), (
            "and so the raw last layer is in it"
        )
    assert all(torch.equal(states[f"layer.{k}"], entries[k][0]) for k in range(3))
    assert torch.equal(
        states["layer.3" if family in NO_FINAL else "final"], entries[-1][0]
    )
    assert [str(site) for site in states.sites] == [f"layer.{k}" for k in range(4)] + [
        "final"
    ] * (family not in NO_FINAL)
    assert states.tokens.ids.tolist() == TEXT


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_each_state_of_two_stacks_is_hugging_faces_own(tiny: Tiny, family: str) -> None:
    pair = tiny(family).capture([TEXT], targets=[[5, 9, 11, 60]])
    output = report(
        tiny_model(family), TEXT, decoder_input_ids=torch.tensor([[5, 9, 11, 60]])
    )
    assert isinstance(pair, Pair)
    for stack in ("encoder", "decoder"):
        entries = output[f"{stack}_hidden_states"]
        assert all(
            torch.equal(pair[f"{stack}.layer.{k}"], entries[k][0]) for k in range(3)
        )
        assert torch.equal(
            pair[f"{stack}.final" if family == "t5" else f"{stack}.layer.3"],
            entries[3][0],
        )
    assert pair.decoder.tokens.ids.tolist() == [5, 9, 11, 60]


def test_targets_that_are_texts_follow_the_start_token(tiny: Tiny) -> None:
    model = tiny("bart")
    decoder = model.capture(["the cat"], targets=["a dog"]).decoder  # type: ignore[union-attr]
    assert decoder.tokens.ids.tolist() == [1, *model.tokenizer("a dog").input_ids]
    assert decoder.tokens.texts == ("a dog",)
    shown = [
        "a dog"[start:end] for start, end in decoder.tokens.spans.tolist() if start >= 0
    ]
    assert "".join(shown) == "a dog" and decoder.tokens.spans[0].tolist() == [-1, -1]
    as_tensor = model.capture(torch.tensor([TEXT]), targets=torch.tensor([[5, 6]]))  # type: ignore[arg-type]
    assert parts(as_tensor)[1].tokens.ids.tolist() == [5, 6]


@pytest.mark.parametrize("family", ["t5", "bart"])
@LAWFUL
@given(lengths=LENGTHS, budget=st.sampled_from([1, 40, 10_000]), seed=st.integers(0, 3))
def test_a_pair_in_a_batch_equals_the_pair_alone(
    tiny: Tiny, family: str, lengths: list[int], budget: int, seed: int
) -> None:
    model, texts, targets = (
        tiny(family),
        texts_of(lengths, seed),
        texts_of(lengths[::-1], seed + 9),
    )
    pair = model.capture(texts, targets=targets, batch_tokens=budget)
    assert [part.tokens.lengths.tolist() for part in parts(pair)] == [
        lengths,
        lengths[::-1],
    ]
    for number, text in enumerate(texts):
        alone = parts(model.capture([text], targets=[targets[number]]))
        assert all(
            states_disagreement(a, b.of(number)) <= 1
            for a, b in zip(alone, parts(pair), strict=True)
        )


@pytest.mark.filterwarnings(
    "ignore:Initializing zero-element tensors:UserWarning"
    # Torch, on building a MobileBERT.
)
@pytest.mark.parametrize("name", PAD_UNSAFE)
def test_a_model_that_padding_disturbs_is_run_text_by_text(name: str) -> None:
    model = hs.load((configured(name), None))
    assert (
        model.batching.padding_safe is False
        and "times the rounding tolerance" in model.batching.reason
    )
    texts = texts_of([9, 3, 17, 9])
    states = model.capture(texts, "layer.*", batch_tokens=10_000)
    for number, text in enumerate(texts):
        assert same(model.capture([text], "layer.*"), states.of(number))
    with pytest.raises(PassError, match="padded batch"):
        hs.record(model, texts, "layer.1")
    assert (
        hs.record(model, [texts[0], texts[3]], "layer.1").states.values.shape[1] == 18
    )


def test_a_text_that_is_too_short_for_the_model_is_named() -> None:
    model = hs.load((configured("CanineModel"), None))
    assert model.capture([[5, 6, 7, 8]]).tokens.count == 1  # type: ignore[union-attr]
    with pytest.raises(
        TextError, match="Text 1: it has 3 tokens and CanineModel takes no fewer than 4"
    ):
        model.capture([[5, 6, 7, 8], [5, 6, 7]])


def test_the_best_tokens_are_the_same_in_a_batch() -> None:
    """Doge keeps the best tokens of a long text; equal words have equal scores, and
    padding decides between them.
    """
    model = hs.load((configured("DogeForCausalLM", keep_window_size=8), None))
    # No text is that long.
    assert hs.load((configured("DogeForCausalLM"), None)).batching.padding_safe
    texts = [[20 + k % 5 for k in range(length)] for length in (12, 20, 40)]
    states = model.capture(texts, "layer.*")
    for number, text in enumerate(texts):
        assert (
            states_disagreement(model.capture([text], "layer.*"), states.of(number))
            <= 1
        )


def test_sparse_attention_is_what_it_was_however_short_a_text_came_before() -> None:
    """BigBird turns to full attention for good when it meets a short text."""
    sizes = {"block_size": 4, "num_random_blocks": 1}
    module, (long, middle, short) = (
        configured("BigBirdForMaskedLM", **sizes),
        texts_of([61, 40, 3]),
    )
    model = hs.load((module, None))
    states = model.capture([short, long, middle, short])
    assert (
        not model.batching.padding_safe and module.bert.attention_type == "block_sparse"
    )  # type: ignore[union-attr]
    for number, text in enumerate([short, long, middle]):
        entries = report(configured("BigBirdForMaskedLM", **sizes), text).hidden_states
        assert all(
            torch.equal(states.of(number)[f"layer.{k}"], entries[k][0, : len(text)])
            for k in range(4)
        )


def test_texts_on_both_sides_of_a_turn_of_positions_are_kept_apart() -> None:
    """LongRoPE scales the positions of every text of a batch when one of them is long."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    }
    rope["original_max_position_embeddings"] = 16
    model = hs.load(
        (
            configured(
                "Phi3ForCausalLM",
                rope_parameters=rope,
                original_max_position_embeddings=16,
            ),
            None,
        )
    )
    texts = texts_of([40, 5, 16, 17, 30, 1])
    states = model.capture(texts, batch_tokens=10_000)
    alone = [model.capture([text]) for text in texts]
    assert all(
        states_disagreement(one, states.of(number)) <= 1
        for number, one in enumerate(alone)
    )
    with pytest.raises(PassError, match="longer than 16 tokens"):
        hs.record(model, texts[:2])
    ids, mask = (
        torch.zeros(2, 40, dtype=torch.long),
        torch.zeros(2, 40, dtype=torch.long),
    )
    for row, text in enumerate(texts[:2]):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    with hs.recording(model) as recorded, torch.no_grad():
        model.module(ids, attention_mask=mask)
    mixed = recorded.states
    assert states_disagreement(alone[1], mixed.of(1)) > 100, "together they do differ"  # type: ignore[union-attr]


@given(
    lengths=st.lists(st.integers(1, 300), max_size=30),
    budget=st.integers(1, 2000),
    switch=st.integers(1, 300),
)
def test_a_plan_holds_each_text_once_within_its_budget(
    lengths: list[int], budget: int, switch: int
) -> None:
    for padded in (True, False):
        batches = compose(lengths, budget, padded=padded, rope_switch=switch)
        assert sorted(text for batch in batches for text in batch) == list(
            range(len(lengths))
        )
        for batch in batches:
            own = [lengths[text] for text in batch]
            assert len(own) == 1 or (padded and len(own) * max(own) <= budget)
            assert max(own) <= switch or min(own) > switch


def test_strings_are_captured_with_their_tokens_and_spans(tiny: Tiny) -> None:
    states = tiny("llama").capture(["the rest is here", "on"])
    assert states.tokens.texts == ("the rest is here", "on")
    assert "".join(states.of(0).tokens.strings[1:]) == "the rest is here"
    spans = states.of(0).tokens.spans.tolist()
    assert (
        spans[0] == [-1, -1]
        and "".join("the rest is here"[a:b] for a, b in spans[1:]) == "the rest is here"
    )


def test_a_dtype_that_is_asked_for_is_what_the_states_were_turned_into(
    tiny: Tiny,
) -> None:
    dtype = torch.float16
    plain, turned, named = (
        tiny("gpt2").capture([TEXT, TEXT[:4]], dtype=given)
        for given in (None, dtype, "float16")
    )
    assert same(turned, named)
    assert plain.values.dtype == torch.float32 and turned.values.dtype == dtype  # type: ignore[union-attr]
    assert torch.equal(turned.values, plain.values.to(dtype))  # type: ignore[union-attr]


@contextmanager
def counted(module: nn.Module, paths: Sequence[str]) -> Iterator[Counter[str]]:
    calls: Counter[str] = Counter()
    handles = [
        module.get_submodule(path).register_forward_pre_hook(
            lambda *_, path=path: calls.update([path])
        )
        for path in paths
    ]
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("grad", with_slow([False], [True]))
def test_nothing_is_run_beyond_the_deepest_site(tiny: Tiny, grad: bool) -> None:
    model = tiny("llama")
    blocks = [f"model.layers.{k}.input_layernorm" for k in range(3)]
    wanted = {
        "layer.0": 0,
        "layer.1": 1,
        "layer.2.mid": 2,
        "layer.2.attn": 2,
        "layer.1,layer.3": 3,
        "final": 3,
    }
    for sites, depth in wanted.items():
        with counted(
            model.module, [*blocks, "model.norm", "lm_head", "model.layers.1.mlp"]
        ) as calls:
            # With somebody's hooks on it, the model is tried anew.
            hs.record(model, [TEXT], sites, grad=grad)
            calls.clear()
            hs.record(model, [TEXT], sites, grad=grad)
        assert [calls[block] for block in blocks] == [1] * depth + [0] * (3 - depth), (
            sites
        )
        assert calls["lm_head"] == 0 and calls["model.norm"] == (sites == "final")
        assert calls["model.layers.1.mlp"] == (depth == 3), (
            "of a block only the part that is wanted"
        )
    with counted(model.module, ["lm_head"]) as calls:
        model.capture([TEXT, TEXT])
        calls.clear()
        model.capture([TEXT, TEXT])
        assert calls["lm_head"] == 0
        hs.record(model, [TEXT], "layer.1", logits=True, grad=grad)
    assert calls["lm_head"] == 1


def test_a_decoder_is_not_run_for_its_encoder(tiny: Tiny) -> None:
    model = tiny("t5")
    with counted(model.module, ["encoder.block.2", "decoder.block.0"]) as calls:
        # With somebody's hooks on it, the model is tried anew.
        model.capture([TEXT], "encoder.layer.*")
        calls.clear()
        states = model.capture([TEXT], "encoder.layer.*")
    assert isinstance(states, States) and calls == {"encoder.block.2": 1}


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "bert"])
def test_parts_of_blocks_add_up(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    states = model.capture(texts_of([9, 4]), "layer.*,*.attn,*.mid,*.mlp")
    for k in (1, 2, 3):
        into, attn, mid, mlp, out = (
            states[f"layer.{name}"]
            for name in (k - 1, f"{k}.attn", f"{k}.mid", f"{k}.mlp", k)
        )
        if family == "bert":
            block = model.module.bert.encoder.layer[k - 1]  # type: ignore[union-attr, index]
            added = [
                block.attention.output.LayerNorm(into + attn),
                block.output.LayerNorm(mid + mlp),
            ]
        else:
            added = [
                into if family == "gpt_neox" else into + attn,
                mid + mlp + (attn if family == "gpt_neox" else 0),
            ]
        torch.testing.assert_close(
            torch.stack([mid, out]), torch.stack(added), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("family", with_slow(["llama", "t5"], ["bert", "xlnet"]))
def test_logits_are_the_models_own(tiny: Tiny, family: str) -> None:
    model, two = tiny(family), family == "t5"
    aims = {"decoder_input_ids": torch.tensor([[3, 4, 5]])} if two else {}
    recorded = hs.record(
        model, [TEXT], "layer.1", logits=True, targets=[[3, 4, 5]] if two else None
    )
    assert torch.equal(
        recorded.logits, report(tiny_model(family), TEXT, **aims).logits[0]
    )  # type: ignore[arg-type]
    texts = texts_of([5, 9])
    both = hs.record(
        model,
        texts,
        "layer.1",
        logits=True,
        targets=[[3], [4, 5, 6, 7]] if two else None,
    )
    assert both.logits is not None and both.logits.shape == (5 if two else 14, 128)
    own = report(
        tiny_model(family),
        texts[0],
        **({"decoder_input_ids": torch.tensor([[3]])} if two else {}),
    ).logits[0]
    torch.testing.assert_close(both.logits[: len(own)], own, rtol=1e-4, atol=1e-4)
    assert (
        hs.record(model, [TEXT], "layer.1", targets=[[3]] if two else None).logits
        is None
    )


def test_gradients_flow_where_every_weight_is_frozen_and_in_inference_mode() -> None:
    module = tiny_model("llama").requires_grad_(False)
    model = hs.load((module, None))
    with torch.inference_mode():
        recorded = hs.record(model, [TEXT], "layer.1-3", logits=True, grad=True)
        states = model.capture([TEXT])
    (slope,) = torch.autograd.grad(
        recorded.logits.sum(), recorded.live[recorded.states.sites[0]]
    )  # type: ignore
    assert slope.abs().max() > 0
    weight = torch.ones(64, requires_grad=True)
    (states["layer.1"] @ weight).sum().backward()
    assert weight.grad is not None and not any(
        weight.requires_grad for weight in module.parameters()
    )


@pytest.mark.parametrize(("side", "bare"), [("left", True), ("right", False)])
def test_recording_a_loop_leaves_padding_out_on_either_side(
    tiny: Tiny, side: str, bare: bool
) -> None:
    model, texts = tiny("llama"), texts_of([6, 2])
    gap = [0] * 4
    ids = torch.tensor([texts[0], gap + texts[1] if side == "left" else texts[1] + gap])
    mask = (
        (torch.arange(6) < 2).long()
        if side == "right"
        else (torch.arange(6) >= 4).long()
    )
    mask = torch.stack([torch.ones(6, dtype=torch.long), mask])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with (
        hs.recording(model.module if bare else model, "layer.*") as rec,
        torch.no_grad(),
    ):
        model.module(ids, mask, places)
        model.module(input_ids=ids[:1])
    assert len(rec.passes) == 2 and rec.states.tokens.ids.tolist() == [
        *texts[0],
        *texts[1],
        *texts[0],
    ]
    for number, text in enumerate([texts[0], texts[1], texts[0]]):
        assert (
            states_disagreement(model.capture([text], "layer.*"), rec.states.of(number))
            <= 1
        )


def test_recording_embeddings_that_are_no_tokens(tiny: Tiny) -> None:
    model = tiny("gpt2")
    with hs.recording(model) as rec, torch.no_grad():
        model.module(
            inputs_embeds=model.module.get_input_embeddings()(torch.tensor([TEXT]))
        )  # type: ignore
    assert torch.equal(rec.states.values, model.capture([TEXT]).values)  # type: ignore[union-attr]
    assert rec.states.tokens.ids.tolist() == [-1] * len(TEXT)


def test_recorded_states_count_from_the_end_of_the_model(tiny: Tiny) -> None:
    model = tiny("llama")
    with hs.recording(model.module, "layer.0-2") as rec, torch.no_grad():
        model.module(torch.tensor([[5, 6, 7]]))
    assert torch.equal(rec.states["layer.-2"], rec.states["layer.2"])
    # Neither of them is the deepest that was kept.
    for gone in (
        "layer.-1",
        "hidden_states[-1]",
    ):
        with pytest.raises(SiteError):
            rec.states[gone]


def test_recording_generation_keeps_each_pass(tiny: Tiny) -> None:
    model, prompt = tiny("llama"), torch.tensor([TEXT])
    with hs.recording(model, "layer.2") as rec:
        written = model.module.generate(
            prompt, max_new_tokens=4, min_new_tokens=4, pad_token_id=0
        )  # type: ignore
    assert [len(one.tokens) for one in rec.passes] == [len(TEXT), 1, 1, 1]
    whole = model.capture(written[:, :-1], "layer.2")
    torch.testing.assert_close(rec.states.values, whole.values, rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


def test_recording_generation_of_two_stacks_twice_leaves_padding_out(
    tiny: Tiny,
) -> None:
    model = tiny("t5")
    ids, mask = (
        torch.tensor([TEXT[:4], [9, 8, 0, 0]]),
        torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    )
    with hs.recording(model, "layer.2") as rec:
        for _ in range(2):
            model.module.generate(
                ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3
            )  # type: ignore
    assert isinstance(rec.states, Pair)
    assert rec.states.encoder.tokens.ids.tolist() == [*TEXT[:4], 9, 8] * 2
    assert rec.states.decoder.tokens.count == 2 * 2 * 3
    alone = model.capture([TEXT[:4], [9, 8]] * 2, "encoder.layer.2")
    torch.testing.assert_close(
        rec.states.encoder.values, alone.values, rtol=1e-4, atol=1e-4
    )  # type: ignore


def test_a_recording_refuses_what_it_would_misread(tiny: Tiny) -> None:
    model = tiny("llama")
    with (
        hs.recording(model) as rec,
        pytest.raises(PassError, match="LlamaForCausalLM itself was not called"),
    ):
        model.module.model(torch.tensor([TEXT]))  # type: ignore[operator]
    with pytest.raises(PassError, match="no pass was run"):
        _ = rec.states


def test_a_pass_that_fails_is_not_recorded(tiny: Tiny) -> None:
    model = tiny("llama")

    def tear(*_: Any) -> None:
        raise RuntimeError("torn")

    with hs.recording(model) as rec, torch.no_grad():
        handle = model.module.model.layers[1].register_forward_hook(tear)  # type: ignore
        with pytest.raises(RuntimeError, match="torn"):
            model.module(torch.tensor([TEXT]))
        handle.remove()
        model.module(torch.tensor([TEXT]))
    assert same(rec.states, model.capture([TEXT]))  # type: ignore[arg-type]


def together(*work: Callable[[], None]) -> list[BaseException]:
    """Run functions at the same time; the errors of those that failed."""
    errors: list[BaseException] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_two_threads_capture_on_one_model(tiny: Tiny) -> None:
    model = tiny("llama")
    texts = [
        ["the cat", "on the mat is one more of them"],
        ["a rest", "it is the word of the one"],
    ]
    right = [model.capture(own) for own in texts]

    def work(number: int, truncate: bool) -> None:
        for _ in range(15):
            assert same(model.capture(texts[number], truncate=truncate), right[number])  # type: ignore[arg-type]
            hs.record(model, texts[number][:1], "layer.1", logits=True)

    assert together(lambda: work(0, True), lambda: work(1, False)) == []


def test_a_source_says_what_made_the_states(tiny: Tiny) -> None:
    module = tiny_model("llama")
    model = hs.load((module, tiny_tokenizer()))
    first = model.capture([TEXT]).source  # type: ignore[union-attr]
    assert (first.dtype, first.device, first.depth, first.final) == (
        "float32",
        "cpu",
        3,
        True,
    )
    assert first.weights.startswith("sha256:") and first == model.capture([TEXT]).source  # type: ignore[union-attr]
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.weight.add_(1)  # type: ignore[union-attr, index, operator]
    changed = model.capture([TEXT])
    assert changed.source.weights != first.weights  # type: ignore[union-attr]


def test_a_window_is_as_long_as_the_positions_go() -> None:
    for name, window in [
        ("RobertaForMaskedLM", 127),
        ("ProphetNetForCausalLM", 126),
    ]:
        model = hs.load((configured(name), None))
        assert model.text_encoder.window == window
        assert model.capture(texts_of([window]), "layer.1").values.shape[1] == window  # type: ignore[union-attr]


def test_a_decoder_may_have_a_window_of_its_own() -> None:
    model = hs.load((configured("LEDForConditionalGeneration"), None))
    text, window = texts_of([200])[0], model.text_encoder.target_window or 0
    assert 0 < window < (model.text_encoder.window or 0)
    assert len(
        model.capture([text], "layer.1", targets=[text[:window]]).decoder.tokens
    ) == min(200, window)  # type: ignore
    with pytest.raises(TextError, match=f"takes at most {window:,}"):
        model.capture([text], "layer.1", targets=[[5] * (window + 1)])


def test_ids_may_be_given_in_many_shapes(tiny: Tiny) -> None:
    model = tiny("gpt2")
    right = model.capture([TEXT])
    for given_ids in (
        TEXT,
        [tuple(TEXT)],
        torch.tensor(TEXT),
        torch.tensor([TEXT]),
        torch.tensor(TEXT).numpy(),
    ):
        assert same(model.capture(given_ids), right)  # type: ignore[arg-type]
    assert same(model.capture(range(5, 9)), model.capture([[5, 6, 7, 8]]))  # type: ignore[arg-type]


def test_the_padding_id_inside_a_target_is_a_token_like_any_other() -> None:
    module = configured("T5GemmaForConditionalGeneration")
    model = hs.load((module, None))
    text, target = TEXT, [60, model.pad, 61, 62]
    with torch.no_grad():
        bare = module(
            input_ids=torch.tensor([text]), decoder_input_ids=torch.tensor([target])
        ).logits[0]
    alone = hs.record(model, [text], (), targets=[target], logits=True).logits
    together = hs.record(
        model, [text, text[:3]], (), targets=[target, [60]], logits=True
    ).logits
    torch.testing.assert_close(alone, bare, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[:4], bare, rtol=1e-4, atol=1e-4)  # type: ignore[index]


def test_a_table_is_not_taken_for_texts(tiny: Tiny) -> None:
    frame = pandas.DataFrame({"text": ["One.", "Two."], "label": [0, 1]})
    with pytest.raises(TextError, match="got a DataFrame, a table"):
        tiny("gpt2").capture(frame)  # type: ignore[arg-type]
    assert tiny("gpt2").capture(frame["text"]).tokens.count == 2  # type: ignore[union-attr, arg-type]


def test_states_computed_under_autocast_say_so(tiny: Tiny) -> None:
    model = tiny("llama")
    with torch.autocast("cpu", torch.bfloat16):
        notes = model.capture([TEXT]).source.notes  # type: ignore[union-attr]
    assert "Computed under torch.autocast to bfloat16." in notes
    assert not any("autocast" in note for note in model.capture([TEXT]).source.notes)  # type: ignore[union-attr]


def test_a_model_is_not_copied_and_the_error_says_what_to_do(tiny: Tiny) -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ModuleError, match=r"hs\.load\(\(module, tokenizer\)\)"):
            copied(tiny("gpt2"))  # type: ignore[operator]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "nothing"])
def test_a_dtype_that_cannot_hold_states_is_refused(tiny: Tiny, dtype: str) -> None:
    with pytest.raises(LoadError, match=f"Cannot use dtype '{dtype}'"):
        tiny("gpt2").capture([TEXT], "layer.1", dtype=dtype)

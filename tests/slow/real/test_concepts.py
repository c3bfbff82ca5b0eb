"""Check every claim of docs/concepts.md on a real model.

A claim of the page begins with its number, such as **C7.**, and its test is here under
`test_c7_...`. The first tests fail if a claim has no test, or a test has no claim.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import GPT2Config, GPT2LMHeadModel

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.testing import nan_weight, tiny_model, tiny_tokenizer
from tests.places import ROOT

PAGE = ROOT / "docs" / "concepts.md"
CLAIM = re.compile(r"^- \*\*C(\d+)\.\*\* ", re.MULTILINE)
TEST = re.compile(r"test_c(\d+)_")
SENTENCE = "The capital of France is Paris."
TEXTS = (
    SENTENCE,
    "My cat sleeps on the old sofa by the door.",
    "Interest rates rose again in March.",
    "He scored two goals in the final.",
    "Boil the rice for ten minutes.",
    "Quantum computers need low temperatures.",
)
IDS = [list(range(5, 35))]


@pytest.fixture(scope="module")
def gemma() -> hs.Model:
    try:
        return hs.load("gemma3-270m", device="cpu")
    except hs.errors.Unreachable as error:
        pytest.skip(f"gemma3-270m cannot be had here: {error}")


@pytest.fixture(scope="module")
def france(smollm2: hs.Model) -> hs.States:
    """Hold the states of the sentence that the page shows."""
    return smollm2.capture(SENTENCE)


@pytest.fixture(scope="module")
def corpus(smollm2: hs.Model) -> hs.States:
    return smollm2.capture(TEXTS)


@pytest.fixture(scope="module")
def theirs(smollm2: hs.Model) -> tuple[Tensor, ...]:
    """Hold what Hugging Face returns for the same sentence."""
    return hidden_states(smollm2, SENTENCE)


def hidden_states(model: hs.Model, text: str) -> tuple[Tensor, ...]:
    encoding = model.tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        output = model.module(**encoding, output_hidden_states=True)
    return tuple(states[0] for states in output.hidden_states)


def padded(model: hs.Model, side: str) -> tuple[Tensor, Tensor]:
    """Return the ids and the mask of two texts in one padded batch."""
    rows = [model.encode(text).ids[0] for text in TEXTS[:2]]
    length = max(len(row) for row in rows)
    ids = torch.full((2, length), model.pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        start = length - len(row) if side == "left" else 0
        ids[number, start : start + len(row)] = torch.tensor(row)
        mask[number, start : start + len(row)] = 1
    return ids, mask


def tiny(family: str) -> hs.Model:
    return hs.load((tiny_model(family), None))


def largest(first: Tensor, second: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((first - second).abs().max() / second.abs().max())


def close(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors are equal within the rounding of float32."""
    return largest(first, second) < 2e-5


def mean_cosine(rows: Tensor) -> float:
    """Return the mean cosine between different rows."""
    units = torch.nn.functional.normalize(rows, dim=-1)
    cosines = units @ units.T
    count = len(rows)
    return float((cosines.sum() - cosines.trace()) / (count * (count - 1)))


# The page and its tests


def test_every_claim_has_one_test_and_every_test_one_claim() -> None:
    claims = [int(number) for number in CLAIM.findall(PAGE.read_text("utf-8"))]
    tests = []
    for name in vars(sys.modules[__name__]):
        match = TEST.match(name)
        if match:
            tests.append(int(match[1]))
    assert claims == list(range(1, len(claims) + 1))
    assert sorted(tests) == claims


def test_every_item_of_the_page_is_a_claim() -> None:
    items = [
        line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("- ")
    ]
    assert all(CLAIM.match(item) for item in items)


# What a hidden state is


@pytest.mark.real
def test_c1_a_state_for_every_token_and_layer(
    france: hs.States, theirs: tuple[Tensor, ...]
) -> None:
    assert france.values.shape == (32, 7, 576)
    assert [str(site) for site in france.sites[-2:]] == ["layer.30", "final"]
    assert len(theirs) == 31
    assert all(states.shape == (7, 576) for states in theirs)


@pytest.mark.real
def test_c2_layer_0_is_a_row_of_the_embedding_matrix(
    smollm2: hs.Model, france: hs.States, minilm: hs.Model, gemma: hs.Model
) -> None:
    def rows(model: hs.Model, states: hs.States) -> Tensor:
        weight = model.module.get_input_embeddings().weight.detach()
        return weight[states.tokens.ids.tolist()]

    assert torch.equal(france["layer.0"], rows(smollm2, france))
    scaled = gemma.capture(SENTENCE, "layer.0")
    # The factor is rounded to the dtype of the checkpoint, bfloat16.
    assert largest(scaled["layer.0"], rows(gemma, scaled) * 640**0.5) < 2**-8
    with_positions = tiny("gpt2")
    twice = with_positions.capture([[7, 7]], "layer.0")
    assert not torch.equal(twice["layer.0"][0], twice["layer.0"][1])
    normed = minilm.capture(SENTENCE, "layer.0")
    assert not close(normed["layer.0"], rows(minilm, normed))


@pytest.mark.real
def test_c3_context_enters_in_the_first_block(smollm2: hs.Model) -> None:
    states = smollm2.capture(["the river bank", "the savings bank"], "layer.0-1")
    river, savings = states.of(0), states.of(1)
    assert river.tokens.strings[-1] == savings.tokens.strings[-1] == " bank"
    assert torch.equal(river["layer.0"][-1], savings["layer.0"][-1])
    assert largest(river["layer.1"][-1], savings["layer.1"][-1]) > 1e-3


@pytest.mark.real
def test_c4_every_block_adds_to_the_stream(smollm2: hs.Model, minilm: hs.Model) -> None:
    def sum_of_parts(model: hs.Model, text: object = SENTENCE) -> tuple[Tensor, Tensor]:
        sites = "layer.2,layer.3,layer.3.attn,layer.3.mlp"
        states = model.capture(text, sites)  # type: ignore[arg-type]
        parts = states["layer.2"] + states["layer.3.attn"] + states["layer.3.mlp"]
        return parts, states["layer.3"]

    assert close(*sum_of_parts(smollm2))
    assert close(*sum_of_parts(tiny("gpt_neox"), IDS))
    assert not close(*sum_of_parts(minilm))


@pytest.mark.real
def test_c5_a_word_may_be_several_tokens(smollm2: hs.Model) -> None:
    text = "It was unforgettably beautiful."
    tokens = smollm2.capture(text, "layer.0").tokens
    assert len(tokens.ids) > len(text.split()) + 1
    pieces = [text[start:stop] for start, stop in tokens.spans]
    assert "".join(pieces) == text
    assert pieces == list(tokens.strings)


# States, logits, embeddings


@pytest.mark.real
def test_c6_the_head_turns_final_into_logits(
    smollm2: hs.Model, france: hs.States
) -> None:
    logits = hs.record(smollm2, SENTENCE, (), logits=True).logits
    assert logits.shape == (7, 49_152)
    with torch.no_grad():
        read = smollm2.module.get_output_embeddings()(france["final"])
    assert close(read, logits)
    assert hs.anatomy(smollm2).facts["head"]["reads_final"]
    assert not hs.anatomy(tiny("bert")).facts["head"]["reads_final"]


@pytest.mark.real
def test_c7_a_state_predicts_the_next_token(smollm2: hs.Model) -> None:
    logits = hs.record(smollm2, SENTENCE, (), logits=True).logits
    ids = smollm2.encode(SENTENCE).ids[0]
    paris = ids[5]
    assert smollm2.tokenizer.decode(paris) == " Paris"
    assert int(logits[4].argmax()) == paris
    assert int(logits[5].argmax()) != paris
    lens = hs.lens(smollm2, SENTENCE, sites="final")
    assert int(lens.data["word_id"].sel(site="final").values[4, 0]) == paris


@pytest.mark.real
def test_c8_embedding_and_unembedding_may_be_the_same_weights(
    smollm2: hs.Model, gemma: hs.Model
) -> None:
    for model in (smollm2, gemma):
        head = model.module.get_output_embeddings().weight
        assert head is model.module.get_input_embeddings().weight
        assert hs.anatomy(model).facts["head"]["tied"]
    assert not hs.anatomy(tiny("gpt_neox")).facts["head"]["tied"]


@pytest.mark.real
def test_c9_an_embedding_of_a_text_is_one_vector(minilm: hs.Model) -> None:
    vectors = hs.embed(minilm, list(TEXTS))
    assert vectors.shape == (6, 384)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    assert not hs.anatomy(minilm).facts["makes_logits"]
    with pytest.raises(hs.errors.Error, match="logits|head"):
        hs.lens(minilm, SENTENCE)


# Encoder, decoder, both


@pytest.mark.real
def test_c10_a_decoder_does_not_look_ahead(
    smollm2: hs.Model, france: hs.States, minilm: hs.Model
) -> None:
    prefix = smollm2.capture("The capital of France")
    assert close(prefix.values, france.values[:, :4])
    assert hs.anatomy(smollm2).facts["stacks"][0]["causal"]
    # The first token of an encoder is [CLS] in both texts.
    whole = minilm.capture(SENTENCE, "layer.6")["layer.6"][1]
    part = minilm.capture("The capital of France", "layer.6")["layer.6"][1]
    assert largest(part, whole) > 0.05
    assert not hs.anatomy(minilm).facts["stacks"][0]["causal"]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_c11_an_encoder_decoder_has_two_stacks(family: str) -> None:
    model = tiny(family)
    states = model.capture([[5, 6, 7]], targets=[[8, 9]])
    assert isinstance(states, hs.Pair)
    assert states.encoder.values.shape[1:] == (3, 64)
    assert states.decoder.values.shape[1:] == (2, 64)
    other = model.capture([[5, 6, 20]], targets=[[8, 9]])
    assert torch.equal(states.decoder[0], other.decoder[0])
    assert largest(states.decoder[1], other.decoder[1]) > 1e-3
    both = model.anatomy.select("layer.2")
    assert [str(site) for site in both] == ["encoder.layer.2", "decoder.layer.2"]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_c12_an_encoder_does_not_see_the_targets(family: str) -> None:
    model = tiny(family)
    states = model.capture([[5, 6, 7]], targets=[[8, 9]])
    other = model.capture([[5, 6, 7]], targets=[[8, 21]])
    assert torch.equal(states.encoder.values, other.encoder.values)
    assert not torch.equal(states.decoder.values, other.decoder.values)


@pytest.mark.real
def test_c13_a_sliding_window_hides_what_is_far_back(gemma: hs.Model) -> None:
    model = tiny("gemma3_text")
    assert model.module.config.sliding_window == 4
    states = model.capture(IDS)
    other = model.capture([[9, *IDS[0][1:]]])

    def reach(site: str) -> int:
        changed = (states[site] != other[site]).any(-1)
        return int(changed.nonzero().max())

    assert reach("layer.0") == 0
    assert reach("layer.1") == 3
    # Each window begins at a token that has seen three before it.
    assert reach("layer.2") == 6
    assert gemma.module.config.sliding_window == 512


# Norms


@pytest.mark.real
def test_c14_the_last_entry_is_after_the_final_norm(
    smollm2: hs.Model, france: hs.States, theirs: tuple[Tensor, ...]
) -> None:
    for layer in range(30):
        assert torch.equal(france[layer], theirs[layer])
    assert torch.equal(france["final"], theirs[-1])
    assert largest(france["layer.30"], theirs[-1]) > 1
    with torch.no_grad():
        normed = smollm2.module.model.norm(france["layer.30"])
    assert close(normed, theirs[-1])
    same = smollm2.capture(SENTENCE, "hidden_states[30]")
    assert [str(site) for site in same.sites] == ["final"]
    module: Any = tiny_model("llama")
    module.config.tie_last_hidden_states = False
    tiny = hs.load((module, None))
    ids = torch.tensor([[20, 21, 22]])
    with torch.no_grad():
        last = module(ids, output_hidden_states=True).hidden_states[-1][0]
    assert torch.equal(tiny.capture(ids, "layer.3").values[0], last)
    assert not torch.equal(tiny.capture(ids, "final").values[0], last)


@pytest.mark.real
def test_c15_some_models_have_no_final_norm(minilm: hs.Model) -> None:
    states = minilm.capture(SENTENCE)
    assert torch.equal(states["layer.6"], hidden_states(minilm, SENTENCE)[-1])
    with pytest.raises(hs.errors.SiteError, match=r"no final norm.*layer\.6"):
        minilm.capture(SENTENCE, "final")
    sites = tiny("bart").anatomy.select("*")
    assert not any("final" in str(site) for site in sites)


@pytest.mark.real
def test_c16_layer_k_is_the_output_of_module_k_minus_1(
    smollm2: hs.Model, france: hs.States
) -> None:
    outputs: list[Tensor] = []
    block = smollm2.module.model.layers[3]
    handle = block.register_forward_hook(
        lambda module, args, output: outputs.append(output)
    )
    hidden_states(smollm2, SENTENCE)
    handle.remove()
    assert torch.equal(outputs[0][0], france["layer.4"])
    assert not torch.equal(outputs[0][0], france["layer.3"])
    for alias in ("hidden_states[4]", "blocks.3.hook_resid_post"):
        named = smollm2.capture(SENTENCE, alias)
        assert [str(site) for site in named.sites] == ["layer.4"]


@pytest.mark.real
def test_c17_a_raw_stream_grows(france: hs.States, minilm: hs.Model) -> None:
    norms = france.values[:, 1:].norm(dim=-1).median(1).values
    assert norms[30] > 100 * norms[0]
    assert norms[31] < norms[30] / 10
    normed = minilm.capture(SENTENCE).values.norm(dim=-1).median(1).values
    assert normed.max() < 2.5 * normed.min()


@pytest.mark.real
def test_c18_the_final_norm_forgets_the_length(smollm2: hs.Model) -> None:
    def scaled(model: hs.Model, site: str, text: object) -> tuple[Tensor, Tensor]:
        plain = hs.record(model, text, (), logits=True).logits  # type: ignore[arg-type]
        change = {site: hs.Scale(3.0)}
        edited = hs.edit(model, text, change, (), logits=True).logits  # type: ignore[arg-type]
        return edited, plain

    assert close(*scaled(smollm2, "layer.30", SENTENCE))
    assert not close(*scaled(tiny("bart"), "decoder.layer.3", IDS))


@pytest.mark.real
def test_c19_raw_and_normed_states_are_kept_apart(smollm2: hs.Model) -> None:
    form = hs.profile(smollm2, SENTENCE).data["form"].to_series()
    assert form["final"] == "normed"
    assert set(form.drop("final")) == {"raw"}


# Tokens


@pytest.mark.real
def test_c20_a_space_belongs_to_the_token(smollm2: hs.Model, minilm: hs.Model) -> None:
    ids = [smollm2.encode(text).ids[0] for text in ("Paris", " Paris")]
    assert ids[0] != ids[1]
    without = hs.Contrast("The capital of France is", "The capital of Germany is",
                          "Paris", "Berlin")  # fmt: skip
    with pytest.raises(hs.errors.TextError, match="Did you mean ' Berlin'"):
        hs.patch(smollm2, without)
    same = [minilm.encode(text).ids[0] for text in ("Paris", " paris")]
    assert same[0] == same[1]


@pytest.mark.real
def test_c21_tokenizers_add_tokens(
    france: hs.States, minilm: hs.Model, gemma: hs.Model
) -> None:
    assert france.tokens.strings[0] == "The"
    assert gemma.capture("The", "layer.0").tokens.strings == ("<bos>", "The")
    read = minilm.capture("The", "layer.0").tokens
    assert read.strings == ("[CLS]", "the", "[SEP]")
    # No characters of the text stand for them.
    assert read.spans[0].tolist() == read.spans[-1].tolist() == [-1, -1]


@pytest.mark.real
def test_c22_the_first_token_is_a_sink(
    smollm2: hs.Model, corpus: hs.States, gemma: hs.Model, minilm: hs.Model
) -> None:
    def excess(states: hs.States, site: str) -> float:
        norms = states[site].norm(dim=-1)
        return float(norms[0] / norms[1:].median())

    for number in range(len(TEXTS)):
        assert excess(corpus.of(number), "layer.15") > 100
    bos = gemma.capture(SENTENCE, "layer.9")
    assert bos.tokens.strings[0] == "<bos>"
    assert excess(bos, "layer.9") > 5
    assert excess(minilm.capture(SENTENCE), "layer.3") < 1.5
    data = hs.profile(smollm2, SENTENCE).data.sel(site="layer.15")
    assert float(data["norm_first"]) > 100 * float(data["norm_median"])


@pytest.mark.real
def test_c23_a_few_dimensions_hold_most_of_the_length(corpus: hs.States) -> None:
    firsts = set(np.unique(corpus.tokens.text, return_index=True)[1].tolist())
    for row, state in enumerate(corpus["layer.15"]):
        if row not in firsts:
            squares = state.square()
            assert squares.topk(3).values.sum() > 0.4 * squares.sum()


@pytest.mark.real
def test_c24_states_of_unrelated_texts_point_the_same_way(
    smollm2: hs.Model,
    corpus: hs.States,
    minilm: hs.Model,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert mean_cosine(corpus.pool("last", "layer.15").float()) > 0.9
    assert mean_cosine(corpus.pool("last", "final").float()) > 0.7
    assert mean_cosine(torch.as_tensor(hs.embed(minilm, list(TEXTS)))) < 0.2
    progress.show(True)
    try:
        hs.embed(smollm2, list(TEXTS))
    finally:
        progress.show(None)
    assert "the mean cosine of two of the 6 texts is" in capfd.readouterr().err


# Pooling


@pytest.mark.real
def test_c25_padding_has_states_too(minilm: hs.Model) -> None:
    ids, mask = padded(minilm, "right")
    with torch.no_grad():
        output = minilm.module(ids, attention_mask=mask).last_hidden_state
    assert not mask.all()
    assert output[mask == 0].abs().max() > 0.1
    states = minilm.capture(TEXTS[:2])
    pooled = states.pool("mean", "layer.6")
    for text in range(2):
        real = output[text][mask[text] == 1]
        assert close(pooled[text], real.mean(0))
    short = int(mask.sum(1).argmin())
    assert largest(output[short].mean(0), pooled[short]) > 0.02
    assert len(states.tokens.ids) == int(mask.sum())


@pytest.mark.real
def test_c26_the_last_column_is_not_the_last_token(smollm2: hs.Model) -> None:
    states = smollm2.capture(TEXTS[:2], "layer.20")
    pooled = states.pool("last", "layer.20")
    columns = {}
    for side in ("right", "left"):
        ids, mask = padded(smollm2, side)
        with torch.no_grad():
            output = smollm2.module(ids, attention_mask=mask, output_hidden_states=True)
        short = int(mask.sum(1).argmin())
        columns[side] = output.hidden_states[20][short, -1]
    assert largest(columns["right"], pooled[short]) > 0.05
    assert largest(columns["left"], pooled[short]) < 1e-3
    assert torch.equal(pooled[short], states.of(short)["layer.20"][-1])
    by_side = []
    for side in ("right", "left"):
        tokenizer = tiny_tokenizer()
        tokenizer.padding_side = side
        model = hs.load((tiny_model("llama"), tokenizer))
        read = model.capture(["The rest.", "A cat sat on the mat."], "final")
        by_side.append(read.pool("last", "final"))
    assert torch.equal(*by_side)


@pytest.mark.real
def test_c27_the_first_token_of_a_decoder_sees_itself_alone(
    smollm2: hs.Model, minilm: hs.Model
) -> None:
    texts = ["The war was long.", "The soup was good."]
    states = smollm2.capture(texts)
    assert close(states.of(0).values[:, 0], states.of(1).values[:, 0])
    with pytest.raises(hs.errors.StatesError, match="has no such token"):
        states.pool("cls", "final")
    encoded = minilm.capture(texts, "layer.6").pool("cls", "layer.6")
    assert largest(encoded[0], encoded[1]) > 0.1


@pytest.mark.real
def test_c28_a_sink_rules_the_mean(corpus: hs.States) -> None:
    for number in range(len(TEXTS)):
        states = corpus.of(number)
        cosines = {}
        for site in ("layer.15", "final"):
            mean = states[site].mean(0)
            cosines[site] = float(cosine_similarity(mean, states[site][0], dim=0))
        assert cosines["layer.15"] > 0.99
        assert cosines["final"] < 0.9


def test_c29_what_stands_for_a_text_is_in_the_facts() -> None:
    labels = ["a", "b"] * 6
    ids = [[5 + number, 6, 7 + number] for number in range(12)]
    meanings = {}
    for family in ("gpt2", "bert"):
        model = hs.load((tiny_model(family), tiny_tokenizer(cls=family == "bert")))
        probed = hs.probe(model, (ids, labels), sites="layer.3")
        meanings[family] = probed.facts["token"]
    assert "last" in meanings["gpt2"]
    assert "mean" in meanings["bert"]


# Batches and positions


@pytest.mark.real
def test_c30_a_forgotten_mask_changes_an_encoder(
    smollm2: hs.Model, minilm: hs.Model
) -> None:
    def without_mask(model: hs.Model) -> tuple[Tensor, Tensor]:
        ids, mask = padded(model, "right")
        short = int(mask.sum(1).argmin())
        length = int(mask[short].sum())
        with torch.no_grad():
            output = model.module(ids, output_hidden_states=True)
        masked = model.capture(TEXTS[:2], "layer.6").of(short)["layer.6"]
        return output.hidden_states[6][short, :length], masked

    assert largest(*without_mask(minilm)) > 0.05
    assert close(*without_mask(smollm2))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_c31_left_padding_moves_learned_positions(family: str) -> None:
    model = tiny(family)
    ids, mask = torch.tensor([[0, 0, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1, 1]])
    with torch.no_grad():
        output = model.module(ids, attention_mask=mask, output_hidden_states=True)
    alone = model.capture([[5, 6, 7]], "layer.1")["layer.1"]
    assert close(output.hidden_states[1][0, 2:], alone) == (family == "llama")
    batch = model.capture([[5, 6, 7], [8, 9, 10, 11, 12]], "layer.1")
    assert close(batch.of(0)["layer.1"], alone)


@pytest.mark.real
def test_c32_a_batch_changes_no_more_than_the_last_digits(
    smollm2: hs.Model, corpus: hs.States
) -> None:
    alone = smollm2.capture(TEXTS[3]).values
    together = corpus.of(3).values
    error = (together - alone).norm(dim=-1) / alone.norm(dim=-1)
    assert error.max() < 1e-4
    assert hs.anatomy(smollm2).facts["padded_batches"]


# The KV cache


@pytest.mark.real
def test_c33_with_a_cache_only_new_tokens_have_states(
    smollm2: hs.Model, france: hs.States
) -> None:
    ids = torch.tensor(smollm2.encode(SENTENCE).ids)
    with torch.no_grad():
        first = smollm2.module(ids[:, :-1], use_cache=True)
        step = smollm2.module(
            ids[:, -1:],
            past_key_values=first.past_key_values,
            output_hidden_states=True,
        )
    assert step.hidden_states[20].shape == (1, 1, 576)
    assert largest(step.hidden_states[20][0, 0], france["layer.20"][-1]) < 1e-3
    written = smollm2.capture_generation(
        "The capital of France is", sites="layer.20", max_new_tokens=2
    )
    whole = smollm2.capture([written.tokens.ids.tolist()], "layer.20")
    assert len(written.tokens.ids) == 5 + 2
    assert largest(written.values, whole.values) < 1e-3


@pytest.mark.real
def test_c34_a_cache_holds_keys_and_values(
    smollm2: hs.Model, france: hs.States
) -> None:
    ids = torch.tensor(smollm2.encode(SENTENCE).ids)
    with torch.no_grad():
        cache = smollm2.module(ids, use_cache=True).past_key_values
    keys = cache.layers[10].keys
    assert keys.shape == (1, 3, 7, 64)
    assert keys[0, :, 0].numel() == france["layer.10"].shape[1] // 3


# Numbers and modes


@pytest.mark.real
def test_c35_train_mode_is_refused_where_it_matters(smollm2: hs.Model) -> None:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    module = GPT2LMHeadModel(GPT2Config(vocab_size=128, **sizes)).train()
    ids = torch.tensor(IDS)
    with torch.no_grad():
        runs = [module(ids).logits for _ in range(2)]
    assert not torch.equal(*runs)
    with pytest.raises(hs.errors.ModuleError, match=r"train\(\) mode"):
        hs.load((module, None)).capture(IDS)
    before = hidden_states(smollm2, SENTENCE)
    smollm2.module.train()
    try:
        during = hidden_states(smollm2, SENTENCE)
    finally:
        smollm2.module.eval()
    assert all(map(torch.equal, before, during))


@pytest.mark.real
def test_c36_bfloat16_keeps_two_to_three_digits(france: hs.States) -> None:
    values = france.values[france.values.abs() > 1e-30]
    error = (values.bfloat16().float() - values).abs() / values.abs()
    assert 2**-9.5 < error.max() <= 2**-8
    exact = tiny("llama").capture(IDS)
    rounded = hs.load((tiny_model("llama").bfloat16(), None)).capture(IDS)
    assert rounded.values.dtype == torch.bfloat16
    assert rounded.source.dtype == "bfloat16"
    assert largest(rounded["final"].float(), exact["final"]) > 2**-8
    assert np.array_equal(rounded.to_numpy(), rounded.values.float().numpy())


@pytest.mark.real
def test_c37_a_state_may_be_too_large_for_float16(
    gemma: hs.Model, tmp_path: Path
) -> None:
    states = gemma.capture(SENTENCE, "layer.9")
    assert states.values.abs().max() > torch.finfo(torch.float16).max
    assert states.values.half().isinf().any()
    with pytest.raises(hs.errors.NotFinite, match=r"layer\.9.*dtype='float32'"):
        hs.extract(gemma, [SENTENCE], tmp_path / "s", sites="layer.9", dtype="float16")


def test_c38_another_attention_kernel_agrees_within_rounding() -> None:
    module = tiny_model("llama")
    module.set_attn_implementation("eager")  # type: ignore[operator]
    eager = hs.load((module, None)).capture(IDS)
    default = tiny("llama").capture(IDS)
    assert close(eager.values, default.values)
    assert (eager.source.attention, default.source.attention) == ("eager", "sdpa")


def test_c39_numbers_that_are_not_finite_are_an_error() -> None:
    module = tiny_model("llama")
    path = nan_weight(module)
    with torch.no_grad():
        assert module(torch.tensor(IDS)).logits.isnan().any()
    with pytest.raises(hs.errors.NotFinite, match=path):
        hs.load((module, None))


@pytest.mark.real
def test_c40_nothing_is_left_behind(
    smollm2: hs.Model, hanging: Callable[[nn.Module], dict[str, Any]]
) -> None:
    module = tiny_model("llama")
    ids = torch.tensor(IDS)
    module(ids, output_hidden_states=True)
    assert any(part._forward_hooks for part in module.modules())
    before = hanging(smollm2.module)
    encoding = smollm2.tokenizer(SENTENCE, return_tensors="pt")
    with hs.recording(smollm2.module, "layer.3") as recorded:
        smollm2.module(**encoding)
    states = smollm2.capture(SENTENCE, "layer.3")
    assert hanging(smollm2.module) == before
    assert close(recorded.states.values, states.values)
    assert not states.values.requires_grad

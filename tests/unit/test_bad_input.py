"""What a model cannot take is refused before it is run: an error of ours, of a
builtin's kind, that says what to do.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.catalog import PUBLIC
from hiddenscope.errors import (
    ArgumentError,
    Error,
    NotFinite,
    PassError,
    SiteError,
    TextError,
)
from hiddenscope.modules.hooks import finite_attention
from hiddenscope.modules.weights import check_finite
from hiddenscope.passes import text_encoder
from hiddenscope.passes.sweep import run_unpatched
from hiddenscope.testing import tiny_model, tiny_tokenizer

Tiny = Callable[..., hs.Model]
TEXT = [7, 99, 23, 64, 31]


def refused(
    model: hs.Model,
    hanging: Any,
    work: Callable[[], Any],
    kind: type[Error],
    builtin: type[Exception],
    *words: str,
) -> Error:
    """The error that some work ends in, once it has been seen to be a good one and to
    leave nothing behind.
    """
    passes: list[int] = []
    handle = model.module.register_forward_pre_hook(lambda *_: passes.append(1))
    before = hanging(model.module)
    with pytest.raises(kind) as caught:
        work()
    assert hanging(model.module) == before
    handle.remove()
    error = caught.value
    assert isinstance(error, builtin)
    assert (
        error.problem
        and error.reason
        and error.remedy
        and error.remedy.endswith((".", "?"))
    )
    assert all(word in str(error) for word in words), str(error)
    assert not passes or kind in (NotFinite, PassError)
    return error


def test_a_text_that_is_too_long_is_said_to_be_how_long_and_may_be_cut(
    tiny: Tiny, hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("bert")
    text = "the cat sat " * 40
    length = len(model.tokenizer(text, verbose=False).input_ids)
    words = (f"{length:,} tokens", "takes at most 128", "truncate=True")
    refused(model, hanging, lambda: model.capture(text), TextError, ValueError, *words)
    states = model.capture([text, "on"], truncate=True)
    assert states.tokens.lengths.tolist()[0] == 128
    # Of a very long one only the beginning is encoded, which takes less memory.
    monkeypatch.setattr(text_encoder, "_LONG", 1_000)
    with pytest.raises(TextError, match="Text 1: it has more than .* takes at most"):
        model.capture(["on", text * 20])
    assert states.of(0).tokens.strings[-1] == "<sep>", (
        "a cut text ends as every text does"
    )
    assert model.capture([[5] * 500], truncate=True).tokens.ids.tolist() == [5] * 128
    assert len(model.capture("a" * 100_000, "layer.1", truncate=True).tokens) == 128
    assert model.capture(text[:30]).tokens.lengths.tolist()[0] < 128, (
        "and nothing is cut that was not asked for"
    )


def test_a_text_without_a_tokenizer(hanging: Any) -> None:
    model = hs.load((tiny_model("gpt2"), None))
    words = ("'the one'", "without a tokenizer", "lists of token ids")
    refused(
        model, hanging, lambda: model.capture("the one"), TextError, ValueError, *words
    )
    assert model.capture([TEXT]).tokens.strings == tuple(map(str, TEXT))


SITES = {
    "layer.40": "The last is 'layer.",
    "layer.3.attnn": "layer.3.attn",
    "finl": "final",
    "layer.1.cross": "layer.0 to layer.3",
    "hidden_states[9]": "hidden_states[9]",
    "encoder.layer.1": "Did you mean 'layer.1'?",
    "": "",
}


def test_sites_that_a_model_has_not(tiny: Tiny, hanging: Any) -> None:
    model = tiny("gpt2")
    for site, words in SITES.items():
        for take in (model.capture, partial(hs.record, model)):
            work = partial(take, [TEXT], site)
            refused(model, hanging, work, SiteError, LookupError, words)
        with pytest.raises(SiteError), hs.recording(model, site):
            pass


def test_logits_of_a_model_without_a_head(tiny: Tiny, hanging: Any) -> None:
    model = tiny("gpt2", "base")
    words = ("No logits of GPT2Model", "no language-model head", "task='causal-lm'")
    work = lambda: hs.record(model, [TEXT], logits=True)  # noqa: E731
    refused(model, hanging, work, PassError, RuntimeError, *words)


def test_logits_of_an_encoder_decoder_without_a_head(tiny: Tiny) -> None:
    model = tiny("bart", "base")
    for work in (
        lambda: hs.record(model, [TEXT], targets=[[5]], logits=True),
        lambda: run_unpatched(model, [TEXT], [], targets=[[5]]),
        lambda: model.capture_generation([TEXT]),
    ):
        with pytest.raises(PassError, match="Load it with task='seq2seq-lm'."):
            work()


def test_logits_that_are_no_row_a_token(hanging: Any) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = hs.load(
        (
            BertForSequenceClassification(BertConfig(vocab_size=128, **sizes)).eval(),
            None,
        )
    )
    work = lambda: hs.record(model, [TEXT, TEXT], logits=True)  # noqa: E731
    refused(
        model,
        hanging,
        work,
        PassError,
        RuntimeError,
        "[2, 2], not one row per token. Use a model with a language-model head.",
    )
    assert model.capture([TEXT]).values.shape == (3, 5, 32)


def test_targets_that_do_not_fit(tiny: Tiny, hanging: Any) -> None:
    one, two = tiny("gpt2"), tiny("bart")
    for work in (
        lambda: one.capture([TEXT], targets=[TEXT]),
        lambda: hs.record(one, [TEXT], targets=[TEXT]),
    ):
        refused(one, hanging, work, PassError, RuntimeError, "one stack")
    cases: list[tuple[Any, str]] = [
        ([TEXT, TEXT], "2 targets with 1 texts"),
        ([[]], "no tokens"),
        ([], "the list is empty"),
        ([[500]], "id 500"),
        ([[5] * 129], "takes at most 128"),
        ([["a", 5]], "not a list of integers"),
    ]
    for targets, words in cases:
        for work in (
            lambda targets=targets: two.capture([TEXT], targets=targets),
            lambda targets=targets: hs.record(two, [TEXT], targets=targets),
        ):
            refused(two, hanging, work, TextError, ValueError, words)
    cut = two.capture([TEXT], targets=["the cat " * 100], truncate=True)
    assert len(cut.decoder.tokens) == 128  # type: ignore[union-attr]


@pytest.mark.parametrize("start", [None, 10**30, -1])
def test_a_decoder_without_a_start_token(hanging: Any, start: int | None) -> None:
    module = tiny_model("t5")
    module.config.decoder_start_token_id = (
        module.generation_config.decoder_start_token_id
    ) = start  # type: ignore
    model = hs.load((module, None))
    words = ("decoder_start_token_id", "`targets=`")
    refused(
        model, hanging, lambda: model.capture([TEXT]), TextError, ValueError, *words
    )
    assert model.capture([TEXT], targets=[[5]]).decoder.tokens.ids.tolist() == [5]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "path", "value", "count"),
    [
        ("llama", "lm_head.weight", torch.nan, "1 NaN"),
        ("gpt2", "transformer.h.0.ln_1.bias", -torch.inf, "1 infinite value"),
        ("bert", "bert.embeddings.word_embeddings.weight", torch.nan, "1 NaN"),
        ("t5", "decoder.block.1.layer.1.EncDecAttention.v.weight", torch.nan, "1 NaN"),
    ],
)
def test_a_weight_that_is_not_finite_is_named(
    family: str, path: str, value: float, count: str, hanging: Any
) -> None:
    module = tiny_model(family)
    module.config.decoder_start_token_id = 0  # type: ignore[union-attr]
    model = hs.load((module, None))
    right = model.capture([TEXT], "layer.*")
    weight = module.get_parameter(path)
    with torch.no_grad():
        weight.flatten()[3], kept = value, weight.flatten()[3].item()
    ways = [
        lambda: model.capture([TEXT, TEXT[:2]]),
        lambda: model.capture([TEXT], "layer.0"),
        lambda: hs.record(model, [TEXT], logits=family != "t5"),
        lambda: hs.load((module, None)),
    ]
    for work in ways:
        refused(
            model,
            hanging,
            work,
            NotFinite,
            ArithmeticError,
            f"{path} has {count}",
        )
    with pytest.raises(NotFinite, match=path), hs.recording(model):
        pass
    with torch.no_grad():
        weight.flatten()[3] = kept
    again = model.capture([TEXT], "layer.*")
    assert all(torch.equal(again[site], right[site]) for site in right.sites), (
        "mended, it works as before"
    )


def test_several_weights_that_are_not_finite_and_a_buffer() -> None:
    module = tiny_model("llama")
    with torch.no_grad():
        for name in "qkvo":
            module.get_parameter(f"model.layers.0.self_attn.{name}_proj.weight")[
                :2, :3
            ] = torch.nan
    with pytest.raises(
        NotFinite,
        match=r"q_proj.weight has 6 NaN; .*k_proj.* and 1 more weight is not finite",
    ):
        hs.load((module, None))
    module = tiny_model("llama")
    module.register_buffer("mask", torch.full((2, 2), -torch.inf))
    assert hs.load((module, None)).capture([TEXT]).values.isfinite().all(), (
        "a mask is made of infinities"
    )
    module.mask[0, 0] = torch.nan
    with pytest.raises(NotFinite, match="mask has 1 NaN"):
        hs.load((module, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_large_and_finite_are_no_fault(dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(4, 4, dtype=dtype)
    torch.nn.init.constant_(linear.weight, torch.finfo(dtype).max)
    check_finite(linear)
    linear.weight.data[2, 2] = torch.nan
    linear.weight = torch.nn.Parameter(linear.weight.data)
    with pytest.raises(NotFinite, match="weight has 1 NaN"):
        check_finite(linear)


def test_one_number_that_is_not_finite_is_enough() -> None:
    vector = torch.ones(64)
    vector[3] = torch.nan
    for make in (hs.Direction.of, hs.Add, hs.Replace, hs.Project):
        with pytest.raises(NotFinite):
            make(vector)


@pytest.mark.parametrize(
    ("part", "inside"),
    [("mlp.down_proj", "layer.2.mlp"), ("self_attn.o_proj", "layer.2.mid")],
)
def test_numbers_that_overflow_are_named_by_the_site_where_they_come_up(
    part: str, inside: str, hanging: Any
) -> None:
    module = tiny_model("llama")
    model = hs.load((module, tiny_tokenizer()))
    right = model.capture([TEXT], "layer.0-1").values
    torch.nn.init.constant_(module.get_parameter(f"model.layers.1.{part}.weight"), 3e38)
    words = ("at layer.2, token", "text 0, position 0", "weights of the block")
    for work in (
        lambda: model.capture([TEXT, TEXT[:2]]),
        lambda: hs.record(model, [TEXT], logits=True),
    ):
        refused(model, hanging, work, NotFinite, ArithmeticError, *words)
    assert torch.equal(model.capture([TEXT], "layer.0-1").values, right), (
        "what is computed before it is right"
    )
    with pytest.raises(NotFinite, match=inside):
        model.capture([TEXT], "layer.2.mid,layer.2.mlp,layer.2")


def test_a_nan_that_comes_up_in_an_embedding_in_the_head_and_in_a_decoder(
    hanging: Any,
) -> None:
    module = tiny_model("llama")
    model = hs.load((module, None))
    embeddings: Any = module.get_submodule("model.embed_tokens")
    infinite = lambda _, given, states: states.masked_fill(  # noqa: E731
        (given[0] == 99)[..., None], torch.inf
    )
    handle = embeddings.register_forward_hook(infinite)
    words = ("an infinity at layer.0", "position 1")
    refused(
        model,
        hanging,
        lambda: model.capture([TEXT]),
        NotFinite,
        ArithmeticError,
        *words,
    )
    assert model.capture([[5, 6]]).values.isfinite().all()
    handle.remove()
    handle = module.get_submodule("lm_head").register_forward_hook(
        lambda *given: given[-1] * torch.nan
    )
    work = lambda: hs.record(model, [[5, 6]], logits=True)  # noqa: E731
    words = ("logits of LlamaForCausalLM", "a NaN", "weights of the head")
    refused(model, hanging, work, NotFinite, ArithmeticError, *words)
    handle.remove()
    module = tiny_model("bart")
    model = hs.load((module, None))
    module.get_submodule("model.decoder.layers.1.fc1").register_forward_hook(
        lambda *given: given[-1] * torch.nan
    )
    refused(
        model,
        hanging,
        lambda: model.capture([TEXT]),
        NotFinite,
        ArithmeticError,
        "decoder.layer.2",
    )
    assert model.capture([TEXT], "encoder.layer.*").values.isfinite().all()


def _slow(value: object) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def recorded(model: hs.Model, ids: list[int]) -> Any:
    with hs.recording(model, "layer.2") as recording:
        model.module(torch.tensor([ids]))
    return recording.states


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *map(_slow, (torch.bfloat16, torch.float16))],
)
def test_what_attention_is_given_and_its_kernel_loses_is_found(
    dtype: torch.dtype,
) -> None:
    module = tiny_model("llama").to(dtype)
    model = hs.load((module, None))
    attention = torch.nn.functional.scaled_dot_product_attention
    for which, value, length in product(
        ("q_proj", "k_proj"), (torch.nan, torch.inf), (1, 40)
    ):
        texts = [[*range(7, 7 + length)], [5] * max(1, length - 3)]

        def spoil(
            _: Any, __: Any, output: torch.Tensor, value: float = value
        ) -> torch.Tensor:
            return output.index_fill(1, torch.tensor(output.shape[1] - 1), value)

        handle = module.get_submodule(
            f"model.layers.1.self_attn.{which}"
        ).register_forward_hook(spoil)
        for work in (
            lambda: model.capture(texts[:1]),  # noqa: B023
            lambda: model.capture(texts),  # noqa: B023
            lambda: recorded(model, texts[0]).check_finite(),  # noqa: B023
        ):
            with pytest.raises(
                NotFinite, match=r"at layer\.2|attention call 2 of [23] was given a NaN"
            ):
                work()
            assert torch.nn.functional.scaled_dot_product_attention is attention
        handle.remove()
        model.capture(texts)


def test_attention_of_other_threads_is_let_through() -> None:
    spoilt = torch.ones(3, 1, 1, 5, 8)
    spoilt[0, 0, 0, 0] = torch.nan
    attention = torch.nn.functional.scaled_dot_product_attention
    with ThreadPoolExecutor(1) as other, finite_attention(torch.nn.Linear(1, 1)):
        inside = other.submit(
            lambda: torch.nn.functional.scaled_dot_product_attention(*spoilt)
        ).result()
    assert torch.equal(inside.isnan(), attention(*spoilt).isnan())
    assert torch.nn.functional.scaled_dot_product_attention is attention


UNUSUAL: dict[str, Any] = {
    "sparse": lambda: torch.ones(64).to_sparse(),
    "sparse rows": lambda: torch.ones(3, 64).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(64), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(64, device="meta"),
    "complex": lambda: torch.ones(64, dtype=torch.complex64),
    "mkldnn": lambda: torch.ones(64).to_mkldnn(),
    "endless": lambda: 10**400,
    "bytes": lambda: b"abc",
    "a generator": lambda: (number for number in (1.0, 2.0)),
    "no path": lambda: "a\0b",
    "half a character": lambda: "\ud800",
    "a long name": lambda: "*" * 500,
}
TAKERS: dict[str, Any] = {
    "edit": lambda model, value: hs.edit(
        model, [[5, 6, 7]], {"layer.1": hs.Replace(value)}, ()
    ),
    "Add": lambda model, value: hs.edit(
        model, [[5, 6, 7]], {"layer.1": hs.Add(value)}, ()
    ),
    "Scale": lambda model, value: hs.edit(
        model, [[5, 6, 7]], {"layer.1": hs.Scale(value)}, ()
    ),
    "Project": lambda model, value: hs.edit(
        model, [[5, 6, 7]], {"layer.1": hs.Project(value)}, ()
    ),
    "a function": lambda model, value: hs.edit(
        model, [[5, 6, 7]], {"layer.1": lambda states: value}, ()
    ),
    "resume": lambda model, value: hs.resume(model, [[5, 6, 7]], "layer.1", value, ()),
    "Direction": lambda model, value: hs.Direction.of(value, sites="layer.1"),
    "Direction by site": lambda model, value: hs.Direction.of({"layer.1": value}),
    "texts": lambda model, value: model.capture(value),
    "open": lambda model, value: hs.open(value),
    "Adjustment": lambda model, value: hs.Adjustment.fit(value, "centre"),
    "Result": lambda model, value: hs.Result.load(value),
    "extract": lambda model, value: hs.extract(model, [], to=value),
    "save": lambda model, value: model.capture([[5, 6]], "layer.1").save(value),
}


@pytest.mark.filterwarnings(
    "ignore"
    # Torch says that some of these kinds are prototypes.
)
@pytest.mark.parametrize("taker", TAKERS)
def test_what_cannot_be_computed_with_is_refused_in_words(
    taker: str, tiny: Tiny
) -> None:
    model = tiny("llama")
    for name, make in UNUSUAL.items():
        if name == "meta" and taker == "a function":
            continue
        try:
            TAKERS[taker](model, make())
        except Error as error:
            assert "Please file an issue" not in str(error), name


@pytest.mark.parametrize("query", [range(10**12), [10**400]])
def test_a_query_that_is_too_large_for_memory_or_a_float(query: Any) -> None:
    with pytest.raises(Error, match="is neither texts nor vectors"):
        hs.search(np.eye(4), query)


@pytest.mark.parametrize("residual", [{}, [None], [[1], [1, 2]], b"a", object()])
def test_a_residual_that_is_no_tensor(residual: Any) -> None:
    layers = torch.zeros(2, 3, 8)
    read = partial(hs.States.read, layers, tokens=[5, 6, 7])
    with pytest.raises(Error, match="Give its name, or a tensor"):
        read(sites=["layer.0", "final"], residual=residual)


# What a user wrote, and what the error must say.
CALLS: list[tuple[Callable[[hs.Model], Any], str]] = [
    (
        lambda m: hs.lens(m, TEXT, site="layer.1"),  # type: ignore[call-arg]
        "Cannot call lens: it has no parameter 'site'. Did you mean sites?",
    ),
    (lambda m: hs.lens(m, TEXT, layers="layer.1"), "Did you mean sites?"),  # type: ignore[call-arg]
    (
        lambda m: hs.lens(m, TEXT, nonsense=1),  # type: ignore[call-arg]
        "it has no parameter 'nonsense'. Call lens(model, texts, *, k=5, target=None,",
    ),
    (
        lambda m: hs.patch(m, "a", "b"),  # type: ignore[call-arg, arg-type]
        "must be a Contrast or a list of Contrasts, got 'a'. Give hs.Contrast(clean,"
        " corrupt, answer, other, targets=None, at=None, group=None).",
    ),
    (
        lambda m: hs.lens(m, [TEXT], 5),  # type: ignore[misc]
        "too many positional arguments. Call lens(model, texts, *, k=5, target=None,",
    ),
    (lambda m: hs.compare(), "missing a required argument: 'model'"),  # type: ignore[call-overload]
    (
        lambda m: hs.Store("states/"),
        "and 'states/' is a name. To read one, call hs.open(path).",
    ),  # type: ignore[arg-type]
    (lambda m: hs.States("x.safetensors"), "call hs.States.load(path)."),  # type: ignore[call-arg]
    (lambda m: hs.Model("gpt2"), "call hs.load(name)."),  # type: ignore[arg-type]
    (
        lambda m: hs.probe(m, "mine.csv", label="verdict"),
        "Give what hs.read(path, label=...) returns.",
    ),  # type: ignore[call-arg]
    (
        lambda m: hs.embed(m, "mine.csv", text="words"),
        "Give what hs.read(path, text=...) returns.",
    ),  # type: ignore[call-arg]
    (lambda m: hs.load("x", dtyp="float32"), "Did you mean dtype?"),  # type: ignore[call-arg]
    (lambda m: m.capture(TEXT, site="layer.1"), "Did you mean sites?"),  # type: ignore[call-arg]
]


def test_arguments_that_a_function_has_not(tiny: Tiny) -> None:
    for call, words in CALLS:
        with pytest.raises(ArgumentError) as caught:
            call(tiny("gpt2"))
        assert words in str(caught.value)


def test_labels_that_were_not_named_are_asked_for_with_the_columns(
    tiny: Tiny, tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("sentence,verdict\na cat sat,1\na dog ran,0\n")
    for data in (path, hs.read(path)):
        with pytest.raises(TextError) as caught:
            hs.probe(tiny("gpt2"), data)
        said = (
            "its texts have no labels, and its columns are 'sentence', 'verdict'. Name"
            ' the one with the labels: hs.read(path, label="...").'
        )
        assert said in str(caught.value)
    assert repr(hs.read(path)) == "Labelled(mine: 2 texts)"
    labelled = hs.read(path, label="verdict", group="sentence")
    assert repr(labelled) == "Labelled(mine: 2 texts, 2 labels, 2 groups)"
    (tmp_path / "mine.txt").write_text("a cat sat\n")
    with pytest.raises(TextError, match="have no labels. Give .texts, labels."):
        hs.probe(tiny("gpt2"), tmp_path / "mine.txt")


def test_every_public_function_refuses_an_unknown_keyword() -> None:
    bare = set()
    for name in PUBLIC:
        try:
            getattr(hs, name)(nonsense_keyword=1)
        except ArgumentError:
            continue
        except TypeError:
            bare.add(name)
    # Sites are made many times in every call, and nobody makes a pass.
    assert bare <= {"Site", "Pass"}

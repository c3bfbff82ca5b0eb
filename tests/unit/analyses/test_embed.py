"""Embed: sentence-transformers makes the same vectors; centring and whitening do what
they say.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli import main as cli
from hiddenscope.errors import ArgumentError, Damaged, FileError, StatesError
from hiddenscope.measures.neighbours import mean_cosine

Tiny = Callable[..., hs.Model]
TEXTS = [
    "The cat sat on the mat.",
    "A dog",
    "There is nothing in the house and nothing in the garden.",
    "The end.",
]


def test_site_and_pool_may_be_chosen(tiny: Tiny) -> None:
    model = tiny("bert")
    states = model.capture(TEXTS)
    made = hs.embed(model, TEXTS, pool="cls", site="layer.1", normalize=False)
    np.testing.assert_array_equal(made, states.pool("cls", "layer.1"))
    second = hs.embed(model, TEXTS, pool=1, site="layer.1", normalize=False)[1]
    np.testing.assert_array_equal(second, states.of(1)["layer.1"][1])


def test_texts_come_from_anywhere(tiny: Tiny, tmp_path: Path) -> None:
    model, path = tiny("bert"), tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    frame = pd.DataFrame({"text": TEXTS, "label": [0, 1, 0, 1]})
    column = pd.Series(TEXTS, index=[7, 3, 5, 1])
    expected = hs.embed(model, TEXTS)
    for given in (path, frame, column, tuple(TEXTS)):
        np.testing.assert_array_equal(hs.embed(model, given), expected)
    assert hs.embed(model, "A dog").shape == (1, 64)
    assert hs.embed(model, [[5, 6, 7]]).shape == (1, 64)


def test_vectors_are_centred_as_others_were(tiny: Tiny) -> None:
    model = tiny("llama")
    raw = hs.embed(model, TEXTS, normalize=False)
    fitted = hs.Adjustment.fit(raw, "centre")
    held = hs.embed(model, TEXTS[:3], adjust=fitted, normalize=False)
    np.testing.assert_allclose(held, raw[:3] - raw.mean(0), atol=1e-5)


def test_the_mean_cosine_is_that_of_all_pairs() -> None:
    values = torch.randn(9, 5) + 1
    unit = values.double() / values.double().norm(dim=1, keepdim=True)
    pairs = [float(unit[a] @ unit[b]) for a in range(9) for b in range(9) if a != b]
    assert mean_cosine(values) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_how_nearly_they_point_the_same_way_is_said(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny("llama")
    cosine = mean_cosine(model.capture(TEXTS).pool("mean", "final"))
    said = []
    progress.show(True)
    try:
        for texts, adjust in (
            (TEXTS, None),
            ([[5, 6]] * 3, None),
            ([[5, 6]] * 3, "centre"),
            ("A dog", None),
        ):
            hs.embed(model, texts, adjust=adjust, normalize=False)
            said.append(capsys.readouterr().err)
    finally:
        progress.show(None)
    several, same, centred, alone = said
    assert f"the mean cosine of two of the 4 texts is {cosine:.2f}" in several
    assert "is 1.00" in same
    assert "is 1.00" in centred and "poor" not in centred
    assert "mean cosine" not in alone


def embed(*given: Any, **options: Any) -> Callable[[hs.Model], Any]:
    return lambda model: hs.embed(model, *given, **options)


SAME = [[5, 6]] * 3
REFUSED: list[tuple[Callable[[hs.Model], Any], type[Exception], str]] = [
    (lambda m: hs.embed(m.capture(TEXTS), TEXTS), StatesError, "is not a model"),
    (embed(TEXTS, pool="each"), ArgumentError, "every token is a row"),
    (embed(TEXTS, site="layer.*"), StatesError, "names 4 sites"),
    (embed("A dog", adjust="centre"), StatesError, "subtracting the mean of one text"),
    (embed(SAME, adjust="centre"), StatesError, "text 0 equals the mean of all texts"),
    (embed(TEXTS, adjust="whiten"), StatesError, "in only 3 of 64 directions"),
    (embed(Path("nowhere.txt")), FileError, "nowhere.txt"),
]


def test_what_cannot_be_embedded_is_said(tiny: Tiny) -> None:
    for call, error, said in REFUSED:
        with pytest.raises(error, match=said):
            call(tiny("llama"))


def modules(*kinds: str) -> list[dict[str, Any]]:
    """The list of modules of a folder of sentence-transformers."""
    listed = []
    for number, kind in enumerate(kinds):
        path = f"{number}_{kind}" if number else ""
        kind = f"sentence_transformers.models.{kind}"
        listed.append({"idx": number, "name": f"{number}", "path": path, "type": kind})
    return listed


WHOLE: dict[str, Any] = {
    "modules": modules("Transformer", "Pooling", "Normalize"),
    "sentence_bert_config": {"max_seq_length": 16, "do_lower_case": False},
    "config_sentence_transformers": {"prompts": {}, "default_prompt_name": None},
    "pooling": {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True},
}


@pytest.fixture
def sentence_folder(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """Make folders as sentence-transformers saves them, with a tiny model; files that
    are given are put in the place of its own.
    """
    model, saved = tiny("bert"), tmp_path / "saved"
    model.module.save_pretrained(saved)  # type: ignore[operator]
    model.tokenizer.save_pretrained(saved)  # type: ignore[union-attr]

    def make(name: str = "encoder", **files: Any) -> Path:
        path = tmp_path / name
        shutil.copytree(saved, path)
        (path / "1_Pooling").mkdir()
        for name, content in {**WHOLE, **files}.items():
            place = "1_Pooling/config" if name == "pooling" else name
            (path / f"{place}.json").write_text(json.dumps(content))
        return path

    return make


PROMPTS = {
    "prompts": {"query": "is it ", "other": "no: "},
    "default_prompt_name": "query",
}
FOLDERS: dict[str, dict[str, Any]] = {
    "mean": {},
    "cls": {"pooling": {"word_embedding_dimension": 64, "pooling_mode": "cls"}},
    "no limit": {"sentence_bert_config": {"do_lower_case": False}},
    "max of lower case": {
        "pooling": {"word_embedding_dimension": 64, "pooling_mode_max_tokens": True},
        "sentence_bert_config": {"max_seq_length": 16, "do_lower_case": True},
    },
    "last after a prompt": {
        "pooling": {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True},
        "config_sentence_transformers": PROMPTS,
    },
}
ANY_TEXTS = [*TEXTS, "LONG Words " * 4, "a longer text " * 40]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_a_folder_of_sentence_transformers_gives_its_vectors(
    sentence_folder: Callable[..., Path],
) -> None:
    transformers = pytest.importorskip("sentence_transformers")
    for kind, files in FOLDERS.items():
        folder = sentence_folder(kind, **files)
        theirs = transformers.SentenceTransformer(str(folder), device="cpu")
        expected = theirs.encode(ANY_TEXTS, show_progress_bar=False)
        model = hs.load(folder)
        made = hs.embed(model, ANY_TEXTS)
        np.testing.assert_allclose(made, expected, atol=1e-5, rtol=0, err_msg=kind)


def test_what_a_folder_of_sentence_transformers_asks_for_is_done(
    sentence_folder: Callable[..., Path], tiny: Tiny
) -> None:
    """The same vectors as of the plain model, asked for all of it by hand."""
    plain = tiny("bert")
    by_hand = {
        "cls": (ANY_TEXTS, "cls"),
        "max of lower case": ([text.lower() for text in ANY_TEXTS], "max"),
        "last after a prompt": ([f"is it {text}" for text in ANY_TEXTS], "last"),
    }
    for kind, (texts, pool) in by_hand.items():
        model = hs.load(sentence_folder(kind, **FOLDERS[kind]))
        expected = hs.embed(plain, plain.encode(texts, truncate=16), pool=pool)
        made = hs.embed(model, ANY_TEXTS)
        np.testing.assert_allclose(made, expected, atol=1e-6, err_msg=kind)
    found = hs.search(model, TEXTS[0], 3, texts=ANY_TEXTS).data
    nearest = np.sort(made @ made[0])[::-1][:3]
    np.testing.assert_allclose(found["score"][0], nearest, atol=1e-5)
    assert found["string"].values[0, 0] == TEXTS[0], "and not what is made of it"
    again = hs.search(made, (model, TEXTS[0]), 3).data
    np.testing.assert_allclose(again["score"], found["score"], atol=1e-5)


def test_texts_are_cut_where_the_folder_says_and_that_is_said(
    sentence_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(progress, "note", notes.append)
    model = hs.load(sentence_folder())
    long = "the cat sat on the mat and " * 5
    cut = model.encode([long], truncate=16)
    assert cut.lengths == [16] and cut.ids[0][-1] == model.tokenizer.sep_token_id  # type: ignore[union-attr]
    made = hs.embed(model, [long, "A dog"])
    said = "encoder: 1 of 2 texts have 16 tokens or more; the vector is that of the"
    assert any(f"{said} first 16" in note for note in notes)
    np.testing.assert_allclose(made[0], hs.embed(model, cut)[0], atol=1e-6)
    whole = hs.embed(model, model.encode([long]))  # what is encoded already is not cut
    assert np.abs(whole[0] - made[0]).max() > 1e-3
    lengths = model.capture(long).tokens.lengths.tolist()
    assert lengths == model.encode(long).lengths, "nor are states"
    notes.clear()
    hs.embed(model, "A dog")
    assert not any("tokens or more" in note for note in notes)


def test_what_rules_vectors_is_noted_and_what_chance_explains(
    tiny: Callable[..., hs.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(progress, "note", notes.append)
    texts = ["The cat.", *(f"The cat sat on the mat {k}." for k in range(12))]
    hs.embed(tiny("gpt2"), texts, pool="mean")
    assert [note for note in notes if "the number of tokens alone" in note]
    assert [note for note in notes if "nearer than chance explains" in note]


# As version 6 saves it: the longest text stands in the tokenizer's configuration.
NEWER: dict[str, Any] = {
    "transformer_task": "feature-extraction",
    "modality_config": {
        "text": {"method": "forward", "method_output_name": "last_hidden_state"}
    },
    "module_output_name": "token_embeddings",
}


def test_the_longest_text_may_stand_with_the_tokenizer(
    sentence_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(progress, "note", notes.append)
    folder = sentence_folder(sentence_bert_config=NEWER)
    place = folder / "tokenizer_config.json"
    tokenizer = json.loads(place.read_text())
    older = hs.embed(hs.load(sentence_folder("older")), ANY_TEXTS)
    # Numbers that stand for no limit at all: the window holds.
    for longest, equal in ((16, True), (8, False), (int(1e30), False), (1e300, False)):
        place.write_text(json.dumps({**tokenizer, "model_max_length": longest}))
        made = hs.embed(hs.load(folder), ANY_TEXTS)
        assert np.allclose(made, older, atol=1e-6) == equal
    assert any("texts have 128 tokens or more" in note for note in notes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_a_folder_that_sentence_transformers_saves_gives_its_vectors(
    sentence_folder: Callable[..., Path], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("sentence_transformers")
    for number, (kind, files) in enumerate(FOLDERS.items()):
        theirs = transformers.SentenceTransformer(
            str(sentence_folder(kind, **files)), device="cpu"
        )
        expected = theirs.encode(
            ANY_TEXTS, show_progress_bar=False, normalize_embeddings=True
        )
        theirs.save(str(tmp_path / f"{number}"))
        made = hs.embed(hs.load(tmp_path / f"{number}"), ANY_TEXTS)
        np.testing.assert_allclose(made, expected, atol=1e-5, rtol=0, err_msg=kind)


def test_what_a_folder_does_and_embed_does_not_is_refused(
    sentence_folder: Callable[..., Path],
) -> None:
    dense = modules("Transformer", "Pooling", "Dense")
    sides = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    without = {"pooling_mode": "mean", "include_prompt": False}
    hidden = {"config_sentence_transformers": PROMPTS, "pooling": without}
    own = modules("Transformer", "Pooling")
    own[0]["type"] = "custom_st.Transformer"
    apart = modules("Transformer", "Pooling")
    apart[0]["path"] = "0_Transformer"
    chat = {"text": {"method": "forward"}, "message": {"method": "forward"}}
    cut = {**WHOLE["config_sentence_transformers"], "truncate_dim": 32}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"modules": dense}, "has a module Dense"),
        ({"modules": own}, "has a module of its own, custom_st.Transformer"),
        ({"modules": apart}, "keeps its Transformer in 0_Transformer"),
        ({"modules": modules("Transformer")}, "has no module Pooling"),
        ({"config_sentence_transformers": cut}, "keeps 32 numbers of a vector"),
        (
            {"sentence_bert_config": {**NEWER, "modality_config": chat}},
            "puts texts into a chat template",
        ),
        (
            {"sentence_bert_config": {**NEWER, "transformer_task": "fill-mask"}},
            "sets transformer_task",
        ),
        ({"sentence_bert_config": {"tokenizer_args": {"x": 1}}}, "sets tokenizer_args"),
        ({"pooling": {"pooling_mode": "weightedmean"}}, "pools by weightedmean"),
        ({"pooling": sides}, "pools by max and mean"),
        (hidden, "leaves the prompt out"),
    ]
    for files, said in refused:
        model = hs.load(sentence_folder(said, **files))
        with pytest.raises(StatesError, match=said):
            hs.embed(model, TEXTS)
        assert hs.embed(model, TEXTS, pool="mean").shape == (4, 64)
    with pytest.raises(StatesError, match=said):
        hs.cluster(model, TEXTS * 3)


def test_a_damaged_folder_is_refused_and_prompts_without_a_default_are_noted(
    sentence_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = [{"type": "a.Pooling", "path": "../.."}]
    damaged: list[tuple[dict[str, Any], str]] = [
        ({"modules": {}}, "Cannot read"),
        ({"modules": outside}, "Cannot read"),
        ({"sentence_bert_config": [1]}, "Cannot read"),
        ({"sentence_bert_config": {"max_seq_length": 0}}, "max_seq_length is 0"),
    ]
    for number, (files, said) in enumerate(damaged):
        folder = sentence_folder(f"damaged {number}", **files)
        with pytest.raises(Damaged, match=said):
            hs.load(folder)
    notes: list[str] = []
    monkeypatch.setattr(progress, "note", notes.append)
    other = {"prompts": {"query": "is it "}, "default_prompt_name": None}
    folder = sentence_folder("prompts", config_sentence_transformers=other)
    hs.embed(hs.load(folder), TEXTS)
    assert any("has prompts (query)" in note for note in notes)


def test_the_command_keeps_the_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    model, texts = tiny("bert"), tmp_path / "texts.txt"
    monkeypatch.setattr(hs, "load", lambda *given, **options: model, raising=False)
    texts.write_text("\n".join(TEXTS))
    readers: dict[str, Callable[[Path], Any]] = {
        ".npy": np.load,
        ".safetensors": lambda path: load_file(path)["vectors"],
        ".csv": lambda path: np.loadtxt(path, delimiter=",", dtype=np.float32),
    }
    expected = hs.embed(model, TEXTS, pool="last")
    for suffix, read in readers.items():
        out = tmp_path / f"vectors{suffix}"
        words = ["embed", f"@{texts}", "--out", str(out), "--pool", "-1"]
        said = CliRunner().invoke(cli.app, words)
        assert said.exit_code == 0, said.output
        assert "4 vectors, 64 wide" in said.output
        np.testing.assert_array_equal(read(out), expected)
    words = ["embed", "A dog", "--out", str(tmp_path / "vectors.txt")]
    wrong = CliRunner().invoke(cli.app, words)
    assert wrong.exit_code == 2
    assert "this command writes .npy .safetensors .csv" in wrong.output

"""Embed: sentence-transformers makes the same vectors; centring and whitening do what
they say.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.analyses.embed.embed import Adjustment, mean_cosine
from hiddenscope.cli import main as cli
from hiddenscope.errors import ArgumentError, Damaged, FileError, StatesError, TextError
from hiddenscope.loading import zoo
from hiddenscope.testing import tiny_model, tiny_tokenizer

TEXTS = [
    "The cat sat on the mat.",
    "A dog",
    "There is nothing in the house and nothing in the garden.",
    "The end.",
]
RAGGED = [
    " ".join(["river", "stone", "a", "light", "over"][: n % 5 + 1] * (n % 7 + 1))
    for n in range(37)
]


def test_it_is_the_mean_of_the_last_state_at_length_one(
    tiny: Callable[..., hs.Model],
) -> None:
    for family, last in (("bert", "layer.-1"), ("llama", "final")):
        model = tiny(family)
        pooled = model.capture(TEXTS).pool("mean", last)
        made = hs.embed(model, TEXTS)
        assert made.dtype == np.float32
        np.testing.assert_allclose(
            made, pooled / pooled.norm(dim=1, keepdim=True), rtol=1e-6, atol=1e-7
        )
        np.testing.assert_array_equal(hs.embed(model, TEXTS, normalize=False), pooled)


def test_site_and_pool_may_be_chosen(tiny: Callable[..., hs.Model]) -> None:
    model = tiny("bert")
    states = model.capture(TEXTS)
    for pool in ("cls", "max", "last"):
        made = hs.embed(model, TEXTS, pool=pool, site="layer.1", normalize=False)
        np.testing.assert_array_equal(made, states.pool(pool, "layer.1"))  # type: ignore[arg-type]
    np.testing.assert_array_equal(
        hs.embed(model, TEXTS, pool=1, site="layer.1", normalize=False)[1],
        states.of(1)["layer.1"][1],
    )
    model = tiny("t5")
    pair = model.capture(TEXTS)
    np.testing.assert_array_equal(
        hs.embed(model, TEXTS, normalize=False),
        pair.encoder.pool("mean", "encoder.final"),
    )


def test_texts_come_from_anywhere(
    tiny: Callable[..., hs.Model], tmp_path: Path
) -> None:
    import pandas

    model, path = tiny("bert"), tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    frame = pandas.DataFrame({"text": TEXTS, "label": [0, 1, 0, 1]})
    expected = hs.embed(model, TEXTS)
    for given in (path, frame, tuple(TEXTS)):
        np.testing.assert_array_equal(hs.embed(model, given), expected)
    assert hs.embed(model, "A dog").shape == (1, 64)
    assert hs.embed(model, [[5, 6, 7]]).shape == (1, 64)


def test_centred_vectors_have_mean_zero_and_whitened_ones_the_identity(
    tiny: Callable[..., hs.Model],
) -> None:
    model = tiny("llama")
    generator = np.random.default_rng(0)
    ids = [
        generator.integers(5, 90, generator.integers(3, 9)).tolist() for _ in range(120)
    ]
    centred = hs.embed(model, ids, adjust="centre", normalize=False)
    np.testing.assert_allclose(centred.mean(0), 0, atol=1e-6)
    raw = hs.embed(model, ids, normalize=False)
    np.testing.assert_allclose(centred, raw - raw.mean(0), atol=1e-6)
    white = hs.embed(model, ids, adjust="whiten", normalize=False)
    np.testing.assert_allclose(
        np.cov(white.astype(np.float64).T), np.eye(64), atol=1e-4
    )
    unit = hs.embed(model, ids, adjust="whiten")
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-6)
    fitted = hs.Adjustment.fit(raw, "centre")
    held = hs.embed(model, ids[:3], adjust=fitted, normalize=False)
    np.testing.assert_allclose(held, raw[:3] - raw.mean(0), atol=1e-5)


def test_whitening_is_that_of_the_covariance() -> None:
    values = torch.randn(
        200, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ) @ torch.diag(torch.tensor([100.0, 10, 5, 1, 0.1, 0.01], dtype=torch.float64))
    own, vectors = np.linalg.eigh(np.cov(values.T.numpy()))
    # The inverse root of the covariance, from its definition.
    root = vectors @ np.diag(own**-0.5) @ vectors.T
    expected = (values.numpy() - values.numpy().mean(0)) @ root
    np.testing.assert_allclose(
        Adjustment.fit(values, "whiten").apply(values), expected, atol=1e-8
    )


def test_the_mean_cosine_is_that_of_all_pairs() -> None:
    values = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)) + 1
    unit = values.double() / values.double().norm(dim=1, keepdim=True)
    pairs = [float(unit[a] @ unit[b]) for a in range(9) for b in range(9) if a != b]
    assert mean_cosine(values) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_how_nearly_they_point_the_same_way_is_said(
    tiny: Callable[..., hs.Model], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny("llama")
    cosine = mean_cosine(model.capture(TEXTS).pool("mean", "final"))
    progress.show(True)
    try:
        hs.embed(model, TEXTS)
        said = capsys.readouterr().err
        hs.embed(model, [[5, 6]] * 3)
        same = capsys.readouterr().err
        hs.embed(model, "A dog")
        alone = capsys.readouterr().err
    finally:
        progress.show(None)
    assert f"the mean cosine of two of the 4 texts is {cosine:.2f}" in said
    assert (
        "is 1.00; states that all point in nearly the same direction make poor"
        " embeddings" in same
    )
    assert "mean cosine" not in alone


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda m: hs.embed(m.capture(TEXTS), TEXTS),
            StatesError,
            "States is not a model",
        ),
        (lambda m: hs.embed(m, []), TextError, "the list is empty"),
        (lambda m: hs.embed(m, ["A dog", ""]), TextError, "Text 1: it is empty"),
        (
            lambda m: hs.embed(m, TEXTS, pool="each"),
            ArgumentError,
            "every token is a row",
        ),
        (
            lambda m: hs.embed(m, TEXTS, pool="median"),
            StatesError,
            "No pooling 'median'",
        ),
        (lambda m: hs.embed(m, TEXTS, site="layer.*"), StatesError, "names 4 sites"),
        (
            lambda m: hs.embed(m, TEXTS, adjust="shrink"),
            StatesError,
            "No adjustment 'shrink'",
        ),
        (
            lambda m: hs.embed(m, "A dog", adjust="centre"),
            StatesError,
            "subtracting the mean of one text",
        ),
        (
            lambda m: hs.embed(m, [[5, 6]] * 3, adjust="centre"),
            StatesError,
            "text 0 equals the mean of all texts",
        ),
        (
            lambda m: hs.embed(m, TEXTS, adjust="whiten"),
            StatesError,
            "in only 3 of 64 directions",
        ),
        (lambda m: hs.embed(m, Path("nowhere.txt")), FileError, "nowhere.txt"),
    ],
)
def test_what_cannot_be_embedded_is_said(
    tiny: Callable[..., hs.Model],
    call: Callable[[hs.Model], Any],
    error: type[Exception],
    said: str,
) -> None:
    with pytest.raises(error, match=said):
        call(tiny("llama"))


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")  # theirs
def test_sentence_transformers_makes_the_same_vectors(minilm: hs.Model) -> None:
    transformers = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    # As its own files say.
    reader = modules.Transformer(str(zoo.zoo_folder("minilm")), max_seq_length=256)
    pooling = modules.Pooling(384, pooling_mode="mean")
    theirs = transformers.SentenceTransformer(
        modules=[reader, pooling, modules.Normalize()], device="cpu"
    )
    texts = [
        *TEXTS,
        *RAGGED,
        *(
            f"{word} " * length
            for word in ("river", "stones")
            for length in (250, 300, 700)
        ),
    ]
    expected = theirs.encode(texts, show_progress_bar=False)
    np.testing.assert_allclose(hs.embed(minilm, texts), expected, atol=1e-5, rtol=0)


def sentence_folder(path: Path, tiny: Callable[..., hs.Model], **files: Any) -> Path:
    """A folder as sentence-transformers saves it, with a tiny model; `files` are put in
    the place of its own.
    """
    model = tiny("bert")
    model.module.save_pretrained(path)  # type: ignore[operator]
    model.tokenizer.save_pretrained(path)  # type: ignore[union-attr]
    contents = {
        "modules": [
            {
                "idx": 0,
                "name": "0",
                "path": "",
                "type": "sentence_transformers.models.Transformer",
            },
            {
                "idx": 1,
                "name": "1",
                "path": "1_Pooling",
                "type": "sentence_transformers.models.Pooling",
            },
            {
                "idx": 2,
                "name": "2",
                "path": "2_Normalize",
                "type": "sentence_transformers.models.Normalize",
            },
        ],
        "sentence_bert_config": {"max_seq_length": 16, "do_lower_case": False},
        "config_sentence_transformers": {"prompts": {}, "default_prompt_name": None},
        "pooling": {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True},
        **files,
    }
    (path / "1_Pooling").mkdir()
    for name, content in contents.items():
        place = (
            path / "1_Pooling" / "config.json"
            if name == "pooling"
            else path / f"{name}.json"
        )
        place.write_text(json.dumps(content))
    return path


PROMPTS = {
    "prompts": {"query": "is it ", "other": "no: "},
    "default_prompt_name": "query",
}
FOLDERS: dict[str, dict[str, Any]] = {
    "mean": {},
    "cls": {"pooling": {"word_embedding_dimension": 64, "pooling_mode": "cls"}},
    "last": {
        "pooling": {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}
    },
    "max": {
        "pooling": {"word_embedding_dimension": 64, "pooling_mode_max_tokens": True}
    },
    "no limit": {"sentence_bert_config": {"do_lower_case": False}},
    "lower case": {
        "sentence_bert_config": {"max_seq_length": 16, "do_lower_case": True}
    },
    "prompt": {"config_sentence_transformers": PROMPTS},
}


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_of_sentence_transformers_gives_its_vectors(
    kind: str, tiny: Callable[..., hs.Model], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("sentence_transformers")
    folder = sentence_folder(tmp_path / "encoder", tiny, **FOLDERS[kind])
    texts = [*TEXTS, "LONG Words " * 4, "a longer text " * 40]
    expected = transformers.SentenceTransformer(str(folder), device="cpu").encode(
        texts, show_progress_bar=False
    )
    model = hs.load(folder)
    np.testing.assert_allclose(hs.embed(model, texts), expected, atol=1e-5, rtol=0)
    found = hs.search(model, texts[0], 3, texts=texts)
    np.testing.assert_allclose(
        found.data["score"][0], np.sort(expected @ expected[0])[::-1][:3], atol=1e-5
    )
    assert found.data["string"].values[0, 0] == texts[0], "and not what is made of it"
    again = hs.search(hs.embed(model, texts), (model, texts[0]), 3)
    np.testing.assert_allclose(again.data["score"], found.data["score"], atol=1e-5)


def test_texts_are_cut_where_the_folder_says_and_that_is_said(
    tiny: Callable[..., hs.Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(progress, "note", notes.append)
    model = hs.load(sentence_folder(tmp_path / "encoder", tiny))
    long = "the cat sat on the mat and " * 5
    cut = model.encode([long], truncate=16)
    assert cut.lengths == [16] and cut.ids[0][-1] == model.tokenizer.sep_token_id  # type: ignore[union-attr]
    made = hs.embed(model, [long, "A dog"])
    assert any(
        "encoder: 1 of 2 texts have 16 tokens or more; the vector is that of the"
        " first 16" in n
        for n in notes
    )
    np.testing.assert_allclose(made[0], hs.embed(model, cut)[0], atol=1e-6)
    whole = hs.embed(model, model.encode([long]))  # what is encoded already is not cut
    assert np.abs(whole[0] - made[0]).max() > 1e-3
    assert model.capture(long).tokens.lengths.tolist() == model.encode(long).lengths, (
        "nor are states"
    )
    notes.clear()
    hs.embed(model, "A dog")
    assert not any("tokens or more" in note for note in notes)


def test_what_a_folder_does_and_embed_does_not_is_refused(
    tiny: Callable[..., hs.Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(progress, "note", notes.append)
    dense = [
        {
            "idx": 0,
            "name": "0",
            "path": "",
            "type": "sentence_transformers.models.Transformer",
        }
    ]
    dense += [
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        }
    ]
    dense += [
        {
            "idx": 2,
            "name": "2",
            "path": "2_Dense",
            "type": "sentence_transformers.models.Dense",
        }
    ]
    sides = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    for number, (files, said) in enumerate(
        [
            ({"modules": dense}, "has a module Dense"),
            ({"pooling": {"pooling_mode": "weightedmean"}}, "pools by weightedmean"),
            ({"pooling": sides}, "pools by max and mean"),
            (
                {
                    "config_sentence_transformers": PROMPTS,
                    "pooling": {"pooling_mode": "mean", "include_prompt": False},
                },
                "leaves the prompt out",
            ),
        ]
    ):
        model = hs.load(sentence_folder(tmp_path / str(number), tiny, **files))
        for call in (
            lambda model=model: hs.embed(model, TEXTS),
            lambda model=model: hs.cluster(model, TEXTS * 3),
        ):
            with pytest.raises(StatesError, match=said):
                call()
        assert hs.embed(model, TEXTS, pool="mean").shape == (4, 64)
    for number, files in enumerate(
        [
            {"modules": {}},
            {"modules": [{"type": "a.Pooling", "path": "../.."}]},
            {"sentence_bert_config": [1]},
        ],
        10,
    ):
        with pytest.raises(Damaged, match="Cannot read"):
            hs.load(sentence_folder(tmp_path / str(number), tiny, **files))
    with pytest.raises(Damaged, match="max_seq_length is 0"):
        hs.load(
            sentence_folder(
                tmp_path / "none", tiny, sentence_bert_config={"max_seq_length": 0}
            )
        )
    other = {"prompts": {"query": "is it "}, "default_prompt_name": None}
    hs.embed(
        hs.load(
            sentence_folder(
                tmp_path / "prompts", tiny, config_sentence_transformers=other
            )
        ),
        TEXTS,
    )
    assert any("has prompts (query)" in note for note in notes)


@pytest.mark.real
def test_centring_spreads_what_a_causal_model_holds_together(smollm2: hs.Model) -> None:
    cosines = [
        mean_cosine(torch.from_numpy(hs.embed(smollm2, TEXTS, adjust=adjust)))
        for adjust in (None, "centre")
    ]  # type: ignore[arg-type]
    assert cosines[0] > 0.5
    assert cosines[1] < 0


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".csv"])
def test_the_command_keeps_the_vectors(
    suffix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny: Callable[..., hs.Model],
) -> None:
    from safetensors.numpy import load_file

    model = tiny("bert")
    monkeypatch.setattr(hs, "load", lambda *given, **options: model, raising=False)
    out, texts = tmp_path / f"vectors{suffix}", tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    said = CliRunner().invoke(
        cli.app, ["embed", f"@{texts}", "--out", str(out), "--pool", "-1"]
    )
    assert said.exit_code == 0, said.output
    assert "4 vectors, 64 wide" in said.output
    readers: dict[str, Callable[[Path], Any]] = {
        ".npy": np.load,
        ".safetensors": lambda path: load_file(path)["vectors"],
        ".csv": lambda path: np.loadtxt(path, delimiter=",", dtype=np.float32),
    }
    np.testing.assert_array_equal(
        readers[suffix](out), hs.embed(tiny("bert"), TEXTS, pool="last")
    )
    wrong = CliRunner().invoke(
        cli.app, ["embed", "A dog", "--out", str(tmp_path / "vectors.txt")]
    )
    assert wrong.exit_code == 2
    assert "this command writes .npy .safetensors .csv" in wrong.output


def test_a_column_of_a_frame_is_many_texts() -> None:
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    texts = ["A cat sat.", "The rest."]
    assert np.array_equal(
        hs.embed(model, pd.Series(texts, index=[7, 3])), hs.embed(model, texts)
    )

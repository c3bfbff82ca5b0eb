"""Extract: a corpus job gives the states that capture gives, whatever happens to it on
the way.
"""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import load_file
from typer.testing import CliRunner

import hiddenscope as hs
from chaos import kills, memory_folder
from chaos.kills import files_of, texts
from chaos.nodes import NOT_STARTED
from hiddenscope.analyses.probe.labels import labelled_rows
from hiddenscope.cli import main as cli
from hiddenscope.errors import (
    ArgumentError,
    FileError,
    NotFinite,
    PassError,
    StatesError,
    StoreError,
    TextError,
)
from hiddenscope.extract import (
    Corpus,
    Engine,
    ExtractJob,
    JobProgress,
    compute,
    extract,
    job,
    local,
    planning,
    schedule,
)
from hiddenscope.extract.compute import Pipeline
from hiddenscope.extract.corpus import SeenTexts
from hiddenscope.extract.planning import tokenizer_identity
from hiddenscope.passes import buffers, inputs
from hiddenscope.store import resume_store, verify, writer
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.vectors import vectors
from hiddenscope.workers import WorkerProcess
from tests.places import ROOT
from tests.slices import THOROUGH, long

runner = CliRunner()
TEXTS = texts()
UNIT = 250_000  # bytes: about six units
SMALL = Engine(unit_bytes=UNIT, threads=1)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory, where there is one: a job waits for the disk after every
    file.
    """
    with TemporaryDirectory(dir=memory_folder()) as folder:
        yield Path(folder)


def sequences_of(folder: Path) -> list[Any]:
    store = resume_store(folder)
    return [row for unit in store.plan.units for row in store.sequences(unit.name)]


def states_of(folder: Path, site: str) -> torch.Tensor:
    """All rows of a site, read without the store."""
    parts = []
    for unit in resume_store(folder).plan.units:
        record = json.loads((folder / "commits" / f"{unit.name}.json").read_bytes())
        parts.append(
            load_file(folder / "data" / f"{record['sha256']}.safetensors")[site]
        )
    return torch.cat(parts)


@pytest.fixture
def gpt2(tiny: Callable[..., hs.Model]) -> hs.Model:
    return tiny("gpt2")


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_a_store_holds_what_capture_gives(
    tiny: Callable[..., hs.Model], family: str, tmp_path: Path
) -> None:
    model = tiny(family)
    sites = "encoder.layer.*" if family == "t5" else "layer.*"
    extract(model, TEXTS, tmp_path / "store", sites=sites, engine=SMALL)
    captured = model.capture(TEXTS, sites)
    states = captured.encoder if isinstance(captured, hs.Pair) else captured
    rows = sequences_of(tmp_path / "store")
    assert len(resume_store(tmp_path / "store").plan.units) > 3
    assert [row.text for row in rows] == list(range(len(TEXTS))) and [
        row.string for row in rows
    ] == TEXTS
    assert [token for row in rows for token in row.ids] == states.tokens.ids.tolist()
    assert [
        list(span) for row in rows for span in row.spans
    ] == states.tokens.spans.tolist()
    for site in states.sites:  # batches differ, so the last bits may
        torch.testing.assert_close(
            states_of(tmp_path / "store", str(site)), states[site], rtol=1e-4, atol=1e-4
        )


def test_pooled_and_narrow_states(gpt2: hs.Model, tmp_path: Path) -> None:
    states = gpt2.capture(TEXTS, "layer.2")
    for pool, dtype in (
        ("mean", None),
        ("last", "float16"),
        (0, "bfloat16"),
        (None, "bfloat16"),
    ):
        folder = tmp_path / f"{pool}-{dtype}"
        extract(
            gpt2, TEXTS, folder, sites="layer.2", pool=pool, dtype=dtype, engine=SMALL
        )
        kept = states_of(folder, "layer.2")
        assert kept.dtype == (torch.float32 if dtype is None else getattr(torch, dtype))
        wanted = (
            states["layer.2"]
            if pool is None
            else states.pool("last" if pool == "last" else "mean", "layer.2")
        )
        if pool == 0:
            wanted = states["layer.2"][states.tokens.positions == 0]
        torch.testing.assert_close(kept.float(), wanted, rtol=1e-2, atol=1e-2)


def test_a_token_that_a_text_lacks_is_said_before_the_first_pass(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    texts = [
        "A cat sat on the old mat.",
        "A cat sat on the old mat.",
        "A dog ran over the mat.",
        "x",
    ]
    for pool in (5, -6):
        with pytest.raises(
            TextError,
            match=rf"No token at position {pool} of every text: text 3 has \d tokens",
        ):
            ExtractJob.plan(
                gpt2, texts, tmp_path / "store", pool=pool, engine=Engine(unit_bytes=1)
            )
    with pytest.raises(
        TextError, match=r"the window of text 0 from position \d+ on has \d tokens"
    ):
        ExtractJob.plan(
            gpt2,
            Corpus([" ".join(texts)], window=16, stride=15),
            tmp_path / "store",
            pool=15,
        )
    with pytest.raises(StatesError, match="Cannot pool by cls"):
        ExtractJob.plan(gpt2, texts, tmp_path / "store", pool="cls")
    assert not (tmp_path / "store" / "plan.json").exists()


def test_an_overflow_is_named_by_its_position_in_the_text(tmp_path: Path) -> None:
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    whole = model.encode(
        [text := "the old river runs by the green house under the z"]
    ).ids[0]
    assert whole.count(whole[-1]) == 1
    with torch.no_grad():
        model.module.get_input_embeddings().weight[whole[-1]] = 1e6  # type: ignore[operator]
    with pytest.raises(
        NotFinite, match=f"layer.0, text 1, position {len(whole) - 1}[. ]"
    ):
        extract(
            model,
            Corpus(["a cat", text], window=16, stride=15),
            tmp_path / "store",
            dtype="float16",
            engine=SMALL,
        )


def test_copies_are_computed_once(gpt2: hs.Model, tmp_path: Path) -> None:
    extract(
        gpt2,
        ["A cat.", "A dog.", "A cat.", "A cow.", "A dog."],
        tmp_path / "store",
        engine=SMALL,
    )
    assert [row.text for row in sequences_of(tmp_path / "store")] == [0, 1, 3]
    lines = (tmp_path / "store" / "plan" / "duplicates.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"text": 2, "same_as": 0},
        {"text": 4, "same_as": 1},
    ]
    assert resume_store(tmp_path / "store").plan.corpus["duplicates"] == 2


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_long_texts_are_cut_into_windows_with_true_positions(
    tiny: Callable[..., hs.Model], family: str, tmp_path: Path
) -> None:
    model, text = tiny(family), "".join(f"{number} cats sat. " for number in range(40))
    whole = model.text_encoder.encode_whole([text])
    with pytest.raises(
        TextError,
        match="Text 1 of the corpus: it has .* tokens and .* takes 32. Give a stride",
    ):
        extract(model, Corpus(["A cat.", text], window=32), tmp_path / "store")
    extract(
        model,
        Corpus(["A cat.", text], window=32, stride=20),
        tmp_path / "store",
        engine=SMALL,
    )
    rows = [row for row in sequences_of(tmp_path / "store") if row.text == 1]
    assert [row.start for row in rows] == [
        20 * number for number in range(len(rows))
    ] and len(rows) > 10
    assert [row.string for row in rows] == [text] + [None] * (len(rows) - 1)
    assert whole.spans is not None
    seen = set()
    for row in rows:
        assert len(row.ids) <= 32
        for place, (token, span) in enumerate(
            zip(row.ids, row.spans, strict=True), row.start
        ):
            if span != (-1, -1):  # the frame of every window has no characters
                assert (whole.ids[0][place], whole.spans[0][place]) == (token, span)
                seen.add(place)
    assert seen == {
        place for place, span in enumerate(whole.spans[0]) if span != (-1, -1)
    }


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_every_nth_token_is_kept_with_its_true_position(
    tiny: Callable[..., hs.Model], family: str, tmp_path: Path
) -> None:
    model, long = tiny(family), "".join(f"{number} cats sat. " for number in range(40))
    corpus = Corpus([*TEXTS[:6], TEXTS[1], long, TEXTS[7]], window=32, stride=20)
    whole = extract(
        model, corpus, tmp_path / "1", sites="layer.1,layer.2", engine=SMALL
    )
    for every in (2, 7, 50):  # of a window between 50 and 100 no token is kept
        folder = tmp_path / str(every)
        store = extract(
            model,
            replace(corpus, every=every),
            folder,
            sites="layer.1,layer.2",
            engine=SMALL,
        )
        kept = np.flatnonzero(whole.tokens.positions % every == 0)
        for name in ("text", "positions", "ids", "spans"):
            assert (
                getattr(store.tokens, name).tolist()
                == getattr(whole.tokens, name)[kept].tolist()
            ), name
        assert store.tokens.strings == tuple(whole.tokens.strings[row] for row in kept)
        assert store.tokens.texts == whole.tokens.texts and store.every == every
        for site in ("layer.1", "layer.2"):
            assert np.array_equal(store[site][:], whole[site][kept])
            assert torch.equal(
                torch.cat(list(store.blocks(site, 3))),
                whole.to_states(site).values[0][kept],
            )
        for text in range(9):
            own = kept[whole.tokens.text[kept] == text]
            assert np.array_equal(store.of(text)["layer.2"][:], whole["layer.2"][own])
            assert (
                store.of(text).tokens.positions.tolist()
                == whole.tokens.positions[own].tolist()
            )
        assert store.to_xarray().equals(whole.to_xarray().isel(token=kept))
        assert (
            verify(folder).intact
            and json.loads((folder / "plan.json").read_bytes())["version"] == 2
        )
        with pytest.raises(StoreError, match=rf"every: {every} there, 3 asked"):
            extract(
                model,
                replace(corpus, every=3),
                folder,
                sites="layer.1,layer.2",
                engine=SMALL,
            )
    assert json.loads((tmp_path / "1/plan.json").read_bytes())["version"] == 1


def test_a_store_of_every_nth_token_heals_and_costs_less(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    corpus = Corpus([*TEXTS, TEXTS[0]], every=5)
    job = ExtractJob.plan(
        gpt2, corpus, tmp_path / "store", sites="layer.*", engine=SMALL
    )
    job.run()
    sound = files_of(tmp_path / "store")
    assert (
        5 * job.cost.tokens_kept < 1.2 * job.cost.tokens + 5 * 24
        and "of them kept" in job.cost.lines()[0]
    )
    assert (
        job.cost.bytes
        < ExtractJob.plan(gpt2, TEXTS, tmp_path / "whole", sites="layer.*").cost.bytes
        / 3
    )
    for name in sound:
        damage(tmp_path / "store" / name, "flipped")
        extract(gpt2, corpus, tmp_path / "store", sites="layer.*", engine=SMALL)
        assert files_of(tmp_path / "store") == sound, name
    with pytest.raises(
        PassError,
        match="Cannot use every=5 with pool='mean': a pooled store keeps one vector",
    ):
        extract(gpt2, corpus, tmp_path / "pooled", pool="mean")
    with pytest.raises(TextError, match="every must be at least 1, got 0"):
        Corpus(TEXTS, every=0)


def test_analyses_of_every_nth_token(gpt2: hs.Model, tmp_path: Path) -> None:
    store = extract(
        gpt2, Corpus(TEXTS, every=4), tmp_path / "store", sites="layer.*", engine=SMALL
    )
    assert ", every=4, complete" in repr(store)
    states = store.to_states()
    assert hs.profile(store).facts == hs.profile(states).facts
    labels = [str(number % 2) for number in range(len(TEXTS))]
    assert (
        hs.probe(store, labels, pool="mean").facts
        == hs.probe(states, labels, pool="mean").facts
    )
    for token in ("last", -1):
        with pytest.raises(
            StatesError,
            match=(
                "the store keeps positions 0, 4, 8 and so on, and the last may not be"
            ),
        ):
            hs.probe(store, labels, pool=token)
    with pytest.raises(
        StatesError,
        match="No token at position 3 of every text: the store keeps positions 0, 4, 8",
    ):
        hs.probe(store, labels, pool=3)
    rows = labelled_rows(store, "position", "regress", "layer.*", None, False)
    assert rows.labels == store.tokens.positions.tolist() and {
        label % 4 for label in rows.labels
    } == {0}
    with pytest.raises(StatesError):  # no token has its neighbour here
        hs.probe(hs.each_token(store), "previous-token")


@pytest.mark.parametrize("every", [2, 3, 4])
def test_a_position_that_every_nth_token_keeps(
    gpt2: hs.Model, tmp_path: Path, every: int
) -> None:
    whole = extract(gpt2, TEXTS, tmp_path / "whole", sites="layer.2", engine=SMALL)
    store = extract(
        gpt2,
        Corpus(TEXTS, every=every),
        tmp_path / "store",
        sites="layer.2",
        engine=SMALL,
    )
    shortest = int(whole.tokens.lengths.min())
    assert shortest > every
    for position in range(0, shortest, every):
        found, right = (
            vectors(one, sites="layer.2", pool=position).values
            for one in (store, whole)
        )
        torch.testing.assert_close(found, right)
    longest = int(store.tokens.positions.max())
    with pytest.raises(
        TextError,
        match=(
            f"No token at position {longest} of every text: text [0-9]+ ends before it"
        ),
    ):
        vectors(store, sites="layer.2", pool=longest)


def test_the_kept_positions_of_windows(gpt2: hs.Model, tmp_path: Path) -> None:
    # The windows begin at 0, 16, 32.
    corpus = Corpus(["A cat sat. " * 40], window=32, stride=16, every=5)
    store = extract(gpt2, corpus, tmp_path / "store", sites="layer.2")
    for position in (0, 5, 30, 35, 60):  # in the first window, and in later ones
        row = int(np.flatnonzero(store.tokens.positions == position)[0])
        found = vectors(store, sites="layer.2", pool=position).values
        assert np.array_equal(found[0].numpy(), store["layer.2"][[row]])
    with pytest.raises(
        StatesError,
        match=(
            "No token at position 36 of every text: the store keeps positions 0, 5, 10"
        ),
    ):
        vectors(store, sites="layer.2", pool=36)


def test_a_text_of_very_many_characters_is_cut_as_any_other(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = [
        "A cat sat.",
        " ".join(TEXTS),
        "The rest.",
        "A dog ran.",
        " ".join(TEXTS[:9]),
        TEXTS[0],
    ]
    plans = []
    for name, most in (("whole", planning.CHUNK_CHARACTERS), ("alone", 12)):
        monkeypatch.setattr(planning, "CHUNK_CHARACTERS", most)
        extract(
            gpt2,
            Corpus(corpus, window=24, stride=20),
            tmp_path / name,
            sites="layer.1",
            engine=SMALL,
        )
        plans.append(files_of(tmp_path / name))
    assert plans[0] == plans[1]
    assert {
        sequence.text for sequence in sequences_of(tmp_path / "alone") if sequence.start
    } == {1, 4}


def test_a_stride_that_would_leave_tokens_out_is_refused(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    with pytest.raises(TextError, match="would leave tokens out"):
        extract(
            gpt2, Corpus(["A cat sat. " * 40], window=32, stride=32), tmp_path / "store"
        )


def test_folders_files_and_streams_are_one_corpus(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden.txt").write_text("Not this.\n")
    (folder / "notes.md").write_text("Nor this.\n")
    (folder / "a.txt").write_text("\n".join(TEXTS[:10]))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[10:])
    (folder / "b" / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    extract(gpt2, TEXTS, tmp_path / "list", engine=SMALL)
    extract(gpt2, folder, tmp_path / "folder", engine=SMALL)
    extract(gpt2, (text for text in TEXTS), tmp_path / "stream", engine=SMALL)
    assert (
        files_of(tmp_path / "list")
        == files_of(tmp_path / "folder")
        == files_of(tmp_path / "stream")
    )


def test_broken_rows_are_named_or_counted(gpt2: hs.Model, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(
        b'{"text": "A cat."}\n{"text": "A d\n{"text": "\xff"}\n{"text": "A cow."}\n'
    )
    with pytest.raises(TextError, match="Line 2 of corpus.jsonl: it is not JSON"):
        extract(gpt2, path, tmp_path / "store")
    assert not (tmp_path / "store" / "plan.json").exists()
    extract(gpt2, Corpus(path, skip_bad=True), tmp_path / "store")
    corpus = resume_store(tmp_path / "store").plan.corpus
    assert (corpus["count"], corpus["skipped"]) == (2, 2)
    assert [line.partition(":")[0] for line in corpus["skipped_rows"]] == [
        "Line 2 of corpus.jsonl",
        "Line 3 of corpus.jsonl",
    ]


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("empty.txt", b"", "No texts: the corpus is empty"),
        ("junk.jsonl", bytes(range(256)) * 9, "Line 1 of junk.jsonl: it is not JSON"),
        ("junk.parquet", b"PAR1 nothing", "Cannot read junk.parquet"),
        ("bomb.txt.gz", gzip.compress(b"a" * 2**25, mtime=0), "as no text does"),
        ("bomb.txt.zst", zstandard.compress(b"a" * 2**25), "as no text does"),
    ],
)
def test_a_corpus_that_cannot_be_read_leaves_no_store(
    gpt2: hs.Model, tmp_path: Path, name: str, data: bytes, what: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises((TextError, FileError), match=what):
        extract(gpt2, tmp_path / name, tmp_path / "store")
    with pytest.raises(StoreError, match=r"it has no plan\.json"):
        resume_store(tmp_path / "store")
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_a_job_that_was_stopped_goes_on_and_another_is_refused(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    extract(gpt2, TEXTS, tmp_path / "whole", engine=SMALL)
    begun = ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=SMALL)

    def stop(now: JobProgress) -> None:
        if now.units_done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begun.run(stop)
    left = len(resume_store(tmp_path / "store").pending())
    assert 0 < left < len(begun.writer.plan.units)
    assert (
        f"{len(begun.writer.plan.units) - left} of {len(begun.writer.plan.units)} units"
        " are kept" in begun.how_to_resume()
    )
    other: Any
    for other, what in (
        ({"sites": "layer.1"}, "sites: .* there"),
        ({"dtype": "float16"}, "dtype: float32 there, float16 asked"),
        ({"engine": Engine(threads=2)}, "environment.threads: 1 there, 2 asked"),
        (
            {"engine": Engine(unit_bytes=2 * UNIT)},
            f"environment.unit_bytes: {UNIT} there, {2 * UNIT} asked",
        ),
        ({"corpus": TEXTS[1:]}, "corpus.count: 24 there, 23 asked"),
        ({"corpus": Corpus(TEXTS, window=64)}, "corpus.window: 128 there, 64 asked"),
        (
            {"model": hs.load((tiny_model("gpt2", seed=1), tiny_tokenizer()))},
            "model.weights: .* there",
        ),
        (
            {"model": hs.load((tiny_model("gpt2"), tiny_tokenizer(bos=False)))},
            "tokenizer.sha256: .* there",
        ),
    ):
        with pytest.raises(StoreError, match=what):
            extract(
                **{"model": gpt2, "corpus": TEXTS, "to": tmp_path / "store"} | other
            )
    # With as many threads, and units of the size, that it was begun with.
    extract(gpt2, TEXTS, tmp_path / "store")
    assert files_of(tmp_path / "store") == files_of(tmp_path / "whole")


def damage(path: Path, how: str) -> None:
    """Delete a file, flip a bit in the middle of it, or cut it off there."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if how == "deleted":
        path.unlink()
    elif how == "cut off":
        path.write_bytes(content[:middle])
    else:
        content[middle] ^= 4
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["deleted", "flipped", "cut off"])
def test_the_same_job_again_heals_whatever_file_is_damaged(
    gpt2: hs.Model, tmp_path: Path, how: str
) -> None:
    corpus = [*TEXTS[:12], TEXTS[0]]  # a copy too

    def again() -> None:  # a stream, which can be read once
        extract(
            gpt2,
            iter(corpus),
            tmp_path / "store",
            sites="layer.1",
            engine=Engine(unit_bytes=30_000, threads=1),
        )

    again()
    sound = files_of(tmp_path / "store")
    assert len(resume_store(tmp_path / "store").plan.units) > 1
    for name in sound:
        damage(tmp_path / "store" / name, how)
        if name not in ("plan.json", "complete.json") or how != "deleted":
            assert not verify(tmp_path / "store").intact, name
        again()
        assert (
            files_of(tmp_path / "store") == sound and verify(tmp_path / "store").intact
        ), name


def test_the_same_job_again_heals_many_files_and_lost_folders(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    def again(**options: Any) -> None:
        extract(
            gpt2,
            TEXTS,
            tmp_path / "store",
            sites="layer.1",
            engine=Engine(threads=1, **options),
        )

    again(unit_bytes=UNIT // 4)
    sound, store = files_of(tmp_path / "store"), tmp_path / "store"
    for names in (
        ["plan"],
        ["data"],
        ["commits"],
        ["plan", "commits", "complete.json"],
        ["data", "tmp"],
    ):
        for name in names:
            (
                shutil.rmtree(store / name)
                if (store / name).is_dir()
                else (store / name).unlink()
            )
        again()  # with units of another size, which the plan decides
        assert files_of(store) == sound and verify(store).intact, names
    for number, name in enumerate(sorted(sound)):
        if name not in ("plan.json", "complete.json"):
            damage(store / name, ("deleted", "flipped", "cut off")[number % 3])
    again()
    assert files_of(store) == sound and verify(store).intact


def test_a_store_that_does_not_say_how_large_its_units_are_goes_on(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = planning.environment
    with monkeypatch.context() as patch:  # as an earlier hiddenscope planned it
        patch.setattr(
            planning, "environment", lambda model, threads, _: own(model, threads, {})
        )
        begun = ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=SMALL)
    assert "unit_bytes" not in begun.writer.plan.environment
    with pytest.raises(
        StoreError, match=f"environment.unit_bytes: nothing there, {UNIT} asked"
    ):
        extract(gpt2, TEXTS, tmp_path / "store", engine=SMALL)
    assert (
        len(extract(gpt2, TEXTS, tmp_path / "store").units)
        == len(begun.writer.plan.units)
        > 1
    )


def test_a_store_in_the_making_heals_too(gpt2: hs.Model, tmp_path: Path) -> None:
    extract(gpt2, TEXTS, tmp_path / "whole", engine=SMALL)
    begun = ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=SMALL)
    for unit in begun.pending[:3]:
        with Pipeline(gpt2, begun.writer, lambda done: None) as pipeline:
            pipeline.put(unit)
    damage(tmp_path / "store/commits/000000.json", "flipped")
    damage(tmp_path / "store/plan/000004.jsonl", "deleted")
    record = json.loads((tmp_path / "store/commits/000001.json").read_bytes())
    damage(tmp_path / f"store/data/{record['sha256']}.safetensors", "cut off")
    again = ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=SMALL)
    assert again.cost.damaged == ("plan/000004.jsonl", "unit 000000", "unit 000001")
    assert (
        again.cost.lines()[-1]
        == "damaged, and made again: plan/000004.jsonl, unit 000000, unit 000001"
    )
    assert again.cost.units_left == again.cost.units - 1
    again.run()
    assert files_of(tmp_path / "store") == files_of(tmp_path / "whole")


def test_texts_that_cannot_be_made_again_are_refused(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(gpt2, TEXTS, tmp_path / "store", engine=SMALL)
    before = files_of(tmp_path / "store")
    for name, reason in (
        ("plan/000001.jsonl", "texts of . units, the first is"),
        ("plan.json", "is of plan"),
    ):
        content = (tmp_path / "store" / name).read_bytes()
        damage(tmp_path / "store" / name, "deleted")
        # As another version of hiddenscope might batch them.
        with monkeypatch.context() as patch:
            patch.setitem(inputs.BATCH_TOKENS, "cpu", 40)
            with pytest.raises(StoreError, match=reason):
                extract(gpt2, TEXTS, tmp_path / "store", engine=SMALL)
        with pytest.raises(
            StoreError,
            match=r"corpus.count: 24 there, 23 asked" if "/" in name else reason,
        ):
            extract(gpt2, TEXTS[1:], tmp_path / "store", engine=SMALL)
        (tmp_path / "store" / name).write_bytes(content)
    assert files_of(tmp_path / "store") == before and verify(tmp_path / "store").intact


def test_two_jobs_on_one_store_at_once(tmp_path: Path) -> None:
    models = [hs.load((tiny_model("gpt2"), tiny_tokenizer())) for _ in range(2)]
    extract(models[0], TEXTS, tmp_path / "alone", engine=SMALL)
    errors: list[Exception] = []

    def work(model: hs.Model) -> None:
        try:
            extract(model, TEXTS, tmp_path / "store", engine=SMALL)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert files_of(tmp_path / "store") == files_of(tmp_path / "alone")


def test_workers_give_the_same_bytes_and_one_that_stands_still_or_dies_is_replaced(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "PATIENCE", 0.5)
    extract(gpt2, TEXTS, tmp_path / "alone", engine=SMALL)
    killed, bystanders = list[int](), list[subprocess.Popen[bytes]]()

    def disturb(now: JobProgress) -> None:
        # Another child, as a browser may be.
        bystanders.append(subprocess.Popen(["sleep", "600"]))
        ours = kills.workers(besides=killed)
        if now.units_done in (1, 2) and ours:
            os.kill(ours[0], signal.SIGSTOP if now.units_done == 1 else signal.SIGKILL)
            killed.append(ours[0])

    begun = ExtractJob.plan(
        gpt2,
        TEXTS,
        tmp_path / "store",
        engine=Engine(workers=2, threads=1, unit_bytes=UNIT),
    )
    begun.run(disturb)
    assert len(killed) == 2
    assert files_of(tmp_path / "store") == files_of(tmp_path / "alone")
    assert kills.workers() == []
    assert [bystander.poll() for bystander in bystanders] == [None] * len(bystanders)
    for bystander in bystanders:
        bystander.kill()
        bystander.wait()


STAND_IN = """
import json, sys
from hiddenscope.workers import parent_channel
from tests.places import ROOT
channel, heard = parent_channel(), []
while (frame := channel.receive()) is not None:
    heard.append(json.dumps(frame.header) + "\\n")
    with open(sys.argv[1], "w") as file:
        file.writelines(heard)
    if len(heard) == 1:
        channel.send({"type": "ready"})
"""


def standing_in(heard: Path) -> WorkerProcess:
    """A process that says that it is ready, writes down what it is sent, and ends when
    its pipe is closed.
    """
    return WorkerProcess(["-c", STAND_IN, str(heard)])


def test_a_worker_that_is_started_while_the_job_ends_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, started = (
        schedule.Schedule(["000000"], lambda done: None),
        list[WorkerProcess](),
    )

    def start_late(log: Any) -> WorkerProcess:
        # Another worker has committed the last unit meanwhile.
        planned.done(compute.Done("000000", 1, 1, 0.0, True))
        started.append(standing_in(tmp_path / "heard"))
        return started[-1]

    monkeypatch.setattr(local, "_start", start_late)
    served = local._Supervisor(planned, {}, lambda tokens: None)
    served.start()
    served.join(60)
    try:
        assert not served.is_alive() and started[0].poll() is not None
    finally:
        started[0].kill()


def test_a_unit_that_was_meant_for_a_dead_worker_never_precedes_the_order_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, started = (
        schedule.Schedule(["000000"], lambda done: None),
        list[WorkerProcess](),
    )
    take, send, second, sent = (
        planned.take,
        WorkerProcess.send,
        threading.Event(),
        threading.Event(),
    )

    def start(log: Any) -> WorkerProcess:
        started.append(standing_in(tmp_path / str(len(started))))
        return started[-1]

    def take_late(holder: Any) -> str | None:
        # It dies while a unit is taken for it; there is time for another to be started.
        if len(started) == 1:
            started[0].kill()
            second.wait(1)
        return take(holder)

    def send_late(process: WorkerProcess, message: Any) -> None:
        if "unit" not in message and len(started) == 2:
            second.set()
            sent.wait(1)  # time for whoever sends a unit without waiting for this
        send(process, message)
        if "unit" in message and len(started) == 2:
            sent.set()

    monkeypatch.setattr(planned, "take", take_late)
    monkeypatch.setattr(local, "_start", start)
    monkeypatch.setattr(WorkerProcess, "send", send_late)
    served = local._Supervisor(planned, {"order": 1}, lambda tokens: None)
    served.start()
    assert sent.wait(60)
    until = time.monotonic() + 60
    while not (tmp_path / "1").exists() or (
        (tmp_path / "1").read_text().count("\n") < 2
    ):
        assert time.monotonic() < until
        time.sleep(0.05)
    planned.done(compute.Done("000000", 1, 1, 0.0, True))
    served.end()
    assert (tmp_path / "1").read_text().splitlines() == [
        '{"order": 1}',
        '{"unit": "000000"}',
    ]


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=long)])
def test_an_error_of_a_worker_is_the_jobs(tmp_path: Path, workers: int | None) -> None:
    module = tiny_model("gpt2")
    with torch.no_grad():
        module.get_parameter("transformer.h.1.mlp.c_proj.bias").fill_(1e6)
    model = hs.load((module, tiny_tokenizer()))
    engine = SMALL
    if workers is not None:
        engine = Engine(workers=workers, unit_bytes=UNIT)
    with pytest.raises(NotFinite, match=r"layer.2, text \d+, position"):
        extract(
            model,
            TEXTS,
            tmp_path / "store",
            sites="layer.*",
            dtype="float16",
            engine=engine,
        )


def test_too_little_room_is_said_before_the_first_pass(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "free_on_disk", lambda path: 10_000)
    with pytest.raises(FileError, match=r"it takes 1.4 MB, and 10.0 kB are free there"):
        extract(gpt2, TEXTS, tmp_path / "store")
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_a_full_disk_stops_a_job_and_it_goes_on_when_there_is_room(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    extract(gpt2, TEXTS, tmp_path / "whole", engine=SMALL)
    begun, before = (
        ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=SMALL),
        getrlimit(RLIMIT_FSIZE),
    )

    def fill(now: JobProgress) -> None:
        setrlimit(RLIMIT_FSIZE, (UNIT // 2, before[1]))

    try:
        with pytest.raises(FileError, match="then go on"):
            begun.run(fill)
    finally:
        setrlimit(RLIMIT_FSIZE, before)
    assert (
        0
        < len(resume_store(tmp_path / "store").pending())
        < len(begun.writer.plan.units)
    )
    extract(gpt2, TEXTS, tmp_path / "store", engine=SMALL)
    assert files_of(tmp_path / "store") == files_of(tmp_path / "whole")


@pytest.fixture(scope="module")
def starved() -> dict[str, list[str]]:
    """What the jobs of `tests.starved` ended with, by what they had too little of."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-m", "tests.starved", "descriptors", "memory"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ended: dict[str, list[str]] = {"descriptors": [], "memory": []}
    for line in done.stdout.splitlines():
        what, _, how = line.partition(": ")
        ended[what].append(how)
    return ended


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells what a process has, and limits it"
)
@pytest.mark.parametrize(
    ("what", "error", "reason"),
    [
        ("descriptors", "FileError True", "too many files are open"),
        ("memory", "TooLarge True", "memory ran out"),
    ],
)
def test_too_few_descriptors_or_too_little_memory_is_an_error_of_ours(
    what: str, error: str, reason: str, starved: dict[str, list[str]]
) -> None:
    ended = starved[what]
    stopped = [line for line in ended if line != "done"]
    assert stopped and all(
        line.startswith(error) and reason in line for line in stopped
    ), ended
    assert what == "memory" or ended[-1] == "done"


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_node_of_a_ray_cluster_is_killed_and_the_store_is_the_same() -> None:
    command = [sys.executable, "-m", "chaos", "nodes", "--count", "1"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.stderr.rstrip().endswith(NOT_STARTED):
        pytest.skip(
            f"{NOT_STARTED}, and a busy one may be the reason: {done.stderr[-500:]}"
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nodes: 1 nodes of a Ray cluster killed" in done.stdout


def test_a_folder_that_cannot_be_written_is_refused(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="no folder"):
        extract(gpt2, TEXTS, tmp_path / "file" / "store")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(StoreError, match=r"such as thesis\.txt"):
        extract(gpt2, TEXTS, tmp_path / "other")
    if os.geteuid() != 0:  # to whom nothing is read-only
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(FileError, match="read-only"):
            extract(gpt2, TEXTS, tmp_path / "closed" / "store")


def test_what_cannot_be_extracted_is_said(
    tiny: Callable[..., hs.Model], tmp_path: Path
) -> None:
    t5 = tiny("t5")
    of_encoder = extract(t5, TEXTS, tmp_path / "encoder", sites="layer.*,final")
    assert of_encoder.sites == t5.anatomy.select("encoder.layer.*,encoder.final")
    with pytest.raises(
        PassError, match="the decoder reads targets, and a corpus has none"
    ):
        extract(t5, TEXTS, tmp_path / "store", sites="decoder.layer.*")
    with pytest.raises(PassError, match="No pooling 'median'"):
        extract(t5, TEXTS, tmp_path / "store", pool="median")
    with pytest.raises(ArgumentError, match="No engine 'spark'"):
        extract(t5, TEXTS, tmp_path / "store", engine="spark")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="workers must be at least 1"):
        Engine(workers=0)
    with pytest.raises(TextError, match="stride must be at least 1"):
        Corpus(TEXTS, stride=0)


def test_a_slow_disk_slows_the_pass_and_memory_stays_bounded(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=SMALL)
    held, most, at_once = set[str](), [0], [0]
    release, writing = threading.Event(), set[str]()
    commit, put = planned.writer.commit, Pipeline._hand_over

    def slow(unit: str, values: Any) -> bool:
        writing.add(unit)
        at_once[0] = max(at_once[0], len(writing))
        release.wait()
        writing.discard(unit)
        held.discard(unit)
        return commit(unit, values)

    def counted(self: Pipeline, unit: str, computed: Any) -> None:
        held.add(unit)
        most[0] = max(most[0], len(held))
        if len(held) == 3:
            threading.Thread(target=release_later).start()
        put(self, unit, computed)

    def release_later() -> None:
        while len(writing) < 2:
            time.sleep(0.01)
        time.sleep(0.3)  # time enough for a fourth, if nothing kept the pass back
        release.set()

    monkeypatch.setattr(planned.writer, "commit", slow)
    monkeypatch.setattr(Pipeline, "_hand_over", counted)
    planned.run()
    assert most[0] == 3 and at_once[0] == 2


def test_units_use_the_same_memory_one_after_another(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = texts(60)
    planned = ExtractJob.plan(gpt2, given, tmp_path / "store", engine=SMALL)
    allocate, sizes = buffers._in_huge_pages, []

    def allocating(size: int) -> torch.Tensor:
        sizes.append(size)
        return allocate(size)

    monkeypatch.setattr(buffers, "_in_huge_pages", allocating)
    planned.run()
    assert (
        len(planned.writer.plan.units) > 9 > len(sizes) and sizes.count(max(sizes)) <= 3
    )
    store = hs.open(tmp_path / "store")
    for text in range(0, 60, 7):
        torch.testing.assert_close(
            store.of(text).to_states().values, gpt2.capture(given[text]).values
        )


def test_the_texts_of_a_unit_are_read_once(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, seen = writer.read_sequences, []

    def reading(folder: Any, unit: Any) -> Any:
        seen.append(unit.name)
        return read(folder, unit)

    monkeypatch.setattr(writer, "read_sequences", reading)
    planned = ExtractJob.plan(
        gpt2, texts(12), tmp_path / "store", engine=Engine(unit_bytes=20_000)
    )
    planned.run()
    assert len(seen) > 3 and sorted(seen) == [
        unit.name for unit in planned.writer.plan.units
    ]


def test_progress_adds_up(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        ExtractJob.plan(gpt2, TEXTS, tmp_path / "small", engine=SMALL).cost.seconds
        is None
    )
    monkeypatch.setattr(compute, "WORTH_TIMING", 1)
    planned, seen = (
        ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=SMALL),
        list[JobProgress](),
    )
    planned.run(seen.append)
    last, cost = seen[-1], planned.cost
    assert [now.units_done for now in seen] == list(range(1, cost.units + 1))
    assert last.tokens_done == last.tokens == cost.tokens and last.seconds_left == 0
    on_disk = sum(
        path.stat().st_size for path in (tmp_path / "store" / "data").iterdir()
    )
    assert last.bytes_written < on_disk < cost.bytes
    assert (
        cost.seconds is not None
        and last.share_of_bare_pass is not None
        and "of the bare pass" in last.line()
    )
    assert json.loads(json.dumps(last.to_json()))["units"] == cost.units


def test_a_short_last_batch_is_not_what_is_timed(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU would wait most of the time, and seem a thousand times too slow."""
    timed: list[int] = []

    def batches(sequences: Sequence[Any]) -> list[list[int]]:
        order = sorted(range(len(sequences)), key=lambda at: -len(sequences[at].ids))
        return [order[:-1], order[-1:]]

    def run_bare(model: hs.Model, inputs: Any, batches: Any, spec: Any) -> None:
        timed.append(len(batches[0]))

    monkeypatch.setattr(compute, "WORTH_TIMING", 1)
    monkeypatch.setattr(compute, "_batches", batches)
    monkeypatch.setattr(compute, "run_bare", run_bare)
    texts = ["a", *(f"{'the cat ' * 12}{number}" for number in range(20))]
    assert ExtractJob.plan(gpt2, texts, tmp_path / "store").cost.seconds is not None
    assert timed[-1] == 20


@pytest.mark.parametrize(
    ("pool", "workers"),
    [
        (None, None),
        ("mean", None),
        pytest.param(None, 2, marks=long),
    ],
)
def test_progress_counts_the_tokens_of_every_batch(
    tmp_path: Path, gpt2: hs.Model, pool: str | None, workers: int | None
) -> None:
    """Also within a unit, of which there is one here; a worker tells of its own."""
    engine, seen = Engine(workers=workers, threads=1), list[JobProgress]()
    planned = ExtractJob.plan(
        gpt2, texts(400), tmp_path / "store", pool=pool, engine=engine
    )
    assert planned.cost.units == 1
    planned.run(seen.append, every_batch=True)
    computed = [now.tokens_computed for now in seen]
    assert len(seen) > 3 and computed == sorted(computed)
    # One report a batch, and one for the unit.
    assert len(set(computed[:-1])) == len(seen) - 1
    assert [now.units_done for now in seen] == [0] * (len(seen) - 1) + [1]
    assert computed[-1] == seen[-1].tokens_done == planned.cost.tokens
    first = seen[0]
    assert (
        first.tokens_done == 0
        and first.seconds_left is not None
        and first.seconds_left > 0
    )
    assert (
        f"{first.tokens_computed:,} of {first.tokens:,} tokens, 0 of 1 units kept"
        in first.line()
    )


def test_on_a_cpu_a_unit_is_so_much_work(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model fewer tokens are at stake; the same job has the same units each
    time that it is planned.
    """
    blocks = sum(
        weight.numel()
        for block in gpt2.module.transformer.h[:2]
        for weight in block.parameters()
    )  # type: ignore[union-attr]
    monkeypatch.setattr(planning, "MIN_UNIT_TOKENS", 50)
    monkeypatch.setattr(planning, "UNIT_WORK", 2 * blocks * 120)
    limits = {}
    for sites in ("layer.1", "layer.2"):
        folder = tmp_path / sites
        planned = ExtractJob.plan(
            gpt2, TEXTS, folder, sites=sites, engine=Engine(threads=1)
        )
        again = ExtractJob.plan(
            gpt2,
            TEXTS,
            tmp_path / f"{sites} again",
            sites=sites,
            engine=Engine(threads=1),
        )
        assert planned.writer.plan == again.writer.plan
        assert "unit_tokens" not in planned.writer.plan.environment
        longest = max(len(sequence.ids) for sequence in sequences_of(folder))
        sizes = [unit.tokens for unit in planned.writer.plan.units]
        limits[sites] = 120 if sites == "layer.2" else 240
        assert len(sizes) > 2
        assert all(
            limits[sites] <= size < limits[sites] + longest for size in sizes[:-1]
        )
    monkeypatch.setattr(planning, "UNIT_WORK", 1)
    smallest = ExtractJob.plan(
        gpt2, TEXTS, tmp_path / "smallest", engine=Engine(threads=1)
    ).writer.plan.units
    assert all(50 <= unit.tokens < 50 + longest for unit in smallest[:-1])


def test_units_of_so_many_tokens_are_part_of_the_plan(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    chosen = Engine(threads=1, unit_tokens=100)
    planned = ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=chosen)
    assert (
        planned.writer.plan.environment["unit_tokens"] == 100 and planned.cost.units > 3
    )
    extract(gpt2, TEXTS, tmp_path / "store")  # as it was begun
    with pytest.raises(
        StoreError, match=r"environment.unit_tokens: 100 there, 200 asked"
    ):
        extract(gpt2, TEXTS, tmp_path / "store", engine=Engine(unit_tokens=200))
    extract(gpt2, TEXTS, tmp_path / "other", engine=Engine(threads=1))
    with pytest.raises(
        StoreError, match=r"environment.unit_tokens: nothing there, 100 asked"
    ):
        extract(gpt2, TEXTS, tmp_path / "other", engine=chosen)
    with pytest.raises(ArgumentError, match="unit_tokens must be at least 1"):
        Engine(unit_tokens=0)


def test_what_an_interrupted_command_kept_is_not_computed_again(
    saved: str, tmp_path: Path
) -> None:
    """Ctrl-C to the real command, once a unit is kept; the store is then byte for byte
    that of an undisturbed job.
    """
    (tmp_path / "corpus.txt").write_text("\n".join(texts(150)))
    words = [
        "extract",
        str(tmp_path / "corpus.txt"),
        "--model",
        saved,
        "--threads",
        "1",
        "--unit-tokens",
        "100",
    ]
    program = (
        "import sys; from hiddenscope.cli.main import main; sys.argv[0] ="
        " 'hiddenscope'; main()"
    )

    commits = tmp_path / "stopped" / "commits"
    command = [sys.executable, "-c", program, *words, "--to", str(commits.parent)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not commits.is_dir() or len(list(commits.glob("0*.json"))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    message = process.communicate()[1]
    assert process.returncode == 130
    kept = len(list(commits.glob("0*.json")))
    units = len(resume_store(tmp_path / "stopped").plan.units)
    assert 2 <= kept < units and f"{kept:,} of {units:,} units are kept" in message
    for folder in ("stopped", "whole"):
        done = runner.invoke(cli.app, [*words, "--to", str(tmp_path / folder)])
        assert done.exit_code == 0, done.output
    assert files_of(tmp_path / "stopped") == files_of(tmp_path / "whole")


def test_a_tokenizer_is_itself_whatever_it_was_asked(gpt2: hs.Model) -> None:
    tokenizer: Any = tiny_tokenizer()
    before = tokenizer_identity(tokenizer)
    tokenizer(
        "A cat sat on the mat.", truncation=True, max_length=4, padding="max_length"
    )
    assert (
        tokenizer_identity(tokenizer)
        == before
        != tokenizer_identity(tiny_tokenizer(bos=False))
    )


def test_many_texts_are_told_apart_on_disk() -> None:
    with SeenTexts() as index:
        firsts = [index.first(str(number % 1000), number) for number in range(3000)]
        assert firsts == [number % 1000 for number in range(3000)]
        assert len(list(index.duplicates())) == 2000 and index.new == 1000


def test_jobs_that_are_killed_again_and_again_end_as_one_that_was_not(
    tmp_path: Path,
) -> None:
    times = 20 if THOROUGH else 8
    killed, completed, wrong = kills.kill_jobs(times, tmp_path / "jobs")
    assert (killed, wrong) == (times, []) and completed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("gpt2").save_pretrained(folder)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_the_command_says_what_it_does(saved: str, tmp_path: Path) -> None:
    words = [
        "extract",
        "cities-incomplete",
        "--to",
        str(tmp_path / "store"),
        "--model",
        saved,
        "--sites",
        "layer.1",
    ]
    done = runner.invoke(
        cli.app, [*words, "--json", "--out", str(tmp_path / "job.json")]
    )
    assert done.exit_code == 0, done.output
    events = [json.loads(line) for line in done.stdout.splitlines()]
    names = [event["event"] for event in events]
    assert (
        names[0] == "cost" and set(names[1:-1]) == {"progress"} and names[-1] == "end"
    )
    assert events[0]["texts"] == 50 and events[-1]["units_pending"] == 0
    assert (
        json.loads((tmp_path / "job.json").read_text())["tokens_done"]
        == events[0]["tokens"]
    )
    again = runner.invoke(cli.app, words)
    assert (
        again.exit_code == 0
        and "1 unit," in again.stdout
        and "1 are there already" in again.stderr
    )
    other = runner.invoke(cli.app, [*words, "--store-dtype", "bfloat16"])
    assert (
        other.exit_code == 2 and "dtype: float32 there, bfloat16 asked" in other.stderr
    )


def test_the_command_reads_stdin_and_names_what_it_left_out(
    saved: str, tmp_path: Path
) -> None:
    lines = b'{"body": "A cat."}\nno JSON\n{"body": "A dog."}\n'
    words = [
        "extract",
        "-.jsonl",
        "--to",
        str(tmp_path / "store"),
        "--model",
        saved,
        "--text",
        "body",
    ]
    done = runner.invoke(cli.app, words, input=lines)
    assert done.exit_code == 2 and "Line 2 of stdin: it is not JSON" in done.stderr
    done = runner.invoke(cli.app, [*words, "--skip-bad"], input=lines)
    assert (
        done.exit_code == 0
        and "left out: Line 2 of stdin" in done.stderr
        and "2 texts" in done.stderr
    )


def test_an_interrupted_command_says_how_to_go_on(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(job: ExtractJob, report: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    words = [
        "extract",
        "cities-incomplete",
        "--to",
        str(tmp_path / "store"),
        "--model",
        saved,
        "--sites",
        "layer.1",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(ExtractJob, "run", interrupted)
        done = runner.invoke(cli.app, words)
    assert (
        done.exit_code == 130
        and "0 of 1 units are kept" in done.stderr
        and "same command again" in done.stderr
    )
    assert runner.invoke(cli.app, words).exit_code == 0

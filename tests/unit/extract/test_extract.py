"""Extract: a store holds the states that capture gives, of whatever corpus."""

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.analyses.probe.labels import labelled_rows
from hiddenscope.errors import (
    ArgumentError,
    FileError,
    NotFinite,
    PassError,
    StatesError,
    StoreError,
    TextError,
)
from hiddenscope.extract import Corpus, Engine, ExtractJob, extract, planning
from hiddenscope.extract.planning import tokenizer_identity
from hiddenscope.store import resume_store, verify
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.vectors import vectors
from labs.chaos.kills import UNIT_BYTES, files_of, texts

Tiny = Callable[..., hs.Model]

TEXTS = texts()
SMALL = Engine(unit_bytes=UNIT_BYTES, threads=1)  # about six units
LONG = "".join(f"{number} cats sat. " for number in range(40))


def sequences_of(folder: Path) -> list[Any]:
    store = resume_store(folder)
    return [row for unit in store.plan.units for row in store.sequences(unit.name)]


def assert_no_store(folder: Path) -> None:
    with pytest.raises(StoreError, match=r"it has no plan\.json|no such folder"):
        resume_store(folder)
    assert [path for path in folder.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_a_store_holds_what_capture_gives(
    tiny: Tiny, family: str, tmp_path: Path
) -> None:
    model = tiny(family)
    # Of two stacks it is the encoder's sites.
    sites = "layer.*,final" if family == "t5" else "layer.*"
    store = extract(model, TEXTS, tmp_path, sites=sites, engine=SMALL)
    captured = model.capture(TEXTS, store.sites)
    states = captured.encoder if isinstance(captured, hs.Pair) else captured
    assert len(store.units) > 3
    assert store.sites == states.sites
    assert store.tokens.equals(states.tokens)
    # Batches differ, so the last bits may.
    torch.testing.assert_close(
        store.to_states().values, states.values, rtol=1e-4, atol=1e-4
    )


def test_pooled_and_narrow_states(gpt2: hs.Model, tmp_path: Path) -> None:
    states = gpt2.capture(TEXTS, "layer.2")
    first = states["layer.2"][states.tokens.positions == 0]
    for pool, dtype, wanted in (
        ("mean", None, states.pool("mean", "layer.2")),
        ("last", "float16", states.pool("last", "layer.2")),
        (0, "bfloat16", first),
        (None, "bfloat16", states["layer.2"]),
    ):
        folder = tmp_path / f"{pool}-{dtype}"
        options: Any = {"sites": "layer.2", "pool": pool, "dtype": dtype}
        store = extract(gpt2, TEXTS, folder, engine=SMALL, **options)
        kept = torch.cat(list(store.blocks("layer.2")))
        assert kept.dtype == getattr(torch, dtype or "float32")
        torch.testing.assert_close(kept.float(), wanted, rtol=1e-2, atol=1e-2)


def test_a_store_of_sites_whose_widths_differ(tiny: Tiny, tmp_path: Path) -> None:
    model, sites = tiny("deepseek_v4"), ["layer.0", "layer.3", "final"]
    some = [f"text {number} of it" + " and on" * (number % 5) for number in range(9)]
    store = extract(model, some, tmp_path / "store", sites=sites)
    assert store.plan.widths == {"layer.0": 256, "layer.3": 256, "final": 64}
    assert store.plan.version == 1
    states, whole = model.capture(some, sites), store.to_states()
    pooled = extract(
        model, some, tmp_path / "pooled", sites=sites, pool="mean", dtype="bfloat16"
    )
    assert whole.sites == states.sites
    for site in sites:
        values = torch.from_numpy(store[site][:])
        assert torch.equal(torch.cat(list(store.blocks(site, 7))), values)
        assert torch.equal(whole[site], values)
        torch.testing.assert_close(values, states[site], rtol=1e-5, atol=1e-5)
        part = store[site][store.tokens.rows(4)]
        assert np.array_equal(store.of(4)[site][:], part)
        assert np.array_equal(store.of(4).to_states()[site].numpy(), part)
        assert store.to_xarray(site).shape == (1, *states[site].shape)
        mean = torch.from_numpy(pooled[site][:])
        torch.testing.assert_close(
            mean, states.pool("mean", site), rtol=2e-2, atol=2e-2
        )
    assert verify(tmp_path / "store").intact
    with pytest.raises(StatesError, match="width"):
        store.to_xarray()
    with pytest.raises(StatesError, match="layer.0 is 256 wide and final is 64 wide"):
        hs.compare(store, store)
    assert hs.profile(store).data.sizes["site"] == 3


def test_a_token_that_a_text_lacks_is_said_before_the_first_pass(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    some = ["A cat sat on the old mat."] * 2 + ["A dog ran over the mat.", "x"]
    windows = Corpus([" ".join(some)], window=16, stride=15)
    cases: list[tuple[Any, Any, type, str]] = [
        (some, 5, TextError, r"No token at position 5 of every text: text 3 has \d"),
        (some, -6, TextError, r"No token at position -6 of every text: text 3 has \d"),
        (windows, 15, TextError, r"the window of text 0 from position \d+ on has \d"),
        (some, "cls", StatesError, "Cannot pool by cls"),
    ]
    for corpus, pool, error, what in cases:
        with pytest.raises(error, match=what):
            ExtractJob.plan(gpt2, corpus, tmp_path / "store", pool=pool)
    assert_no_store(tmp_path / "store")


def test_an_overflow_is_named_by_its_position_in_the_text(tmp_path: Path) -> None:
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    text = "the old river runs by the green house under the z"
    whole = model.encode([text]).ids[0]
    assert whole.count(whole[-1]) == 1
    with torch.no_grad():
        model.module.get_input_embeddings().weight[whole[-1]] = 1e6
    corpus = Corpus(["a cat", text], window=16, stride=15)
    where = f"layer.0, text 1, position {len(whole) - 1}[. ]"
    with pytest.raises(NotFinite, match=where):
        extract(model, corpus, tmp_path / "store", dtype="float16", engine=SMALL)
    with pytest.raises(NotFinite, match=r"layer.0, text 1[. ]"):
        extract(model, ["a cat", text], tmp_path / "last", pool=-1, dtype="float16")


def test_copies_are_computed_once(gpt2: hs.Model, tmp_path: Path) -> None:
    corpus = ["A cat.", "A dog.", "A cat.", "A cow.", "A dog."]
    extract(gpt2, corpus, tmp_path, engine=SMALL)
    assert [row.text for row in sequences_of(tmp_path)] == [0, 1, 3]
    lines = (tmp_path / "plan" / "duplicates.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"text": 2, "same_as": 0},
        {"text": 4, "same_as": 1},
    ]
    assert resume_store(tmp_path).plan.corpus["duplicates"] == 2


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_long_texts_are_cut_into_windows_with_true_positions(
    tiny: Tiny, family: str, tmp_path: Path
) -> None:
    model, corpus = tiny(family), Corpus(["A cat.", LONG], window=32)
    whole = model.text_encoder.encode_whole([LONG])
    with pytest.raises(
        TextError,
        match="Text 1 of the corpus: it has .* tokens and .* takes 32. Give a stride",
    ):
        extract(model, corpus, tmp_path)
    extract(model, replace(corpus, stride=20), tmp_path, sites="layer.1", engine=SMALL)
    rows = [row for row in sequences_of(tmp_path) if row.text == 1]
    assert [row.start for row in rows] == [20 * number for number in range(len(rows))]
    assert len(rows) > 10
    assert [row.string for row in rows] == [LONG] + [None] * (len(rows) - 1)
    assert whole.spans is not None
    tokens = list(zip(whole.ids[0], whole.spans[0], strict=True))
    seen = set()
    for row in rows:
        assert len(row.ids) <= 32
        pairs = zip(row.ids, row.spans, strict=True)
        for place, (token, span) in enumerate(pairs, row.start):
            # The frame of every window has no characters.
            if span != (-1, -1):
                assert tokens[place] == (token, span)
                seen.add(place)
    assert seen == {k for k, (_, span) in enumerate(tokens) if span != (-1, -1)}


def test_a_text_of_very_many_characters_is_cut_as_any_other(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ["A cat sat.", " ".join(TEXTS[:6]), "The rest.", " ".join(TEXTS[:4])]
    corpus = Corpus([*some, TEXTS[0]], window=24, stride=20)
    stores = []
    for name, most in (("whole", planning.CHUNK_CHARACTERS), ("alone", 12)):
        monkeypatch.setattr(planning, "CHUNK_CHARACTERS", most)
        extract(gpt2, corpus, tmp_path / name, sites="layer.1", engine=SMALL)
        stores.append(files_of(tmp_path / name))
    assert stores[0] == stores[1]
    assert {row.text for row in sequences_of(tmp_path / "alone") if row.start} == {1, 3}


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_every_nth_token_is_kept_with_its_true_position(
    tiny: Tiny, family: str, tmp_path: Path
) -> None:
    model = tiny(family)
    some = [*TEXTS[:3], TEXTS[1], LONG, TEXTS[4]]
    corpus = Corpus(some, window=32, stride=20)
    options: Any = {"sites": "layer.1,layer.2", "engine": SMALL}
    whole = extract(model, corpus, tmp_path / "1", **options)
    assert whole.plan.version == 1
    for every in (2, 50):  # of a window between 50 and 100 no token is kept
        folder = tmp_path / str(every)
        store = extract(model, replace(corpus, every=every), folder, **options)
        kept = np.flatnonzero(whole.tokens.positions % every == 0)
        for name in ("text", "positions", "ids", "spans"):
            found, wanted = (getattr(one.tokens, name) for one in (store, whole))
            assert found.tolist() == wanted[kept].tolist(), name
        assert store.tokens.strings == tuple(whole.tokens.strings[row] for row in kept)
        assert store.tokens.texts == whole.tokens.texts
        assert (store.every, store.plan.version) == (every, 2)
        for site in ("layer.1", "layer.2"):
            assert np.array_equal(store[site][:], whole[site][kept])
            blocks = torch.cat(list(store.blocks(site, 3)))
            assert torch.equal(blocks, whole.to_states(site).values[0][kept])
        for text in range(len(some)):
            own = kept[whole.tokens.text[kept] == text]
            part = store.of(text)
            assert np.array_equal(part["layer.2"][:], whole["layer.2"][own])
            positions = whole.tokens.positions[own]
            assert part.tokens.positions.tolist() == positions.tolist()
        assert store.to_xarray().equals(whole.to_xarray().isel(token=kept))
        assert verify(folder).intact
        with pytest.raises(StoreError, match=rf"every: {every} there, 3 asked"):
            extract(model, replace(corpus, every=3), folder, **options)


def test_analyses_of_every_nth_token(gpt2: hs.Model, tmp_path: Path) -> None:
    corpus, options = Corpus(TEXTS, every=4), {"sites": "layer.*", "engine": SMALL}
    job = ExtractJob.plan(gpt2, corpus, tmp_path / "store", **options)
    whole = ExtractJob.plan(gpt2, TEXTS, tmp_path / "whole", sites="layer.*")
    # A text may keep one more than its share.
    assert 4 * job.cost.tokens_kept < job.cost.tokens + 4 * len(TEXTS)
    assert "of them kept" in job.cost.lines()[0]
    assert job.cost.bytes < whole.cost.bytes / 2
    job.run()
    store = hs.open(tmp_path / "store")
    assert ", every=4, complete" in repr(store)
    states = store.to_states()
    assert hs.profile(store).facts == hs.profile(states).facts
    labels = [str(number % 2) for number in range(len(TEXTS))]
    found, right = (
        hs.probe(one, labels, sites="layer.1", pool="mean") for one in (store, states)
    )
    assert found.facts == right.facts
    kept = "the store keeps positions 0, 4, 8 and so on, and the last may not be"
    for pool, what in (
        ("last", kept),
        (-1, kept),
        (3, "No token at position 3 of every text: the store keeps positions 0, 4, 8"),
    ):
        with pytest.raises(StatesError, match=what):
            hs.probe(store, labels, pool=pool)
    rows = labelled_rows(store, "position", "regress", "layer.*", None)
    assert rows.labels == store.tokens.positions.tolist()
    assert {label % 4 for label in rows.labels} == {0}
    with pytest.raises(StatesError):  # no token has its neighbour here
        hs.probe(hs.each_token(store), "previous-token")


def test_a_position_that_every_nth_token_keeps(gpt2: hs.Model, tmp_path: Path) -> None:
    options: Any = {"sites": "layer.2", "engine": SMALL}
    whole = extract(gpt2, TEXTS[:6], tmp_path / "whole", **options)
    shortest = int(whole.tokens.lengths.min())
    for every in (2, 3):
        corpus = Corpus(TEXTS[:6], every=every)
        store = extract(gpt2, corpus, tmp_path / str(every), **options)
        assert shortest > every
        for position in range(0, shortest, every):
            found, right = (
                vectors(one, sites="layer.2", pool=position).values
                for one in (store, whole)
            )
            torch.testing.assert_close(found, right)
        longest = int(store.tokens.positions.max())
        ends = f"No token at position {longest} of every text: text [0-9]+ ends before"
        with pytest.raises(TextError, match=ends):
            vectors(store, sites="layer.2", pool=longest)
    # The windows begin at 0, 16, 32.
    cut = Corpus(["A cat sat. " * 40], window=32, stride=16, every=5)
    store = extract(gpt2, cut, tmp_path / "windows", **options)
    for position in (0, 5, 30, 35, 60):
        row = int(np.flatnonzero(store.tokens.positions == position)[0])
        found = vectors(store, sites="layer.2", pool=position).values
        assert np.array_equal(found[0].numpy(), store["layer.2"][[row]])
    with pytest.raises(StatesError, match="position 36 .* keeps positions 0, 5, 10"):
        vectors(store, sites="layer.2", pool=36)


def test_folders_files_and_streams_are_one_corpus(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    folder, some = tmp_path / "corpus", TEXTS[:8]
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden.txt").write_text("Not this.\n")
    (folder / "notes.md").write_text("Nor this.\n")
    (folder / "a.txt").write_text("\n".join(some[:4]))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in some[4:])
    (folder / "b" / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    stores = []
    for name, corpus in (("list", some), ("folder", folder), ("stream", iter(some))):
        extract(gpt2, corpus, tmp_path / name, engine=SMALL)
        stores.append(files_of(tmp_path / name))
    assert stores[0] == stores[1] == stores[2]


def test_broken_rows_are_named_or_counted(gpt2: hs.Model, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(
        b'{"text": "A cat."}\n{"text": "A d\n{"text": "\xff"}\n{"text": "A cow."}\n'
    )
    with pytest.raises(TextError, match="Line 2 of corpus.jsonl: it is not JSON"):
        extract(gpt2, path, tmp_path / "store")
    assert_no_store(tmp_path / "store")
    extract(gpt2, Corpus(path, skip_bad=True), tmp_path / "store")
    corpus = resume_store(tmp_path / "store").plan.corpus
    assert (corpus["count"], corpus["skipped"]) == (2, 2)
    assert [line.partition(":")[0] for line in corpus["skipped_rows"]] == [
        "Line 2 of corpus.jsonl",
        "Line 3 of corpus.jsonl",
    ]
    path.write_bytes(b"no JSON\n")
    with pytest.raises(TextError, match="No texts: .* 1 broken lines were left out"):
        extract(gpt2, Corpus(path, skip_bad=True), tmp_path / "none")


def test_a_corpus_that_cannot_be_read_leaves_no_store(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    for name, data, what in (
        ("empty.txt", b"", "No texts: the corpus is empty"),
        ("junk.parquet", b"PAR1 nothing", "Cannot read junk.parquet"),
        ("bomb.txt.gz", gzip.compress(b"a" * 2**24, mtime=0), "as no text does"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises((TextError, FileError), match=what):
            extract(gpt2, tmp_path / name, tmp_path / "store")
        assert_no_store(tmp_path / "store")


def test_a_folder_that_cannot_be_written_is_refused(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="Not a directory"):
        extract(gpt2, TEXTS, tmp_path / "file" / "store")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(StoreError, match=r"such as thesis\.txt"):
        extract(gpt2, TEXTS, tmp_path / "other")
    if os.geteuid() != 0:  # to whom nothing is read-only
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(FileError, match="Permission denied"):
            extract(gpt2, TEXTS, tmp_path / "closed" / "store")


def test_what_cannot_be_extracted_is_said(tiny: Tiny, tmp_path: Path) -> None:
    gpt2, t5 = tiny("gpt2"), tiny("t5")
    decoder = "the decoder reads targets, and a corpus has none"
    pooled = (
        "Cannot use every=5 with pool='mean:sinkless': a pooled store keeps one vector"
    )
    cut = Corpus(["A cat sat. " * 40], window=32, stride=32)

    def to_store(model: hs.Model, corpus: Any = TEXTS, **options: Any) -> Any:
        return lambda: extract(model, corpus, tmp_path / "store", **options)

    cases: list[tuple[Callable[[], Any], type, str]] = [
        (to_store(t5, sites="decoder.layer.*"), PassError, decoder),
        (to_store(t5, pool="median"), PassError, "No pooling 'median'"),
        (to_store(t5, engine="spark"), ArgumentError, "No engine 'spark'"),
        (to_store(gpt2, Corpus(TEXTS, every=5), pool="mean"), PassError, pooled),
        (to_store(gpt2, cut), TextError, "would leave tokens out"),
        (
            to_store(gpt2, Corpus(TEXTS, window=999)),
            TextError,
            "window must be at most",
        ),
        (lambda: Engine(workers=0), StatesError, "workers must be an integer >= 1"),
        (lambda: Engine(unit_tokens=0), StatesError, "unit_tokens must be an integer"),
        (lambda: Engine(address="auto"), ArgumentError, "Cannot use an address"),
        (lambda: Corpus(TEXTS, stride=0), StatesError, "stride must be an integer"),
        (lambda: Corpus(TEXTS, every=0), StatesError, "every must .* >= 1: got 0"),
    ]
    for call, error, what in cases:
        with pytest.raises(error, match=what):
            call()
    assert not (tmp_path / "store" / "plan.json").exists()


def test_a_tokenizer_is_itself_whatever_it_was_asked() -> None:
    tokenizer: Any = tiny_tokenizer()
    before = tokenizer_identity(tokenizer)
    tokenizer("A cat sat.", truncation=True, max_length=4, padding="max_length")
    assert tokenizer_identity(tokenizer) == before
    assert tokenizer_identity(tiny_tokenizer(bos=False)) != before

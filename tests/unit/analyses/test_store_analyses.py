"""An analysis of a store is the analysis of the states in it, without holding them."""

import copy
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.catalog import ANALYSES, Analysis
from hiddenscope.cli import main as cli
from hiddenscope.store import StorePlan, StoreSequence, create
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.vectors import vectors
from hiddenscope.views.kinds.profile import sections

WORDS = [
    "the",
    "a",
    "of",
    "river",
    "city",
    "house",
    "green",
    "old",
    "new",
    "runs",
    "stands",
    "under",
    "by",
]


@pytest.fixture(scope="module")
def model() -> hs.Model:
    return hs.load((tiny_model("gpt2"), tiny_tokenizer()))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS, 3 + number % 7)) for number in range(40)]


@pytest.fixture(scope="module")
def states(model: hs.Model, texts: list[str]) -> hs.States:
    captured = model.capture(texts)
    assert isinstance(captured, hs.States)
    return captured


@pytest.fixture(scope="module")
def store(states: hs.States, tmp_path_factory: pytest.TempPathFactory) -> hs.Store:
    return stored(states, tmp_path_factory.mktemp("store"))


def stored(states: hs.States, path: Path, units: int = 7) -> hs.Store:
    """The same states in a store of several units; texts that are there twice are there
    once.
    """
    tokens = states.tokens
    assert tokens.texts is not None
    first: dict[str, int] = {}
    copies = [
        (text, first[string])
        for text, string in enumerate(tokens.texts)
        if first.setdefault(string, text) != text
    ]
    kept = sorted(first.values())
    rows = [
        StoreSequence(
            text,
            0,
            tuple(tokens.of(text).ids.tolist()),
            tuple((int(start), int(end)) for start, end in tokens.of(text).spans),
            0,
            tokens.texts[text],
        )
        for text in kept
    ]
    sites = tuple(map(str, states.sites))
    source = states.source.to_json()
    plan = StorePlan(
        source,
        {},
        sites,
        dict.fromkeys(sites, states.width),
        source["dtype"],
        corpus={"count": tokens.count},
    )
    strings = dict(zip(tokens.ids.tolist(), tokens.strings, strict=True))
    writer = create(
        path,
        plan,
        [list(some) for some in np.array_split(np.array(rows, dtype=object), units)],
        copies,
        strings,
    )
    for unit in writer.pending():
        own = [states.of(row.text).values for row in writer.sequences(unit)]
        writer.commit(unit, dict(zip(sites, torch.cat(own, 1).numpy(), strict=True)))
    writer.complete()
    return hs.open(path)


def same(one: hs.Result, two: hs.Result) -> None:
    xarray.testing.assert_identical(one.data.drop_attrs(), two.data.drop_attrs())
    assert one.facts == two.facts


def test_a_store_reads_as_its_states(store: hs.Store, states: hs.States) -> None:
    assert store.tokens.equals(states.tokens) and store.source == states.source
    assert torch.equal(store.to_states().values, states.values)
    assert store.to_xarray().equals(states.to_xarray())


def test_profile(store: hs.Store, states: hs.States) -> None:
    same(hs.profile(store), hs.profile(states))


@pytest.mark.parametrize("method", ["pca"])
def test_project(
    store: hs.Store, states: hs.States, texts: list[str], method: Any
) -> None:
    labels = [text.split()[0] for text in texts]
    same(
        hs.project(store, labels, method=method),
        hs.project(states, labels, method=method),
    )


def test_probe(store: hs.Store, states: hs.States, texts: list[str]) -> None:
    labels = ["long" if len(text.split()) > 5 else "short" for text in texts]
    same(hs.probe(store, labels), hs.probe(states, labels))


def test_search(store: hs.Store, states: hs.States, model: hs.Model) -> None:
    query = (model, ["old river"])
    same(
        hs.search(store, query, 5, pool="mean"),
        hs.search(states, query, 5, pool="mean"),
    )
    row = states["final"][3].numpy()
    same(
        hs.search(hs.each_token(store), row, 5),
        hs.search(hs.each_token(states), row, 5),
    )


def test_cluster(store: hs.Store, states: hs.States) -> None:
    same(hs.cluster(store), hs.cluster(states))


def test_drift(model: hs.Model, tmp_path: Path) -> None:
    states = model.capture(
        ["old river runs", "the city", "old river runs", "a house stands by the river"]
    )
    assert isinstance(states, hs.States)
    store = stored(states, tmp_path / "store", units=2)
    module = copy.deepcopy(model.module)
    module.transformer.h[1].mlp.c_fc.weight.data.mul_(1.05)
    other = hs.load((module, model.tokenizer)).capture(list(states.tokens.texts or ()))
    assert isinstance(other, hs.States)
    against = stored(other, tmp_path / "other", units=3)
    same(hs.drift(store, against, None), hs.drift(states, other, None))
    found = hs.drift(model, store, None)
    same(found, hs.drift(model, states, None))
    assert (
        not found.facts["drifted"]
        and hs.drift(model, tmp_path / "other", None).facts["first_site"] == "layer.2"
    )


@pytest.fixture(scope="module")
def windowed(
    model: hs.Model, texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> hs.Store:
    """A store of texts of which two are cut into windows that overlap."""
    corpus = hs.Corpus(
        [" ".join(texts[:6]), texts[0], " ".join(texts[6:14])], window=40, stride=25
    )
    return hs.extract(model, corpus, tmp_path_factory.mktemp("windowed") / "store")


def test_drift_runs_over_the_windows_of_a_store(
    model: hs.Model, windowed: hs.Store
) -> None:
    found = hs.drift(model, windowed, None)
    assert not found.facts["drifted"] and found.facts["texts"] == 3
    assert (
        found.data["position"].to_numpy().tolist() == windowed.tokens.positions.tolist()
    )
    other = hs.load((copy.deepcopy(model.module), model.tokenizer))
    with torch.no_grad():
        other.module.transformer.h[1].mlp.c_fc.weight.mul_(1.1)  # type: ignore[union-attr,index,operator]
    assert hs.drift(windowed, other, None).facts["first_site"] == "layer.2"
    with pytest.raises(
        hs.errors.StatesError,
        match="computed in windows of long texts. Leave the texts out",
    ):
        hs.drift(model, windowed, [text[:60] for text in windowed.tokens.texts or ()])


def test_drift_refuses_a_store_that_has_not_every_token(
    model: hs.Model, texts: list[str], tmp_path: Path
) -> None:
    few = hs.extract(
        model, hs.Corpus(texts[:4], every=2), tmp_path / "every", sites="layer.1"
    )
    mean = hs.extract(model, texts[:4], tmp_path / "mean", sites="layer.1", pool="mean")
    for store, what in ((few, "one token in 2"), (mean, "the mean of each text")):
        with pytest.raises(
            hs.errors.StatesError, match=f"the store keeps {what} alone"
        ):
            hs.drift(model, store, None)
    others = hs.extract(
        model, texts[4:8], tmp_path / "others", sites="layer.1", pool="mean"
    )
    assert hs.drift(mean, mean, None).facts["drifted"] is False
    with pytest.raises(
        hs.errors.StatesError, match="The two saved runs are of different texts"
    ):
        hs.drift(mean, others, None)


def test_a_position_in_overlapping_windows_is_that_of_the_text(
    windowed: hs.Store,
) -> None:
    whole, lengths = (
        windowed.to_states(),
        [int(windowed.of(text).tokens.positions.max()) + 1 for text in range(3)],
    )
    shortest = min(lengths)
    for token in (0, shortest - 1, -1, -2, -shortest):
        found = vectors(windowed, sites="layer.2", pool=token).values[0]
        for text in range(3):
            place = token if token >= 0 else lengths[text] + token
            rows = np.flatnonzero(
                (whole.tokens.text == text) & (whole.tokens.positions == place)
            )
            torch.testing.assert_close(found[text], whole["layer.2"][rows[0]].float())
    with pytest.raises(
        hs.errors.TextError,
        match=rf"text 1 is at {shortest - 1}. Choose a position that every text",
    ):
        vectors(windowed, sites="layer.2", pool=shortest)
    long, place = windowed.of(2), lengths[2] - 3
    assert place > 40
    row = int(np.flatnonzero(long.tokens.positions == place)[0])
    found = vectors(long, sites="layer.2", pool=place).values[0]
    torch.testing.assert_close(found[0], long.to_states()["layer.2"][row].float())


@pytest.fixture(scope="module")
def pooled(
    model: hs.Model, texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, hs.Store]:
    """Stores of one row for each text, or window, by how they were pooled; and of all
    tokens, by None.
    """
    folder = tmp_path_factory.mktemp("pooled")
    longer = [*texts[:-2], " ".join(texts[:6]), texts[3]]
    corpus = hs.Corpus(longer, window=40, stride=20)
    ways = (None, "mean", "max", "last", "first", 0, -1, 2)
    return {
        way: hs.extract(model, corpus, folder / f"{way}", sites="layer.2", pool=way)
        for way in ways
    }


def test_pooled_states_are_taken_for_what_they_are(
    model: hs.Model, pooled: dict[Any, hs.Store]
) -> None:
    whole = pooled[None].to_states()
    same_as = {"first": (0,), 0: ("first",), "last": (-1,), -1: ("last",)}
    for way in ("mean", "max", "last", "first", 0, -1, 2):
        store = pooled[way]
        assert store.pooled == str(way) and len(store) > len(store.texts), (
            "some texts have several windows"
        )
        for token in ("mean", "max", "last", "first", "cls", 0, -1, 2):
            if token not in (way, *same_as.get(way, ())):
                with pytest.raises(
                    hs.errors.StatesError,
                    match=r"from pooled states: the store keeps .*. Give ",
                ):
                    vectors(store, sites="layer.2", pool=token)
            elif way != "mean":  # which is the mean of the windows' means
                found, wanted = (
                    vectors(one, sites="layer.2", pool=token).values
                    for one in (store, whole)
                )
                torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("how", ["mean", "last", 0])
def test_a_profile_of_pooled_states_speaks_of_vectors(
    pooled: dict[Any, hs.Store], how: Any
) -> None:
    store = pooled[how]
    result = hs.profile(store)
    assert (result.facts["pooled"], result.facts["vectors"]) == (str(how), len(store))
    assert "tokens" not in result.facts and result.facts["vectors_kept"] == len(store)
    (facts,) = result.facts["stacks"]
    norms = np.linalg.norm(np.asarray(store["layer.2"]), axis=1)
    assert result.data["norm_median"].sel(site="layer.2") == pytest.approx(
        np.median(norms), rel=1e-6
    )
    assert (
        not {"first_token_norm", "other_tokens_norm", "norm_ratio"} & set(facts)
        and facts["vector_norm"] > 0
    )
    largest = facts["largest_norm"]
    assert set(largest) == {"norm", "site", "text"}
    norms = np.linalg.norm(np.asarray(store[largest["site"]]), axis=1)
    assert largest["text"] == store.tokens.text[np.argmax(norms)] and largest[
        "norm"
    ] == pytest.approx(norms.max(), rel=1e-6)
    said = [section.prose + section.reading for section in sections(result)]
    assert said and not [text for text in (result.summary(), *said) if "token" in text]
    assert not [
        name for name in result.data if "first" in str(name) or "others" in str(name)
    ]


def test_a_text_is_found_among_pooled_states(
    model: hs.Model, pooled: dict[Any, hs.Store]
) -> None:
    for way in ("mean", "max", "last"):
        strings = pooled[way].tokens.texts
        assert strings is not None
        query = strings[7]
        found = hs.search(pooled[way], (model, query), 1)
        assert found.facts["token"] == way
        assert found.data["score"].values[0, 0] == pytest.approx(1.0)
        assert strings[int(found.data["number"].values[0, 0])] == query
    with pytest.raises(
        hs.errors.StatesError,
        match="Cannot take the last token of each text from pooled states",
    ):
        hs.probe(pooled["mean"], ["a", "b"] * 20, pool="last")
    assert hs.probe(pooled["mean"], ["a", "b"] * 20).facts["token"] == "mean"
    assert hs.cluster(pooled[-1]).facts["token"] == -1


def test_pooled_texts_without_strings_are_no_copies_of_one_another(
    tmp_path: Path,
) -> None:
    plan = StorePlan(
        {"model": "toy"}, {}, ("layer.0",), {"layer.0": 8}, "float32", pool="mean"
    )
    sequences = [
        StoreSequence(text, 0, (text, text + 1), ((-1, -1),) * 2, 0)
        for text in range(24)
    ]
    writer = create(tmp_path / "store", plan, [sequences])
    values = np.random.default_rng(0).standard_normal((24, 8), dtype=np.float32)
    values[::2] += 3
    writer.commit("000000", {"layer.0": values})
    writer.complete()
    found = hs.probe(
        hs.open(tmp_path / "store"), [text % 2 for text in range(24)], pool="mean"
    )
    assert (found.facts["rows"], found.facts["texts"]) == (24, 24)


@pytest.fixture(scope="module")
def written(
    model: hs.Model,
    states: hs.States,
    texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with the states as a store and as a file, the model, and the labels of
    the texts.
    """
    folder = tmp_path_factory.mktemp("written")
    stored(states, folder / "store")
    states.save(folder / "states.safetensors")
    model.module.save_pretrained(folder / "model")  # type: ignore[operator]
    model.tokenizer.save_pretrained(folder / "model")  # type: ignore[union-attr]
    rows = [
        {"text": text, "first": text.split()[0], "length": len(text.split())}
        for text in texts
    ]
    for name, some in (("labels", rows), ("others", rows[::-1])):
        (folder / f"{name}.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in some)
        )
    return folder


def reads_states(analysis: Analysis) -> bool:
    first, *_ = inspect.signature(getattr(hs, analysis.word)).parameters.values()
    return "Readable" in str(first.annotation)


def test_commands_read_states_in_place_of_a_model(
    written: Path, store: hs.Store, texts: list[str]
) -> None:
    file, folder = str(written / "labels.jsonl"), str(written / "model")
    loaded = hs.load(folder)
    firsts, lengths = (hs.read(file, label=label) for label in ("first", "length"))
    asked: dict[str, tuple[list[str], Any]] = {
        "profile": (["--sample", "50"], lambda: hs.profile(store, sample=50)),
        "project": (
            [file, "--label", "first", "--method", "pca"],
            lambda: hs.project(store, firsts, method="pca"),
        ),
        "probe": (
            [file, "--label", "length", "--task", "regress"],
            lambda: hs.probe(store, lengths, task="regress"),
        ),
        "search": (
            ["old river", "the city", "-k", "4", "--model", folder],
            lambda: hs.search(store, (loaded, ["old river", "the city"]), 4),
        ),
        "cluster": (["--smallest", "4"], lambda: hs.cluster(store, smallest=4)),
    }
    two_sided = {"compare", "drift"}  # each side of drift may be the path of states
    assert set(asked) | two_sided == {one.word for one in ANALYSES if reads_states(one)}
    for word, (words, python) in asked.items():
        wanted, kept = python(), written / f"{word}.json"
        wanted.save(kept)
        for name in ("store", "states.safetensors"):
            out = written / f"{word}-{name}.json"
            done = CliRunner().invoke(
                cli.app,
                [word, *words, "--states", str(written / name), "--out", str(out)],
            )
            assert done.exit_code == 0, (word, name, done.output)
            same(hs.Result.load(out), hs.Result.load(kept))


def test_drift_reads_a_store_on_the_command_line(written: Path) -> None:
    done = CliRunner().invoke(
        cli.app, ["drift", str(written / "store"), "--model", str(written / "model")]
    )
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (
            ["profile", "A text.", "--states", "{store}"],
            "Cannot use texts with --states",
        ),
        (
            ["profile", "--states", "{store}", "--model", "gpt2"],
            "Cannot use --model with --states",
        ),
        (
            ["cluster", "--states", "{store}", "--truncate"],
            "Cannot use --truncate with --states",
        ),
        (["profile", "--states", "nosuch"], "there is no such file or folder"),
        (
            ["profile", "--states", "{folder}"],
            "it has no plan.json, so it is not a store",
        ),
        (
            ["profile", "--states", "{folder}/labels.jsonl"],
            "it is not a .safetensors file",
        ),
        (["profile", "--states", "{store}", "--sites", "layer.9"], "No site 'layer.9'"),
        (
            [
                "probe",
                "{folder}/others.jsonl",
                "--label",
                "first",
                "--states",
                "{store}",
            ],
            "text 0 differs",
        ),
        (
            ["probe", "cities-complete", "--states", "{store}"],
            "are not those of the states",
        ),
        (
            [
                "project",
                "{folder}/labels.jsonl",
                "cities-complete",
                "--states",
                "{store}",
            ],
            "Cannot compare datasets",
        ),
        (
            ["project", "--states", "{store}", "--other", "gpt2"],
            "Cannot use --other with --states",
        ),
        (["project"], "No dataset"),
        (["search"], "No source to search"),
        (["search", "--states", "{store}"], "No texts"),
    ],
)
def test_what_has_no_use_beside_states_is_refused(
    written: Path, words: list[str], what: str
) -> None:
    given = [word.format(store=written / "store", folder=written) for word in words]
    done = CliRunner().invoke(cli.app, given)
    assert done.exit_code == 2 and what in done.stderr, done.output


LARGER = """
import resource, sys
from pathlib import Path
import numpy as np
import torch
import hiddenscope as hs
from hiddenscope.store import StorePlan, StoreSequence, create, store
from hiddenscope.analyses.drift import saved
from hiddenscope.measures import running

store.BLOCK_BYTES, saved.BLOCK, running.CHUNK = 2**20, 256, 2**17  # less at a time, as the store is small
torch.set_num_threads(1)
draw, width, sites = np.random.default_rng(0), 256, ("layer.0", "layer.1")

def row(text, length):
    return StoreSequence(text, 0, tuple(range(text, text + length)), ((-1, -1),) * length, 0)

def stored(path, length):
    plan = StorePlan({"model": "toy"}, {}, sites, dict.fromkeys(sites, width), "float32")
    writer = create(path, plan, [[row(text, length)] for text in range(24)])
    for unit in writer.pending():
        writer.commit(unit, {site: draw.standard_normal((length, width), dtype=np.float32) for site in sites})
    writer.complete()
    return hs.open(path)

def analyses(found):
    labels = [str(text % 2) for text in range(found.tokens.count)]
    yield "profile", lambda: hs.profile(found, sample=64)
    yield "search", lambda: hs.search(found, draw.standard_normal(width), site="layer.1")
    yield "cluster", lambda: hs.cluster(found, site="layer.1")
    yield "probe", lambda: hs.probe(found, labels)
    yield "project", lambda: hs.project(found, labels, method="pca")
    yield "drift", lambda: hs.drift(found, found, None)

def peak():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

for _, run in analyses(stored(Path(sys.argv[1], "small"), 64)):  # what is loaded and made once
    run()
large = stored(Path(sys.argv[1], "large"), 2048)  # 96 MiB
for name, run in analyses(large):
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    run()
    print(name, (peak() - before) >> 20)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the memory of a process is not told here",
)
def test_a_store_is_not_held_in_memory(tmp_path: Path) -> None:
    # Every array is given back to the system when it is let go, so that holes between
    # small ones do not count.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", LARGER, str(tmp_path)]
    done = subprocess.run(
        program, capture_output=True, text=True, env={**os.environ, **allocator}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    grown = {
        name: int(mebibytes)
        for name, mebibytes in map(str.split, done.stdout.splitlines())
    }
    assert set(grown) == {"profile", "search", "cluster", "probe", "project", "drift"}
    assert max(grown.values()) < 48, (
        f"of a store of 96 MiB, half would be in memory: {grown}"
    )

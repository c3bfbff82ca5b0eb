"""Check what the bench says of its numbers: fits, agreement, and the page."""

import numpy as np
import pytest
import torch

import hiddenscope as hs
from labs.bench import edges, growth, page, plain, results
from labs.bench.measure import Cost, Row, ratios
from labs.bench.peers import beside, hiddenscope_, plain_, tasks
from labs.bench.peers.environments import OURS, PLAIN, Library
from labs.bench.peers.ways import Way, flat

MACHINE = {
    "cpu": "a CPU",
    "architecture": "x86_64",
    "cores": 2,
    "threads": 2,
    "python": "3.11",
    "torch": "2",
    "transformers": "5",
    "hiddenscope": "0",
    "load": 0.0,
}


@pytest.mark.parametrize("sizes", [(2, 4, 8, 16), (32, 64, 128, 256, 512)])
def test_interval_of_an_exponent_covers_the_planted_one(sizes):
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(600):
        noise = np.exp(generator.normal(0, 0.05, len(sizes)))
        costs = 0.01 * np.array(sizes) ** 1.5 * noise
        exponent, half = growth.fit(sizes, costs.tolist())
        covered += abs(exponent - 1.5) <= half
    assert 0.925 <= covered / 600 <= 0.975


def test_numbers_that_differ_say_so():
    left = {"layer.1": np.array([1.0, 2.0]), "layer.2": np.array([1.0])}
    assert beside.compare(left, {"layer.1": left["layer.1"] + 1e-9}, 1e-6) == (
        "same to 5e-10 (1 of 2 arrays)"
    )
    assert beside.compare(left, {"layer.1": left["layer.1"] * 1.1}, 1e-6) == (
        "DIFFER by 1e-01"
    )
    assert "DIFFER" in beside.compare(left, {"layer.1": np.zeros(3)}, 1e-6)
    assert beside.compare(left, {"final": np.zeros(3)}, 1e-6) == "NO NUMBERS IN COMMON"


def _numbers(way: Way) -> dict[str, np.ndarray]:
    return {name: flat(value) for name, value in way.numbers(way.run()).items()}


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    return tasks.llama(folder / "llama", layers=4, width=64, heads=4, words=200)


def _job(folder: str) -> dict[str, object]:
    ids = tasks.draw(1, 6, 200)
    return {"folder": folder, "ids": ids, "layer": 2, "k": 3}


@pytest.mark.parametrize("task", ["load", "capture", "early", "lens", "visibility"])
def test_plain_and_ours_do_the_same(tiny_folder: str, task: str):
    job = _job(tiny_folder)
    expected = _numbers(getattr(plain_, task)(job))
    ours = _numbers(getattr(hiddenscope_, task)(job))
    assert beside.compare(expected, ours, 1e-4).startswith("same")


def test_patches_are_the_same(tiny_folder: str):
    job = tasks.patch_task(tiny_folder, 4, 6, (), 200).job
    expected, ours = _numbers(plain_.patch(job)), _numbers(hiddenscope_.patch(job))
    assert beside.compare(expected, ours, 1e-3).startswith("same")


def test_edges_are_the_same(tiny_folder: str):
    model = hs.load(tiny_folder, dtype="float32")
    drawn, names = edges.draw_edges(model, 30)
    kinds = {(edge.writer, edge.reader) for edge in drawn}
    assert len(kinds) > 8
    clean, corrupt = tasks.draw(2, 6, 200)
    ids = torch.tensor([clean]), torch.tensor([corrupt])
    with torch.no_grad():
        runs = [model.module(one).logits[0, -1] for one in ids]
        patched = plain.patch_edges(model.module, *ids, drawn)
    best, worst = (float(logits[101] - logits[102]) for logits in runs)
    contrast = hs.Contrast(clean, corrupt, answer=101, other=102)
    result = hs.edges(model, contrast, paths=names, exact=0, sample=0)
    for name, logits in zip(names, patched, strict=True):
        writer, _, reader = name.partition(" > ")
        effect = result.data["exact"].sel(writer=writer, reader=reader).item()
        share = (float(logits[101] - logits[102]) - worst) / (best - worst)
        assert effect == pytest.approx(share, abs=1e-4), name


def test_ratios_are_medians_within_rounds():
    slow, quick = Cost(4, 4), Cost(2, 2)
    costs = {"a": [slow, slow, quick], "b": [quick, quick, quick]}
    assert ratios(costs, "b")["a"] == Cost(2, 2)


def test_page_shows_who_wins_and_what_was_kept():
    known: dict[str, results.Record] = {}
    results.keep_rows(known, MACHINE, [Row("capture", "a / b", 1.2, 1.3, 1.05)], 3)
    results.keep_rows(known, MACHINE, [Row("lens", "c / d", 0.5, 0.6)], 3)
    standings = [
        beside.Standing("lens", "a text", PLAIN, 1.0, 1.0, 0.5),
        beside.Standing("lens", "a text", OURS, 1.1, 1.2, 0.55, "same to 1e-06"),
        beside.Standing("lens", "a text", "nnterp", skipped="it is not installed"),
    ]
    results.keep_standings(known, MACHINE, [row.to_json() for row in standings])
    text = page.page(known)
    assert "| lens | **1.000** | 1.100 |  |  |  |  |" in text
    assert "| lens | a text | 0.500 s | 1e-06 |" in text
    # What misses its bar is bold, and only that.
    assert "| capture | a / b | **1.200** | ≤ 1.05 |" in text
    assert "c / d" not in text and "0 of 1 are" in " ".join(text.split())
    assert "| lens | c / d | 0.500 |  |" in page.every_row(known)
    *_, last = page.details([row.to_json() for row in standings])
    assert last[-1] == "not measured: it is not installed"


def test_worker_that_dies_says_its_last_words():
    process = beside.Process(Library("nothing", "there_is_no_such_module"))
    try:
        with pytest.raises(beside.Failed, match="it stopped: .*there_is_no_such"):
            process.ask("prepare")
    finally:
        process.stop()


def test_a_bar_is_not_met_by_wrong_numbers():
    def standings(numbers: str) -> list[beside.Standing]:
        ours = beside.Standing("patch", "a pair", OURS, 1.0, 1.0, 1.0, "same to 1e-06")
        theirs = beside.Standing(
            "patch", "a pair", "TransformerLens", 9.0, 9.0, 9.0, numbers
        )
        return [ours, theirs]

    (row,) = beside.rows_with_bars(standings("same to 1e-05"))
    assert row.met
    (row,) = beside.rows_with_bars(standings("DIFFER by 1e-01"))
    assert not row.met and "DIFFER by 1e-01" in row.skipped

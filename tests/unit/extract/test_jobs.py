"""Jobs: whatever happens to one on the way, the same job again ends with the same
store; what it costs and how far it is adds up.
"""

import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli import main as cli
from hiddenscope.errors import FileError, NotFinite, PassError, StoreError
from hiddenscope.extract import (
    Corpus,
    Engine,
    ExtractJob,
    JobProgress,
    engine,
    extract,
    job,
    planning,
    worker,
)
from hiddenscope.extract.compute import Done, Pipeline
from hiddenscope.passes import buffers, inputs
from hiddenscope.store import resume_store, verify, writer
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.workers import Channel
from labs.chaos.kills import UNIT_BYTES, files_of, texts

runner = CliRunner()
TEXTS = texts()
SMALL = Engine(unit_bytes=UNIT_BYTES, threads=1)  # about six units


def stop(now: JobProgress) -> None:
    """Interrupt a job after its second unit."""
    if now.units_done == 2:
        raise KeyboardInterrupt


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


def test_a_job_that_was_stopped_goes_on_and_another_is_refused(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    extract(gpt2, TEXTS, tmp_path / "whole", engine=SMALL)
    begun = ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=SMALL)
    with pytest.raises(KeyboardInterrupt):
        begun.run(stop)
    units = len(begun.writer.plan.units)
    left = len(resume_store(tmp_path / "store").pending())
    assert 0 < left < units
    assert f"{units - left} of {units} units are kept" in begun.how_to_resume()
    seeded = hs.load((tiny_model("gpt2", seed=1), tiny_tokenizer()))
    without_bos = hs.load((tiny_model("gpt2"), tiny_tokenizer(bos=False)))
    larger, tokens = Engine(unit_bytes=10**6), Engine(unit_tokens=200)
    sizes = f"{UNIT_BYTES} there, 1000000 asked"
    for other, what in (
        ({"sites": "layer.1"}, "sites: .* there"),
        ({"dtype": "float16"}, "dtype: float32 there, float16 asked"),
        ({"engine": Engine(threads=2)}, "environment.threads: 1 there, 2 asked"),
        ({"engine": larger}, f"environment.unit_bytes: {sizes}"),
        ({"engine": tokens}, "environment.unit_tokens: nothing there, 200 asked"),
        ({"corpus": TEXTS[1:]}, "corpus.count: 24 there, 23 asked"),
        ({"corpus": Corpus(TEXTS, window=64)}, "corpus.window: 128 there, 64 asked"),
        ({"model": seeded}, "model.weights: .* there"),
        ({"model": without_bos}, "tokenizer.sha256: .* there"),
    ):
        asked = {"model": gpt2, "corpus": TEXTS, "to": tmp_path / "store"} | other
        with pytest.raises(StoreError, match=what):
            extract(**asked)
    # With as many threads, and units of the size, that it was begun with.
    extract(gpt2, TEXTS, tmp_path / "store")
    assert files_of(tmp_path / "store") == files_of(tmp_path / "whole")
    # An earlier hiddenscope did not say how large its units are.
    earlier = replace(begun.writer.plan, environment={"threads": 3})
    assert Engine().unit_limits(earlier) == {}
    assert Engine(unit_tokens=9).unit_limits(earlier) == {"unit_tokens": 9}
    assert Engine().threads_per_worker(earlier) == 3


@pytest.mark.parametrize(
    ("how", "every"), [("deleted", 1), ("flipped", 5), ("cut off", 1)]
)
def test_the_same_job_again_heals_whatever_file_is_damaged(
    gpt2: hs.Model, tmp_path: Path, how: str, every: int
) -> None:
    some = [*TEXTS[:5], TEXTS[0]]  # a copy too
    engine = Engine(unit_tokens=60, threads=1)

    def again() -> None:  # a stream, which can be read once
        corpus = Corpus(iter(some), every=every)
        extract(gpt2, corpus, tmp_path, sites="layer.1", engine=engine)

    again()
    sound = files_of(tmp_path)
    assert len(resume_store(tmp_path).plan.units) > 1
    for name in sound:
        damage(tmp_path / name, how)
        if name not in ("plan.json", "complete.json") or how != "deleted":
            assert not verify(tmp_path).intact, name
        again()
        assert files_of(tmp_path) == sound and verify(tmp_path).intact, name


def test_the_same_job_again_heals_many_files_and_lost_folders(
    gpt2: hs.Model, tmp_path: Path
) -> None:
    def again(**options: Any) -> dict[str, str]:
        engine = Engine(threads=1, **options)
        extract(gpt2, TEXTS[:9], tmp_path, sites="layer.1", engine=engine)
        assert verify(tmp_path).intact
        return files_of(tmp_path)

    sound = again(unit_bytes=UNIT_BYTES // 8)
    for names in ("plan", "data", "commits", "plan commits complete.json", "data tmp"):
        for name in names.split():
            lost = tmp_path / name
            shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
        # With units of another size, which the plan decides.
        assert again() == sound, names
    for number, name in enumerate(sorted(sound)):
        if name not in ("plan.json", "complete.json"):
            damage(tmp_path / name, ("deleted", "flipped", "cut off")[number % 3])
    assert again() == sound


def test_a_store_in_the_making_heals_too(gpt2: hs.Model, tmp_path: Path) -> None:
    store = tmp_path / "store"
    extract(gpt2, TEXTS, tmp_path / "whole", engine=SMALL)
    begun = ExtractJob.plan(gpt2, TEXTS, store, engine=SMALL)
    for unit in begun.pending[:3]:
        with Pipeline(gpt2, begun.writer, lambda done: None) as pipeline:
            pipeline.put(unit)
    damage(store / "commits/000000.json", "flipped")
    damage(store / "plan/000004.jsonl", "deleted")
    record = json.loads((store / "commits/000001.json").read_bytes())
    damage(store / f"data/{record['sha256']}.safetensors", "cut off")
    again = ExtractJob.plan(gpt2, TEXTS, store, engine=SMALL)
    damaged = ("plan/000004.jsonl", "unit 000000", "unit 000001")
    assert again.cost.damaged == damaged
    said = f"damaged, and made again: {', '.join(damaged)}"
    assert again.cost.lines()[-1] == said
    assert again.cost.units_left == again.cost.units - 1
    again.run()
    assert files_of(store) == files_of(tmp_path / "whole")


def test_texts_that_cannot_be_made_again_are_refused(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(gpt2, TEXTS, tmp_path, engine=SMALL)
    before = files_of(tmp_path)
    count = r"corpus.count: 24 there, 23 asked"
    for name, batched, fewer in (
        ("plan/000001.jsonl", "texts of . units, the first is", count),
        ("plan.json", "is of plan", "is of plan"),
    ):
        content = (tmp_path / name).read_bytes()
        damage(tmp_path / name, "deleted")
        # As another version of hiddenscope might batch them.
        with monkeypatch.context() as patch:
            patch.setitem(inputs.BATCH_TOKENS, "cpu", 40)
            with pytest.raises(StoreError, match=batched):
                extract(gpt2, TEXTS, tmp_path, engine=SMALL)
        with pytest.raises(StoreError, match=fewer):
            extract(gpt2, TEXTS[1:], tmp_path, engine=SMALL)
        (tmp_path / name).write_bytes(content)
    assert files_of(tmp_path) == before and verify(tmp_path).intact


class Threaded(Channel):
    """A worker in a thread of this process, which may die after some messages."""

    def __init__(self, messages: int | None = None) -> None:
        (theirs, out), (own, back) = os.pipe(), os.pipe()
        super().__init__(os.fdopen(own, "rb"), os.fdopen(out, "wb"))
        self.inner = Channel(os.fdopen(theirs, "rb"), os.fdopen(back, "wb"))
        self.left = messages
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        tell = self.inner.send

        def tell_some(header: Any) -> None:
            if self.left == 0:
                raise BrokenPipeError
            self.left = self.left and self.left - 1
            tell(header)

        self.inner.send = tell_some
        worker.serve(self.inner)
        self.inner.close()

    def poll(self) -> int | None:
        return None if self.thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int | None:
        self.thread.join(timeout)
        return self.poll()

    def kill(self) -> None:
        self.close_outgoing()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Threaded]:
    """The workers of the jobs of a test: the first soon dies. They share a model."""
    workers, loaded = [], []
    numbers, own = count(), worker.ModelRecipe.model
    loading = threading.Lock()

    def start(log: Any) -> Threaded:
        # The first says that it is ready and has run a batch, and no more.
        workers.append(Threaded(2 if next(numbers) == 0 else None))
        return workers[-1]

    def load_once(*given: Any) -> hs.Model:
        with loading:
            if not loaded:
                loaded.append(own(*given))
            return loaded[0]

    monkeypatch.setattr(engine, "start_process", start)
    monkeypatch.setattr(worker.ModelRecipe, "model", load_once)
    return workers


def test_workers_give_the_same_bytes_and_one_that_dies_is_replaced(
    gpt2: hs.Model, tmp_path: Path, started: list[Threaded]
) -> None:
    alone = Engine(unit_tokens=100, threads=1)
    extract(gpt2, TEXTS, tmp_path / "alone", sites="layer.1", engine=alone)
    begun = ExtractJob.plan(
        gpt2,
        TEXTS,
        tmp_path / "store",
        sites="layer.1",
        engine=replace(alone, workers=2),
    )
    seen = []
    begun.run(seen.append, every_batch=True)
    assert files_of(tmp_path / "store") == files_of(tmp_path / "alone")
    assert len(started) == 3 and all(thread.poll() == 0 for thread in started)
    assert seen[-1].tokens_computed == seen[-1].tokens_done == begun.cost.tokens
    assert seen[-1].units_done == begun.cost.units > len(started)


class RayStandIn:
    """Ray's calls, without a cluster: actors are objects here, and the first dies."""

    def __init__(self) -> None:
        ray_error = type("RayError", (Exception,), {})
        task_error = type("RayTaskError", (ray_error,), {"cause": None})
        self.exceptions = SimpleNamespace(RayError=ray_error, RayTaskError=task_error)
        self.killed: list[Any] = []
        self.actors = 0

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, **options: Any) -> Any:
        assert options["num_cpus"] == 1 and options["max_restarts"] == 0
        return lambda kind: SimpleNamespace(remote=lambda order: self.start(order))

    def start(self, order: Any) -> Any:
        self.actors += 1
        calls = 1 if self.actors == 1 else None
        actor = worker.UnitWorker(order)

        def compute(unit: str | None) -> Any:
            nonlocal calls
            if calls == 0:
                raise self.exceptions.RayError("gone")
            calls = calls and calls - 1
            return actor.compute(unit)

        remote = SimpleNamespace(remote=lambda unit: lambda: compute(unit))
        return SimpleNamespace(compute=remote)

    def get(self, task: Callable[[], Any]) -> Any:
        return task()

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


def test_a_cluster_gives_the_same_bytes_and_an_actor_that_dies_is_replaced(
    gpt2: hs.Model,
    tmp_path: Path,
    started: list[Threaded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = RayStandIn()
    monkeypatch.setattr(engine, "connect_ray", lambda address: ray)
    alone = Engine(unit_tokens=100, threads=1)
    extract(gpt2, TEXTS, tmp_path / "alone", sites="layer.1", engine=alone)
    cluster = Engine("ray", threads=1, unit_tokens=100)
    extract(gpt2, TEXTS, tmp_path / "store", sites="layer.1", engine=cluster)
    assert files_of(tmp_path / "store") == files_of(tmp_path / "alone")
    assert ray.actors == len(ray.killed) == 3 and not started


def test_an_error_of_a_worker_is_the_jobs(
    tmp_path: Path, started: list[Threaded]
) -> None:
    module = tiny_model("gpt2")
    with torch.no_grad():
        module.get_parameter("transformer.h.1.mlp.c_proj.bias").fill_(1e6)
    model = hs.load((module, tiny_tokenizer()))
    two = Engine(workers=2, threads=1, unit_tokens=100)
    options: Any = {"sites": "layer.*", "dtype": "float16", "engine": two}
    with pytest.raises(NotFinite, match=r"layer.2, text \d+, position"):
        extract(model, TEXTS[:6], tmp_path, **options)
    described = worker.error_to_json(ZeroDivisionError("by zero"))
    other = worker.error_from_json(described)
    assert isinstance(other, PassError) and "ZeroDivisionError: by zero" in str(other)


def test_a_unit_is_handed_out_again_when_its_worker_dies_or_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(engine.time, "monotonic", lambda: now[0])
    reported: list[Done] = []
    planned = engine.Schedule(["0", "1", "2"], reported.append)
    assert [planned.take("a"), planned.take("a")] == ["0", "1"]
    planned.put_back("a", "it was killed")
    assert [planned.take(name) for name in "bcc"] == ["0", "1", "2"]
    now[0] += 5
    planned.done(Done("2", True))
    # The patience is three times the longest unit.
    now[0] += 9.9
    assert planned.take("b") is None
    now[0] += 0.2
    assert planned.take("b") == "1" and planned.take("c") == "0"
    planned.done(Done("0", True))
    planned.done(Done("0", False))
    assert [done.unit for done in reported] == ["2", "0"] and not planned.finished
    for _ in range(engine.MAX_DEATHS + 1):
        assert planned.error is None
        planned.put_back("b", "it was killed")
    assert isinstance(planned.error, PassError)
    assert "11 workers ended one after another" in str(planned.error)
    assert planned.finished and planned.take("d") is None


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
    begun = ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=SMALL)
    before = getrlimit(RLIMIT_FSIZE)

    def fill(now: JobProgress) -> None:
        setrlimit(RLIMIT_FSIZE, (UNIT_BYTES // 2, before[1]))

    try:
        with pytest.raises(FileError, match="keeps its finished units"):
            begun.run(fill)
    finally:
        setrlimit(RLIMIT_FSIZE, before)
    left = resume_store(tmp_path / "store").pending()
    assert 0 < len(left) < len(begun.writer.plan.units)
    assert not list((tmp_path / "store" / "tmp").iterdir())
    extract(gpt2, TEXTS, tmp_path / "store", engine=SMALL)
    assert files_of(tmp_path / "store") == files_of(tmp_path / "whole")


def test_what_the_machine_lacks_is_an_error_of_ours(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, kind, what in (
        (OSError(24, "Too many open files"), FileError, "too many files are open"),
        (MemoryError(), hs.errors.TooLarge, "memory ran out"),
        (OSError(5, "Input/output error"), FileError, "Input/output error"),
    ):
        monkeypatch.setattr(planning.Planner, "_chunks", Mock(side_effect=error))
        with pytest.raises(kind, match=what):
            extract(gpt2, TEXTS, tmp_path)


def test_units_share_their_memory_and_their_texts_are_read_once(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = texts(60)
    planned = ExtractJob.plan(gpt2, given, tmp_path, engine=SMALL)
    allocate, read = buffers._in_huge_pages, writer.read_sequences
    commit, hand_over = planned.writer.commit, Pipeline._hand_over
    sizes, seen, held, most = [], [], [], Counter()
    readers: list[threading.Thread] = []
    release = threading.Event()

    def allocating(size: int) -> torch.Tensor:
        sizes.append(size)
        return allocate(size)

    def reading(folder: Any, unit: Any) -> Any:
        seen.append(unit.name)
        readers.append(threading.current_thread())
        return read(folder, unit)

    def holding(pipeline: Pipeline, unit: str, computed: Any) -> None:
        held.append(unit)
        most["held"] = max(most["held"], len(held))
        if len(held) == 3:
            release.set()
        hand_over(pipeline, unit, computed)

    # A slow disk: time enough for a fourth unit, if nothing kept the pass back.
    def slow(unit: str, values: Any) -> bool:
        release.wait(60)
        time.sleep(0.05)
        held.remove(unit)
        return commit(unit, values)

    monkeypatch.setattr(buffers, "_in_huge_pages", allocating)
    monkeypatch.setattr(writer, "read_sequences", reading)
    monkeypatch.setattr(Pipeline, "_hand_over", holding)
    monkeypatch.setattr(planned.writer, "commit", slow)
    planned.run()
    units = [unit.name for unit in planned.writer.plan.units]
    assert len(units) > 9 > len(sizes) and sizes.count(max(sizes)) <= 3
    assert most["held"] == 3
    assert sorted(seen) == units
    # All but the first while passes run: a GPU would wait for texts.
    assert readers.count(threading.main_thread()) == 1
    store = hs.open(tmp_path)
    for text in range(0, 60, 7):
        states = store.of(text).to_states()
        torch.testing.assert_close(states.values, gpt2.capture(given[text]).values)


def test_progress_adds_up(gpt2: hs.Model, tmp_path: Path) -> None:
    small = ExtractJob.plan(gpt2, TEXTS, tmp_path / "small", engine=SMALL)
    planned = ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=SMALL)
    seen = []
    planned.run(seen.append)
    last, cost = seen[-1], planned.cost
    assert [now.units_done for now in seen] == list(range(1, cost.units + 1))
    assert last.tokens_done == last.tokens == cost.tokens and last.seconds_left == 0
    shards = (tmp_path / "store" / "data").iterdir()
    on_disk = sum(path.stat().st_size for path in shards)
    assert last.bytes_written < on_disk < cost.bytes
    assert json.loads(json.dumps(last.to_json()))["units"] == cost.units
    done = ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=SMALL).cost
    assert (done.units_left, done.bytes_left) == (0, 0)
    assert f"; {cost.units} are there already" in done.lines()[1]
    # Another job has meanwhile computed what this one would have.
    extract(gpt2, TEXTS, tmp_path / "small", engine=SMALL)
    files = files_of(tmp_path / "small")
    small.run(seen.append)
    assert seen[-1].units_done == small.cost.units and seen[-1].bytes_written == 0
    assert files_of(tmp_path / "small") == files == files_of(tmp_path / "store")


@pytest.mark.parametrize("pool", [None, "mean"])
def test_progress_counts_the_tokens_of_every_batch(
    tmp_path: Path, gpt2: hs.Model, monkeypatch: pytest.MonkeyPatch, pool: str | None
) -> None:
    """Also within a unit, of which there is one here."""
    monkeypatch.setitem(inputs.BATCH_TOKENS, "cpu", 200)
    seen = []
    planned = ExtractJob.plan(gpt2, TEXTS, tmp_path, pool=pool)
    assert planned.cost.units == 1
    planned.run(seen.append, every_batch=True)
    computed = [now.tokens_computed for now in seen]
    assert len(seen) > 3 and computed == sorted(computed)
    # One report a batch, and one for the unit.
    assert len(set(computed[:-1])) == len(seen) - 1
    assert [now.units_done for now in seen] == [0] * (len(seen) - 1) + [1]
    assert computed[-1] == seen[-1].tokens_done == planned.cost.tokens
    first = seen[0]
    assert first.tokens_done == 0
    assert first.seconds_left is not None and first.seconds_left > 0
    said = f"{first.tokens_computed:,} of {first.tokens:,} tokens, 0 of 1 units kept"
    assert said in first.line()


def test_on_a_cpu_a_unit_is_so_much_work(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model fewer tokens are at stake; the same job has the same units each
    time that it is planned.
    """
    module: Any = gpt2.module
    parts = [part for block in module.transformer.h[:2] for part in block.parameters()]
    blocks = sum(weight.numel() for weight in parts)
    monkeypatch.setattr(planning, "MIN_UNIT_TOKENS", 50)
    longest = max(gpt2.encode(TEXTS).lengths)

    def planned(sites: str, name: str, work: int) -> Any:
        monkeypatch.setattr(planning, "UNIT_WORK", work)
        engine = Engine(threads=1)
        begun = ExtractJob.plan(
            gpt2, TEXTS, tmp_path / name, sites=sites, engine=engine
        )
        return begun.writer.plan

    work = 2 * blocks * 120
    for sites, work_tokens, limit in (
        ("layer.2", work, 120),
        ("layer.1", work, 240),
        ("layer.2", 1, 50),
    ):
        plan = planned(sites, f"{sites} {limit}", work_tokens)
        assert plan == planned(sites, f"{sites} {limit} again", work_tokens)
        assert "unit_tokens" not in plan.environment
        sizes = [unit.tokens for unit in plan.units]
        assert len(sizes) > 2
        assert all(limit <= size < limit + longest for size in sizes[:-1])


@pytest.fixture
def command(saved: str, tmp_path: Path) -> Callable[..., Any]:
    """Run `extract` of a corpus to one folder."""
    to = ["--to", str(tmp_path / "store"), "--model", saved, "--sites", "layer.1"]

    def run(corpus: str, *words: str, **options: Any) -> Any:
        return runner.invoke(cli.app, ["extract", corpus, *to, *words], **options)

    return run


def test_the_command_says_what_it_does(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(job: ExtractJob, report: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ExtractJob, "run", interrupted)
        done = command("cities-incomplete")
    assert done.exit_code == 130
    assert "0 of 1 units are kept" in done.stderr
    assert "same command again" in done.stderr
    out = str(tmp_path / "job.json")
    done = command("cities-incomplete", "--json", "--out", out)
    assert done.exit_code == 0, done.output
    events = [json.loads(line) for line in done.stdout.splitlines()]
    names = [event["event"] for event in events]
    assert (names[0], set(names[1:-1]), names[-1]) == ("cost", {"progress"}, "end")
    assert events[0]["texts"] == 50 and events[-1]["units_pending"] == 0
    kept = json.loads((tmp_path / "job.json").read_text())
    assert kept["tokens_done"] == events[0]["tokens"]
    again = command("cities-incomplete")
    assert again.exit_code == 0 and "1 unit," in again.stdout
    assert "1 are there already" in again.stderr
    other = command("cities-incomplete", "--store-dtype", "bfloat16")
    assert other.exit_code == 2
    assert "dtype: float32 there, bfloat16 asked" in other.stderr


def test_the_command_reads_stdin_and_names_what_it_left_out(
    command: Callable[..., Any],
) -> None:
    lines = b'{"body": "A cat."}\nno JSON\n{"body": "A dog."}\n'
    done = command("-.jsonl", "--text", "body", input=lines)
    assert done.exit_code == 2 and "Line 2 of stdin: it is not JSON" in done.stderr
    done = command("-.jsonl", "--text", "body", "--skip-bad", input=lines)
    assert done.exit_code == 0 and "2 texts" in done.stderr
    assert "left out: Line 2 of stdin" in done.stderr

"""Prove the anatomy of every text class of transformers that a tiny configuration is
known of.

python tests/conformance/run.py                    all of them, against the recorded count
python tests/conformance/run.py --only GPT2Model   some, by class or by model type
python tests/conformance/run.py --record           all, record what came out, and write docs/conformance.md
python tests/conformance/run.py --analyses         every analysis on every model type, and the laws that it must keep

An hour on two cores, the last writes what came of each type into a file (`--out`) as
soon as it is known, and leaves out the types that are there already: it can be stopped,
and run again on another machine (`--jobs 16`). `--analyses --record FILE` puts what is
in such a file into the record and into docs/conformance.md.
"""

import argparse
import gzip
import json
import logging
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).parent
# The registry of analyses is no part of the package.
sys.path.insert(0, str(HERE.parents[1]))

import page  # noqa: E402

Rows = list[dict[str, Any]]
Tried = TypeVar("Tried")
RECORD, ANALYSES = HERE / "recorded.json", HERE / "analyses.json"
WORKERS = 2
MOST_WEIGHTS = 20_000_000
BAR = {"pairs": 505, "types": 230}


@dataclass(frozen=True)
class Outcome:
    """What came of one class: proved, refused, wrong, crashed or missing; and why."""

    name: str
    model_type: str
    tasks: tuple[str, ...]
    verdict: str
    reason: str = ""
    kinds: tuple[str, ...] = ()
    parts_refused: tuple[str, ...] = ()
    heads: int = 0
    heads_checked: int = 0
    heads_refused: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try them all and say what came of it; 1 if it is worse than what is recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="classes or model types to try",
    )
    parser.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="FILE",
        help="record the counts and the refused classes; with --analyses, of a file",
    )
    parser.add_argument(
        "--analyses",
        action="store_true",
        help="run every analysis, and hold it to its laws",
    )
    parser.add_argument("--jobs", type=int, default=WORKERS, help="processes")
    parser.add_argument(
        "--out", type=Path, help="where --analyses writes what came of each type"
    )
    given = parser.parse_args(arguments)
    recording = given.record is not None
    if recording and given.only:
        parser.error("--record is of all classes: leave --only out")
    if given.analyses and recording:
        if not given.record:
            parser.error("--analyses --record needs the file that --out wrote")
        return record_analyses(Path(given.record))
    groups = [
        group
        for group in grouped(rows())
        if not given.only or set(given.only) & set(_names(group))
    ]
    if not groups:
        parser.error(f"no class and no model type is called {' or '.join(given.only)}")
    if given.analyses:
        return analysed(groups, given.out, given.jobs)
    outcomes = sorted(
        tried(groups, attempt, given.jobs),
        key=lambda outcome: (outcome.model_type, outcome.name),
    )
    print("\n".join(report(outcomes)))
    if recording:
        new = record(outcomes)
        RECORD.write_text(json.dumps(new, indent=1) + "\n", "utf-8")
        page.write(new, read(ANALYSES))
    recorded = read(RECORD)
    faults = list(worse(outcomes, recorded, whole=not given.only))
    if not given.only:
        faults += stale(outcomes, recorded)
    print(
        "\n".join(
            [
                *(f"not as recorded: {fault}" for fault in faults),
                last_line(outcomes),
            ]
        )
    )
    return 1 if faults else 0


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def rows() -> list[dict[str, Any]]:
    with gzip.open(HERE / "tiny_configs.json.gz") as file:
        return list(json.load(file))


def grouped(all_rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows that build the very same module, for different tasks, together."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in all_rows:
        groups[json.dumps([*_names([row]), row["config"]], sort_keys=True)].append(row)
    return list(groups.values())


def _names(group: list[dict[str, Any]]) -> tuple[str, str]:
    return group[0]["model_class"], group[0]["model_type"]


def tried(
    groups: list[Rows], attempt: Callable[[Rows], Tried], jobs: int = WORKERS
) -> Iterator[Tried]:
    """Try every group, some at a time, with a word on stderr about how far it is."""
    start = time.monotonic()
    # A process that is killed, for want of memory, ends this with an error; a
    # multiprocessing.Pool would wait for ever.
    with ProcessPoolExecutor(
        min(jobs, len(groups)), get_context("spawn"), _prepare
    ) as pool:
        for done, future in enumerate(
            as_completed([pool.submit(attempt, group) for group in groups]), 1
        ):
            outcome = future.result()
            said = f"{done} of {len(groups)}, {time.monotonic() - start:.0f} s"
            if sys.stderr.isatty():
                print(
                    f"\r\033[K{said}",
                    end="" if done < len(groups) else "\n",
                    file=sys.stderr,
                    flush=True,
                )
            elif done % 50 == 0 or done == len(groups):
                print(said, file=sys.stderr, flush=True)
            yield outcome


def _prepare() -> None:
    """Keep a worker to one core and quiet: what tiny random models are warned of is not
    news.
    """
    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)


def attempt(group: list[dict[str, Any]]) -> Outcome:
    """Build one class, prove it, and have the proof checked by the oracle."""
    start = time.monotonic()
    tasks = tuple(row["task"] for row in group)
    outcome = _attempt(group[0], Outcome(*_names(group), tasks, "proved"))
    return replace(outcome, seconds=time.monotonic() - start)


def _attempt(row: dict[str, Any], outcome: Outcome) -> Outcome:
    from inside import Tried as TriedHeads
    from oracle import trial_inputs, wrongs

    from hiddenscope.discovery import find
    from hiddenscope.errors import AnatomyError, UnknownModel
    from hiddenscope.testing import build

    try:
        module = build(row, most=MOST_WEIGHTS)
        found = find(module)
        wrong = wrongs(module, found)
        heads = TriedHeads(module, found)
        heads.check(module, found, trial_inputs(module, len(found.stacks) == 2))
    except UnknownModel as error:
        return replace(outcome, verdict="missing", reason=str(error))
    except AnatomyError as error:
        return replace(outcome, verdict="refused", reason=error.reason)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        reason = f"{type(error).__name__}: {error} at {where}"
        return replace(outcome, verdict="crashed", reason=reason)
    wrong = [*wrong, *heads.wrong]
    refused = {
        block.refused
        for stack in found.stacks
        for block in stack.blocks
        if block.refused
    }
    return replace(
        outcome,
        verdict="wrong" if wrong else "proved",
        reason="; ".join(wrong),
        kinds=tuple(stack.kind for stack in found.stacks),
        parts_refused=tuple(sorted(refused)),
        heads=heads.blocks,
        heads_checked=heads.checked,
        heads_refused=tuple(sorted(heads.refused)),
    )


def analysed(groups: list[Rows], out: Path | None, jobs: int) -> int:
    """Run every analysis on every type, print what came of it, and say whether there
    was a fault.
    """
    import analyses

    chosen = analyses.chosen([row for group in groups for row in group])
    came = [] if out is None else kept(out)
    done = {one["model_type"] for one in came}
    left = [[row] for model_type, row in chosen.items() if model_type not in done]
    for some in tried(left, analyse, jobs) if left else ():
        came += some
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(one)}\n" for one in some))
    came = [one for one in came if one["model_type"] in chosen]
    tally = tallied(came)
    print("\n".join(page.analyses(tally)))
    for word, one in tally["analyses"].items():
        for model_type, fault in one["faults"].items():
            print(f"fault: {word} of {model_type}: {fault}")
    return int(any(one["verdict"] == "fault" for one in came))


def kept(out: Path) -> Rows:
    """Return what a file holds; a last line that was cut off is left out."""
    if not out.exists():
        return []
    lines = out.read_text("utf-8").split("\n")
    text = "".join(f"{line}\n" for line in lines if line.endswith("}"))
    out.write_text(text, "utf-8")
    return [json.loads(line) for line in text.splitlines()]


def analyse(group: Rows) -> Rows:
    """Run every analysis on one type."""
    import analyses

    return [came.row() for came in analyses.tried(group[0], MOST_WEIGHTS)]


def tallied(came: Rows) -> dict[str, Any]:
    """Return what is worth keeping of a run of all analyses.

    Types that this transformers lacks, and those that are not proved, are of none.
    """
    import transformers

    tally: dict[str, Any] = {
        "transformers": transformers.__version__,
        "types": len({one["model_type"] for one in came}),
        "missing": _of_load(came, "missing"),
        "unproved": _of_load(came, "refused"),
        "unloaded": _of_load(came, "fault"),
        "analyses": {},
    }
    for one in sorted(came, key=lambda one: one["model_type"]):
        if one["analysis"] == "load":
            continue
        empty: dict[str, Any] = {"right": [], "refused": {}, "faults": {}}
        mine = tally["analyses"].setdefault(one["analysis"], empty)
        if one["verdict"] == "right":
            mine["right"].append(one["model_type"])
        elif one["verdict"] == "refused":
            mine["refused"].setdefault(one["why"], []).append(one["model_type"])
        else:
            mine["faults"][one["model_type"]] = one["why"]
    return tally


def _of_load(came: Rows, verdict: str) -> list[str]:
    return sorted(
        one["model_type"]
        for one in came
        if one["analysis"] == "load" and one["verdict"] == verdict
    )


def record_analyses(file: Path) -> int:
    """Record what is in a file, and write docs/conformance.md; 1 if types are left."""
    tally = tallied(kept(file))
    ANALYSES.write_text(json.dumps(tally, indent=1) + "\n", "utf-8")
    page.write(read(RECORD), tally)
    left = sorted(
        {row["model_type"] for row in rows()}
        - {one["model_type"] for one in kept(file)}
    )
    if left:
        print(f"not tried: {', '.join(left)}")
    return int(bool(left))


def report(outcomes: list[Outcome]) -> Iterator[str]:
    """The tables: what is proved, what is not and why, and which blocks show no parts."""
    by_task: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        for task in outcome.tasks:
            by_task[task][outcome.verdict] += 1
    verdicts = [
        v
        for v in ("proved", "refused", "wrong", "crashed", "missing")
        if any(v in c for c in by_task.values())
    ]
    yield from _table(
        ["task", *verdicts],
        [[task, *(c[v] for v in verdicts)] for task, c in sorted(by_task.items())],
    )
    kinds = Counter(kind for outcome in outcomes for kind in outcome.kinds)
    yield from _table(
        ["kind of block", "stacks"], [list(pair) for pair in kinds.most_common()]
    )
    for verdict in ("refused", "wrong", "crashed", "missing"):
        named = [
            [outcome.name, outcome.reason]
            for outcome in outcomes
            if outcome.verdict == verdict
        ]
        yield from _table([verdict, "reason"], named)
    why: dict[str, set[str]] = defaultdict(set)
    for outcome in outcomes:
        for reason in outcome.parts_refused:
            why[reason].add(outcome.model_type)
    for reason, types in sorted(why.items(), key=lambda item: -len(item[1])):
        yield (
            f"no attn, mid, mlp in {len(types)} types, for {reason}:\n "
            f" {', '.join(sorted(types))}\n"
        )
    yield "heads: " + ", ".join(f"{n} {name}" for name, n in _heads(outcomes).items())
    slow = sorted(outcomes, key=lambda outcome: -outcome.seconds)[:5]
    yield "slowest: " + ", ".join(
        f"{outcome.name} {outcome.seconds:.1f} s" for outcome in slow
    )
    if untried := _untried({outcome.name for outcome in outcomes}):
        yield (
            f"{len(untried)} classes have no tiny configuration here and were not"
            f" tried: {', '.join(untried)}"
        )


def _table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> Iterator[str]:
    if not lines:
        return
    cells = [list(map(str, line)) for line in (head, *lines)]
    wide = [max(len(line[i]) for line in cells) for i in range(len(head) - 1)]
    for line in cells:
        yield "  ".join(
            [*(cell.ljust(w) for cell, w in zip(line, wide, strict=False)), line[-1]]
        ).rstrip()
    yield ""


def _untried(names: set[str]) -> list[str]:
    """The language models that transformers knows of and that are not among the names."""
    from transformers.models.auto import modeling_auto

    if len(names) < BAR["types"]:
        return []
    kinds = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "TEXT_ENCODING")
    mappings = [
        getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}) for kind in kinds
    ]
    known = {
        name
        for mapping in mappings
        for name in mapping.values()
        if isinstance(name, str)
    }
    return sorted(known - names)


def counts(outcomes: Iterable[Outcome], verdict: str) -> tuple[int, int]:
    """How many pairs of class and task have a verdict, and how many model types have it
    for all of their classes.
    """
    pairs, types = 0, defaultdict(list)
    for outcome in outcomes:
        types[outcome.model_type].append(outcome.verdict == verdict)
        pairs += len(outcome.tasks) if outcome.verdict == verdict else 0
    return pairs, sum(all(each) for each in types.values())


def record(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return what is worth keeping of a run: the counts, and what is refused and why.

    docs/conformance.md is written from it.
    """
    import transformers

    pairs, types = counts(outcomes, "proved")
    tasks: dict[str, Counter[str]] = defaultdict(Counter)
    without_parts: dict[str, set[str]] = defaultdict(set)
    without_heads: dict[str, set[str]] = defaultdict(set)
    refused = {}
    for outcome in outcomes:
        for task in outcome.tasks:
            tasks[task][outcome.verdict] += 1
        for reason in outcome.parts_refused:
            without_parts[reason].add(outcome.model_type)
        for reason in outcome.heads_refused:
            without_heads[reason].add(outcome.model_type)
        if outcome.verdict == "refused":
            refused[outcome.name] = outcome.reason
    kinds = Counter(kind for outcome in outcomes for kind in outcome.kinds)
    return {
        "transformers": transformers.__version__,
        "pairs": pairs,
        "all_pairs": sum(len(outcome.tasks) for outcome in outcomes),
        "types": types,
        "all_types": len({outcome.model_type for outcome in outcomes}),
        "tasks": {task: dict(sorted(tasks[task].items())) for task in sorted(tasks)},
        "kinds": dict(sorted(kinds.items())),
        "refused": refused,
        "without_parts": {
            reason: sorted(without_parts[reason]) for reason in sorted(without_parts)
        },
        "heads": _heads(outcomes),
        "without_heads": {
            reason: sorted(without_heads[reason]) for reason in sorted(without_heads)
        },
        "untried": _untried({outcome.name for outcome in outcomes}),
    }


def _heads(outcomes: list[Outcome]) -> dict[str, int]:
    """Count the types and attentions whose heads are proved, and those compared."""
    types = {outcome.model_type for outcome in outcomes if outcome.heads}
    return {
        "types": len(types),
        "attentions": sum(outcome.heads for outcome in outcomes),
        "compared": sum(outcome.heads_checked for outcome in outcomes),
    }


def stale(outcomes: list[Outcome], recorded: dict[str, Any]) -> Iterator[str]:
    """Yield why docs/conformance.md does not show this run.

    Another version of transformers has other classes, and is not what the page is of.
    """
    again = "write it again with --record"
    if not page.shows(recorded, read(ANALYSES)):
        yield f"docs/conformance.md does not show the record: {again}"
    new = record(outcomes)
    if new["transformers"] != recorded["transformers"]:
        return
    for name in ("all_pairs", "all_types", "tasks", "kinds", "heads", "untried"):
        if new[name] != recorded[name]:
            yield f"{name} in docs/conformance.md is {recorded[name]}, here {new[name]}"
    for name in ("refused", "without_parts", "without_heads"):
        # Names alone: a reason may quote a number that rounding changes.
        if set(_members(new[name])) != set(_members(recorded[name])):
            yield f"{name} in docs/conformance.md differs from this run: {again}"


def _members(by_name: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of a mapping, or the members of its lists."""
    for key, value in by_name.items():
        if isinstance(value, list):
            yield from value
        else:
            yield key


def worse(
    outcomes: list[Outcome], recorded: dict[str, Any], *, whole: bool
) -> Iterator[str]:
    """What is worse than it was recorded to be; the counts only if all was tried."""
    for outcome in outcomes:
        new = outcome.verdict == "refused" and outcome.name not in recorded["refused"]
        if new or outcome.verdict in ("wrong", "crashed"):
            yield f"{outcome.name} is {outcome.verdict}"
    found, missing = counts(outcomes, "proved"), counts(outcomes, "missing")
    for i, name in enumerate(("pairs", "types") if whole else ()):
        if found[i] < recorded[name] - missing[i] or recorded[name] < BAR[name]:
            yield (
                f"{found[i]} {name} proved, and {recorded[name]} are recorded (the bar"
                f" is {BAR[name]})"
            )


def last_line(outcomes: list[Outcome]) -> str:
    verdicts = Counter(outcome.verdict for outcome in outcomes for _ in outcome.tasks)
    pairs, types = counts(outcomes, "proved")
    all_types = len({outcome.model_type for outcome in outcomes})
    rest = ", ".join(
        f"{verdicts[verdict]} {verdict}"
        for verdict in ("crashed", "missing")
        if verdicts[verdict]
    )
    said = (
        f"{pairs} of {verdicts.total()} pairs and {types} of {all_types} types proved"
    )
    return f"{said}, {verdicts['refused']} refused, {verdicts['wrong']} wrong" + (
        f", {rest}" if rest else ""
    )


if __name__ == "__main__":
    sys.exit(main())

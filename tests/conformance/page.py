"""Write the measured part of docs/conformance.md from what was recorded."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from switches import switches

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
BEGIN = "<!-- conformance: `python tests/conformance/run.py --record` writes this -->\n"
END = "<!-- end of conformance -->"
ANALYSES_BEGIN = (
    "<!-- analyses: `python tests/conformance/run.py --analyses` measures this -->\n"
)
ANALYSES_END = "<!-- end of analyses -->"
VERDICTS = ("proved", "refused", "wrong", "crashed", "missing")


def write(record: Mapping[str, Any], tally: Mapping[str, Any]) -> None:
    """Put both records into the page, each between its two comments."""
    text = PAGE.read_text("utf-8")
    for begin, end, lines in _places(record, tally):
        above, found, rest = text.partition(begin)
        assert found and end in rest, f"{PAGE} has no place for the tables"
        text = f"{above}{begin}{lines}{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, "utf-8")


def shows(record: Mapping[str, Any], tally: Mapping[str, Any]) -> bool:
    """Tell whether the page shows these records."""
    text = PAGE.read_text("utf-8")
    return all(
        text.partition(begin)[2].partition(end)[0] == lines
        for begin, end, lines in _places(record, tally)
    )


def _places(
    record: Mapping[str, Any], tally: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    yield BEGIN, END, measured(record)
    yield ANALYSES_BEGIN, ANALYSES_END, "\n" + "\n".join(analyses(tally)) + "\n\n"


def analyses(tally: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many types each analysis serves, and why not others."""
    yield f"{_types(tally)} Tried with transformers {tally['transformers']}."
    yield ""
    rows = []
    for word, one in tally["analyses"].items():
        right, refused = len(one["right"]), sum(map(len, one["refused"].values()))
        tried = right + refused + len(one["faults"])
        rows.append(
            [f"`{word}`", right, refused, len(one["faults"]), f"{right / tried:.0%}"]
        )
    yield from _table(["analysis", "right", "refused", "faults", "share served"], rows)
    yield ""
    yield "Refused, and why:"
    yield ""
    # Analyses that refuse the same types for the same reason share a row.
    shared: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for word, one in tally["analyses"].items():
        for why, types in one["refused"].items():
            shared.setdefault((why, tuple(types)), []).append(f"`{word}`")
    listed = sorted(shared.items(), key=lambda item: (item[0][0], item[1]))
    yield from _table(
        ["why", "analyses", "types", "model types"],
        [
            [why, ", ".join(words), len(types), ", ".join(types)]
            for (why, types), words in listed
        ],
    )
    faults = [
        [f"`{word}`", model_type, fault]
        for word, one in tally["analyses"].items()
        for model_type, fault in one["faults"].items()
    ]
    if faults:
        yield ""
        yield "Faults that are known and not mended:"
        yield ""
        yield from _table(["analysis", "model type", "what"], faults)


def _types(tally: Mapping[str, Any]) -> str:
    """Return how many types were tried, and which were not."""
    left = {name: tally[name] for name in ("missing", "unproved", "unloaded")}
    count = tally["types"] - sum(map(len, left.values()))
    told = {
        "missing": "this transformers has none of",
        "unproved": "not proved, and so refused whole, are",
        "unloaded": "not loaded are",
    }
    rest = [f"{told[name]} {', '.join(some)}" for name, some in left.items() if some]
    said = f"**{count} of {tally['types']}** model types were tried"
    return f"{'; '.join([said, *rest])}."


def measured(record: Mapping[str, Any]) -> str:
    """Return the measured part of the page."""
    return "\n" + "\n".join(_lines(record)) + "\n\n"


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    tasks = record["tasks"]
    verdicts = [
        verdict
        for verdict in VERDICTS
        if verdict in ("proved", "refused", "wrong") or _total(tasks, verdict)
    ]
    yield (
        f"**{record['pairs']} of {record['all_pairs']}** pairs of a class and a task,"
        f" and **{record['types']} of {record['all_types']}** model types with all"
        f" their classes, are proved. {_total(tasks, 'refused')} pairs are refused and"
        f" {_total(tasks, 'wrong')} are wrong. Tried with transformers"
        f" {record['transformers']}."
    )
    yield ""
    yield from _table(
        ["task", *verdicts],
        [[task, *(tasks[task].get(v, 0) for v in verdicts)] for task in sorted(tasks)],
    )
    yield ""
    kinds = sorted(record["kinds"].items(), key=lambda item: (-item[1], item[0]))
    yield from _table(["kind of block", "proved stacks"], kinds)
    yield ""
    yield "### Refused"
    yield ""
    refused: dict[str, list[str]] = {}
    for name, reason in sorted(record["refused"].items()):
        # Classes of a family differ in the prefix of their modules alone.
        short = reason.replace("reformer.", "").replace("model.", "")
        refused.setdefault(short, []).append(name)
    rows = [[", ".join(names), reason] for reason, names in refused.items()]
    yield from _table(["classes", "what the proof says"], rows)
    yield ""
    yield "### Without parts"
    yield ""
    yield (
        "In these types every layer is proved, and `attn`, `mid` and `mlp` inside some"
        " blocks are not."
    )
    yield ""
    parts = sorted(record["without_parts"].items(), key=lambda item: -len(item[1]))
    rows = [[reason, ", ".join(types)] for reason, types in parts]
    yield from _table(["what the proof says", "model types"], rows)
    yield ""
    yield "### Heads"
    yield ""
    heads = record["heads"]
    yield (
        f"In {heads['types']} types the heads of attention are proved, in"
        f" {heads['attentions']:,} attentions of all classes. In {heads['compared']:,}"
        " of them the weights that transformers reports with eager attention, times the"
        " values, were compared with `z`. Heads are refused where parts are, and in"
        " these types, in some or all of their blocks:"
    )
    yield ""
    reasons = sorted(record["without_heads"].items(), key=lambda item: -len(item[1]))
    rows = []
    for reason, types in reasons:
        # What refuses the parts of a block refuses its heads for the same reason.
        if record["without_parts"].get(reason) != types:
            rows.append([reason, ", ".join(types)])
    yield from _table(["what the proof says", "model types"], rows)
    yield ""
    yield "### Not tried"
    yield ""
    yield (
        f"{len(record['untried'])} language models of this transformers have no tiny"
        f" configuration here: {', '.join(record['untried'])}."
    )
    yield ""
    yield from _switches()


def _switches() -> Iterator[str]:
    """Yield the section about the switches that tiny configurations had hidden."""
    named: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    types = switches()
    for model_type, hidden in sorted(types.items()):
        for name, switch in hidden.items():
            named[switch["why"]][name].append(model_type)
    counts = {}
    for why, names in named.items():
        counts[why] = sum(map(len, names.values()))
    yield "### Switches"
    yield ""
    yield (
        "A multiplier of 1, a soft cap that is not set or a window as long as the text"
        " would let a mistake pass unseen. The tiny configurations had"
        f" {sum(counts.values())} such switches in {len(types)} model types, and now"
        " set them to values that act; each changes what its model gives back."
        f" {counts['published']} are set by published models:"
    )
    yield ""
    by_count = sorted(named["published"].items(), key=lambda item: -len(item[1]))
    rows = [[f"`{name}`", ", ".join(names)] for name, names in by_count]
    yield from _table(["switch", "model types"], rows)
    yield ""
    yield (
        f"{counts['size']} more were too large to act on a short text or on small"
        f" activations: {_counted(named['size'])}. {counts['code']} are left alone by"
        " the published models that are known, but the code has them:"
        f" {_counted(named['code'])}."
    )


def _counted(named: Mapping[str, list[str]]) -> str:
    """Return names with the number of their types, the most frequent first."""
    by_count = sorted(named.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"`{name}` ({len(types)})" for name, types in by_count)


def _total(tasks: Mapping[str, Mapping[str, int]], verdict: str) -> int:
    return sum(counts.get(verdict, 0) for counts in tasks.values())


def _table(head: list[str], rows: list[Any]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        cells = [str(cell).replace("|", "\\|") for cell in row]
        yield f"| {' | '.join(cells)} |"

"""A question in words, and the surfaces that it is put to: Python, a command, a request.

What is asked follows from the declaration of an analysis: each parameter is given in
words by its kind, as a form gives it. The models of a subject lie in a folder, so that
a command and a workbench can load them, and Python loads them from there too.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli.main import app
from hiddenscope.interface import Parameter
from hiddenscope.testing import Subject
from hiddenscope.testing.checks.law import only_if
from hiddenscope.testing.entries import Outcome, outcome_of
from tests.registry import Entry
from tests.workbench.inside import BenchInside, inside

Words = Mapping[str, Any]
RUNNER = CliRunner()
# What only a subject knows; what else there is to say stands in the entry's request.
OF_SUBJECT = ("text", "texts", "contrast", "pairs", "data", "model", "direction")
TARGETS = "The rest."


def parameters_of(entry: Entry) -> dict[str, Parameter]:
    """Return the parameters of an analysis by their names."""
    return {one.name: one for one in entry.description.parameters}


def question(entry: Entry, subject: Subject) -> dict[str, Any]:
    """Ask the usual question about a subject in words.

    It has what is required, and what the entry's request says.
    """
    only_if(entry.request is not None, "its arguments are declared by its command")
    request = entry.request or {}
    words = {
        name: _in_words(parameter, entry, subject)
        for name, parameter in parameters_of(entry).items()
        if parameter.required or name in request
    }
    if subject.encoder_decoder and takes_targets(entry):
        words["targets"] = TARGETS
    return words


def takes_targets(entry: Entry) -> bool:
    """Tell whether the text of a decoder can be given by itself."""
    declared = parameters_of(entry).values()
    return entry.takes("targets") or any(one.encoded for one in declared)


def _in_words(parameter: Parameter, entry: Entry, subject: Subject) -> Any:
    """Return what is asked for a parameter, as a form gives it."""
    said = (entry.request or {}).get(parameter.name)
    if parameter.kind == "sites":
        is_layer = str(said).startswith("layer.")
        return f"{subject.prefix}{said}" if is_layer else said
    if parameter.kind not in OF_SUBJECT:
        return said
    if parameter.kind == "text":
        return subject.texts[2 if parameter.name == "b" else 0]
    if parameter.kind == "texts":
        several = isinstance(said, list) and not subject.encoder_decoder
        texts = subject.labelled[0] if parameter.positional else subject.texts
        return texts if several else subject.texts[0]
    if parameter.kind == "contrast":
        contrast = subject.contrasts[0]
        values = vars(contrast) | {
            "answer": _word(subject, contrast.answer),
            "other": _word(subject, contrast.other),
            "targets": TARGETS if subject.encoder_decoder else None,
        }
        return {name: value for name, value in values.items() if value is not None}
    if parameter.kind == "pairs":
        return [_line(subject, pair) for pair in subject.pairs]
    if parameter.kind == "direction":
        sides = {"toward": [subject.texts[1]], "away": [subject.texts[3]]}
        return {**said, **sides, "sites": subject.site}
    return entry.arguments(subject)[parameter.name]


def options(entry: Entry, subject: Subject, words: Words) -> Iterator[tuple[str, Any]]:
    """Yield every option with a value that differs from what is asked already."""
    for name, parameter in parameters_of(entry).items():
        if parameter.kind in OF_SUBJECT or parameter.python_only:
            continue
        now = words.get(name, parameter.default)
        values: dict[str, Any] = {
            "integer": (now or 1) + 1 if isinstance(now, int | None) else 2,
            "choice": [one for one in parameter.choices if one != now][:2],
            "sites": f"{subject.prefix}layer.2",
            "flag": not now,
            "pooling": "max" if now != "max" else "first",
            "numbers": [0.5],
            "dictionary": "neurons",
            "words": ["layer.1.mlp > logits"],
        }
        value = values.get(parameter.kind)
        for one in value if parameter.kind == "choice" else [value]:
            if one is not None and one != now:
                yield name, one


def _word(subject: Subject, token: Any) -> str:
    return str(subject.model.text_encoder.string(token))


def _line(subject: Subject, pair: hs.Interchange) -> str:
    """Write a pair as a line of JSON."""
    answers = {
        name: _word(subject, getattr(pair, name))
        for name in ("answer", "counterfactual")
    }
    values = {**vars(pair), **answers}
    return json.dumps({name: value for name, value in values.items() if value})


@dataclass
class Said:
    """What a command did: its exit code, what it printed, and what it wrote."""

    code: int
    printed: str
    complained: str
    wrote: Path


@dataclass
class Desk:
    """A folder with models and texts, and a workbench over it."""

    folder: Path
    closing: ExitStack = field(default_factory=ExitStack)
    _answers: dict[Any, Outcome] = field(default_factory=dict)
    _loaded: dict[Path, hs.Model] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """Where files of texts are, and where commands run."""
        (self.folder / "data").mkdir(exist_ok=True)
        return self.folder / "data"

    @cached_property
    def bench(self) -> BenchInside:
        """A workbench inside this process, begun when it is first asked."""
        (self.folder / "models").mkdir(exist_ok=True)
        workbench = inside(self.folder / "app", root=self.folder)
        return self.closing.enter_context(workbench)

    def saved(self, model: hs.Model, name: str) -> Path:
        """Save a model once, and return its folder."""
        path = self.folder / "models" / name
        if not path.exists():
            module: Any = model.module
            module.save_pretrained(path)
            module_tokenizer: Any = model.tokenizer
            module_tokenizer.save_pretrained(path)
        return path

    def model(self, subject: Subject) -> Path:
        """Return the folder of a subject's model."""
        return self.saved(subject.model, subject.name)

    def loaded(self, path: Path) -> hs.Model:
        """Load a model from its folder, once."""
        if path not in self._loaded:
            self._loaded[path] = hs.load(path, device="cpu")
        return self._loaded[path]

    def second(self, subject: Subject, value: Any) -> Path:
        """Return the folder of another model of the subject."""
        kind = "faulty" if value is subject.faulty else "donor"
        return self.saved(value, f"{subject.name}-{kind}")

    def table(self, entry: Entry, subject: Subject, value: Any) -> Path:
        """Write texts with their labels, or prompts with their answers."""
        path = self.data / f"{entry.word}-{subject.name}.csv"
        rows = zip(*value, strict=True) if isinstance(value, tuple) else value
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            for text, label in rows:
                is_token = not isinstance(value, tuple)
                writer.writerow([text, _word(subject, label) if is_token else label])
        return path

    # --- Python

    def python(self, entry: Entry, subject: Subject, words: Words) -> Outcome:
        """Ask in Python, once."""
        key = entry.word, subject.name, repr(sorted(words.items(), key=str))
        if key not in self._answers:
            self._answers[key] = outcome_of(lambda: self._ask(entry, subject, words))
        return self._answers[key]

    def _ask(self, entry: Entry, subject: Subject, words: Words) -> Any:
        model = self.loaded(self.model(subject))
        source = {entry.model_name: model}
        values = {**source, **dict(self._values(entry, subject, words, model))}
        targets = words.get("targets")
        if targets is not None and not entry.takes("targets"):
            for parameter in parameters_of(entry).values():
                if parameter.encoded:
                    texts = values[parameter.name]
                    values[parameter.name] = model.encode(texts, targets=targets)
        return entry.function(**values)

    def _values(
        self, entry: Entry, subject: Subject, words: Words, model: hs.Model
    ) -> Iterator[tuple[str, Any]]:
        """Yield what the function takes for each word."""
        for name, parameter in parameters_of(entry).items():
            value = words.get(name)
            if value is None:
                if parameter.explicit:
                    yield name, None
            elif parameter.fields:
                make = attrgetter(parameter.constructor)(hs)
                first = (model,) if parameter.takes_model else ()
                yield name, make(*first, **value)
            elif parameter.kind == "pairs":
                yield name, [hs.Interchange(**json.loads(line)) for line in value]
            elif parameter.kind == "data":
                yield name, hs.read(self.table(entry, subject, value))
            elif parameter.kind == "model":
                yield name, self.loaded(self.second(subject, value))
            else:
                yield name, value

    # --- The command

    def command(self, entry: Entry, subject: Subject, words: Words) -> list[str]:
        """Write a question as the words of a command."""
        options, places = ["--model", str(self.model(subject))], []
        targets = words.get("targets")
        if targets is not None and not entry.takes("targets"):
            options += ["--targets", targets]
        typed = self._typed(entry, subject, words)
        for is_place, more in typed:
            if is_place:
                places += more
            else:
                options += more
        return [entry.word, *options, "--", *places]

    def _typed(
        self, entry: Entry, subject: Subject, words: Words
    ) -> Iterator[tuple[bool, list[str]]]:
        """Yield what is typed for each parameter, and whether it has a place."""
        # A search reads its texts from a file, before the queries.
        if entry.word == "search":
            yield True, [str(self._texts("search", words["texts"])), words["query"]]
        for name, parameter in parameters_of(entry).items():
            value = words.get(name)
            if entry.word == "search" and name in ("query", "texts"):
                continue
            if value is None:
                yield False, list(parameter.python_default)
            elif parameter.fields:
                for one in parameter.fields:
                    if value.get(one.name) is not None:
                        yield _spelled(one, value[one.name])
            elif parameter.kind == "pairs":
                path = self.data / f"{entry.word}-{subject.name}.jsonl"
                path.write_text("\n".join(value), "utf-8")
                yield _spelled(parameter, str(path))
            elif parameter.kind == "data":
                yield _spelled(parameter, str(self.table(entry, subject, value)))
            elif parameter.kind == "model":
                yield _spelled(parameter, str(self.second(subject, value)))
            else:
                yield _spelled(parameter, value)

    def _texts(self, name: str, texts: Any) -> Path:
        path = self.data / f"{name}.txt"
        lines = [texts] if isinstance(texts, str) else texts
        path.write_text("\n".join(lines), "utf-8")
        return path

    def run(self, words: list[str], suffix: str) -> Said:
        """Run a command, which writes what it found."""
        out = self.data / f"out{suffix}"
        out.unlink(missing_ok=True)
        line = [words[0], "--out", str(out), "--quiet", *words[1:]]
        try:
            done = RUNNER.invoke(app, line)
        finally:
            progress.show(None)
        return Said(done.exit_code, done.stdout, done.stderr, out)

    # --- The request

    def request(self, entry: Entry, subject: Subject, words: Words) -> dict[str, Any]:
        """Write a question as the arguments of a request."""
        arguments = {}
        for name, parameter in parameters_of(entry).items():
            value = words.get(name)
            if value is None:
                continue
            if parameter.kind == "data":
                value = self._uploaded(self.table(entry, subject, value))
            elif parameter.kind == "model":
                value = {"name": self.listed(self.second(subject, value))}
            arguments[name] = value
        return arguments

    def listed(self, path: Path) -> str:
        """Return the opaque name of a model's folder."""
        return self.bench.folder(str(path.relative_to(self.folder)))

    def _uploaded(self, path: Path) -> str:
        where = f"/api/datasets?file={path.name}"
        answer = self.bench.ask("POST", where, path.read_bytes())
        return str(answer.json["name"])


def _spelled(parameter: Parameter, value: Any) -> tuple[bool, list[str]]:
    """Spell an argument as a command takes it."""
    only_if(not parameter.python_only, parameter.python_only)
    values = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if parameter.is_argument:
        return True, values
    if parameter.kind == "flag":
        negation = parameter.option.replace("--", "--no-")
        return False, [parameter.option if value else negation]
    if parameter.kind == "numbers":
        values = [",".join(values)]
    spelled: list[str] = []
    for word in values:
        is_long = parameter.option.startswith("--")
        spelled += (
            [f"{parameter.option}={word}"] if is_long else [parameter.option, word]
        )
    return False, spelled

"""A question as code that makes the same result: "as Python" and "as command".

>>> asked = {"analysis": "lens", "model": {"name": "smollm2"}, "arguments": {"text": "A text.", "k": 3}}
>>> print(as_python(asked, {}))
import hiddenscope as hs
<BLANKLINE>
model = hs.load('smollm2')
result = hs.lens(model, 'A text.', k=3)
result.save('lens.html')
<BLANKLINE>
>>> as_command(asked, {}).text
"hiddenscope lens --model smollm2 -k 3 --out lens.html 'A text.'"
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from hiddenscope.app.schemas import ColumnChoice, Question, never_a_path, questions_of
from hiddenscope.app.stores import holds_pair
from hiddenscope.catalog import ANALYSIS
from hiddenscope.workers import Header

ONLY_PYTHON = "This can be asked in Python only."
# What the command of an analysis has another name for, or has not at all.
SPELLED = {
    ("lens", "k"): "-k",
    ("search", "k"): "-k",
    ("compare", "targets"): "--target",
}
NOT_IN_COMMANDS = {
    ("lens", "targets"),
    ("steer", "quality"),
    ("steer", "direction"),
    ("search", "texts"),
}
COLUMNS_IN_COMMANDS = {"project", "probe"}
FILE_LIKE = re.compile(r"\S+\.[A-Za-z0-9]{1,11}")


class Command(NamedTuple):
    """A command line, or None and why there is none."""

    text: str | None
    reason: str = ""


class Named(NamedTuple):
    """What an opaque name stands for: a path, and the columns that were named when a
    file was uploaded.
    """

    path: str
    choice: ColumnChoice | None = None

    @property
    def columns(self) -> dict[str, str]:
        """The columns that were named."""
        return {} if self.choice is None else self.choice.model_dump(exclude_none=True)


Names: TypeAlias = Mapping[str, Named]


class _Missing(Exception):
    """The command line has no way to say this."""


def as_python(asked: Header, names: Names) -> str | None:
    """A program that makes the same result. `names` are the paths and files that opaque
    names stand for.
    """
    word, arguments = asked["analysis"], asked["arguments"]
    if word == "answers":
        return None
    if word in ("state", "continuation"):
        return _of_state(asked, names)
    if "store" in arguments:
        return _of_store(asked, names)
    if "store" in asked and asked["store"] not in names:
        return None
    source = "states" if "store" in asked else "model"
    opened = (
        _opened(names[asked["store"]].path)
        if "store" in asked
        else _load(asked["model"], names)
    )
    lines = ["import hiddenscope as hs", "", f"{source} = {opened}"]
    if word == "grid":  # the same norms, by the analysis that has them
        return _program(
            [
                *lines,
                f"result = hs.profile(model, {arguments['text']!r})",
                "result.save('profile.html')",
            ]
        )
    given = [
        one
        for one in questions_of(ANALYSIS[word])
        if arguments.get(one.name) is not None
    ]
    values = [
        _in_python(one, arguments[one.name], names, "store" in asked) for one in given
    ]
    named = _names_needed(word, given)
    parts = [
        f"{one.name}={value}" if one.name in named else value
        for one, value in zip(given, values, strict=True)
    ]
    if word == "search":
        query = _in_python(given[0], arguments["query"], names)
        parts[0] = f"(model, {query})"
    if word == "drift" and "texts" not in arguments:
        parts.insert(1, "None")
    call = f"hs.{word}({', '.join([source, *parts])})"
    if word == "embed":
        return _program(
            [
                "import numpy",
                *lines,
                f"vectors = {call}",
                f"numpy.save('{_file(word)}', vectors)",
            ]
        )
    return _program([*lines, f"result = {call}", f"result.save('{_file(word)}')"])


def as_command(asked: Header, names: Names) -> Command:
    """A command line that makes the same result."""
    word, arguments = asked["analysis"], asked["arguments"]
    if word in ("state", "continuation", "answers"):
        return Command(
            None, f"No command reads or changes a single state. {ONLY_PYTHON}"
        )
    if word == "grid":
        word, arguments = "profile", {"texts": arguments["text"]}
    try:
        if "store" in arguments:
            word, options, words = "search", *_search_of_store(asked, names)
        else:
            options, words = _options(asked, word, arguments, names)
    except _Missing as missing:
        return Command(None, str(missing))
    dashes = ["--"] if any(one.startswith("-") for one in words) else []
    return Command(
        shlex.join(
            ["hiddenscope", word, *options, "--out", _file(word), *dashes, *words]
        )
    )


def _file(word: str) -> str:
    """The file that the code of an analysis writes; `embed` gives a bare array."""
    return "embed.npy" if word == "embed" else f"{word}.html"


def _program(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"


def _of_state(asked: Header, names: Names) -> str:
    """One state in Python, and what the model predicts when it is changed."""
    arguments = asked["arguments"]
    text, site, token = arguments["text"], arguments["site"], arguments["token"]
    lines = ["import hiddenscope as hs", "", f"model = {_load(asked['model'], names)}"]
    lines += [f"states = model.capture({text!r})", f"state = states[{site!r}][{token}]"]
    change = arguments.get("change")
    if asked["analysis"] == "continuation" and change is None:
        return _program([*lines, *_of_continuation(arguments, "")])
    if change is None:
        return _program([*lines, "print(float(state.norm()))"])
    made = {"ablate": f"hs.Scale(0.0, tokens={token})"}
    if change["kind"] == "replace":
        lines.append(f"other = model.capture({change.get('text')!r})")
        made["replace"] = (
            f"hs.Replace(other[{site!r}][{change.get('token', token)}], tokens={token})"
        )
    if change["kind"] == "steer":
        for name in ("toward", "away"):
            lines.append(f"{name} = model.capture({change.get(name)!r})[{site!r}][-1]")
        made["steer"] = (
            f"hs.Add((toward - away).float(), tokens={token},"
            f" scale={change.get('strength', 1.0)!r})"
        )
    if asked["analysis"] == "continuation":
        return _program([*lines, *_of_continuation(arguments, made[change["kind"]])])
    lines.append(
        f"changed = hs.edit(model, [{text!r}], {{{site!r}: {made[change['kind']]}}},"
        " (), logits=True)"
    )
    lines.append("best = changed.logits[-1].float().softmax(-1).topk(10)")
    return _program(
        [
            *lines,
            (
                "print([(model.tokenizer.decode(int(i)), float(p)) for p, i in"
                " zip(*best)])"
            ),
        ]
    )


def _of_continuation(arguments: Header, change: str) -> list[str]:
    """What the model writes after the text, as it is and with one state changed."""
    lines = [
        f"inputs = model.tokenizer({arguments['text']!r},"
        " return_tensors='pt').to(model.device)"
    ]
    write = (
        f"model.module.generate(**inputs, max_new_tokens={arguments['new_tokens']},"
        " do_sample=False)"
    )
    show = "print(model.tokenizer.decode(written[0, inputs['input_ids'].shape[1] :]))"
    lines += [f"written = {write}", show]
    if change:
        lines += [
            f"with hs.editing(model, {{{arguments['site']!r}: {change}}}):",
            f"    written = {write}",
            show,
        ]
    return lines


def _of_store(asked: Header, names: Names) -> str | None:
    """A question about kept states; None where they are there no longer."""
    word, arguments = asked["analysis"], asked["arguments"]
    if arguments["store"] not in names:
        return None
    lines = [
        "import hiddenscope as hs",
        "",
        f"states = {_opened(names[arguments['store']].path)}",
    ]
    text, site, k = (arguments.get(name) for name in ("text", "site", "k"))
    source = "states"
    if word == "kept":
        return _program(
            [
                *lines,
                f"result = hs.profile(states.of({text}))",
                "result.save('profile.html')",
            ]
        )
    if word == "store":
        lines.append(f"model = {_load(asked['model'], names)}")
        query = f"(model, {arguments['query']!r}), {k}" + (
            f", site={site!r}" if site else ""
        )
    else:
        lines.append(f"state = states.of({text})[{site!r}][{arguments['token']}]")
        # The nearest of all is the state itself.
        query = f"state, {k + 1}, site={site!r}"
        source = "hs.each_token(states)"
    return _program(
        [*lines, f"result = hs.search({source}, {query})", "result.save('search.html')"]
    )


def _opened(path: str) -> str:
    """Write the call that opens kept states: a store, or a file of one stack or of two."""
    if not path.endswith(".safetensors"):
        return f"hs.open({path!r})"
    kind = "Pair" if holds_pair(Path(path)) else "States"
    return f"hs.{kind}.load({path!r})"


def _search_of_store(asked: Header, names: Names) -> tuple[list[str], list[str]]:
    """The options and the words of a search for a text among kept states; no command
    asks the others about them.
    """
    arguments = asked["arguments"]
    if asked["analysis"] == "kept":
        raise _Missing(
            f"`hiddenscope profile --states` reads all texts, not one. {ONLY_PYTHON}"
        )
    if asked["analysis"] == "nearest":
        raise _Missing(
            "`hiddenscope search --states` looks for texts, not for a state."
            f" {ONLY_PYTHON}"
        )
    if arguments["store"] not in names:
        raise _Missing("The states are there no longer.")
    options = [
        "--states",
        names[arguments["store"]].path,
        *_model(asked["model"], names),
        "-k",
        str(arguments["k"]),
    ]
    return [*options, *_pairs({"site": arguments.get("site")})], [
        _text(arguments["query"])
    ]


def _load(choice: Header, names: Names) -> str:
    dtype = f", dtype={choice['dtype']!r}" if choice.get("dtype") else ""
    return f"hs.load({_named(choice['name'], names).path!r}{dtype})"


def _named(name: str, names: Names) -> Named:
    return names.get(name, Named(name))


def _names_needed(word: str, given: Sequence[Question]) -> set[str]:
    """Which arguments must be named: keyword-only ones, and all after a positional one
    that is left out.
    """
    order = [one.name for one in questions_of(ANALYSIS[word]) if one.positional]
    present = [one.name for one in given if one.positional]
    unbroken = {name for place, name in enumerate(present) if order[place] == name}
    return {one.name for one in given if one.name not in unbroken}


def _in_python(
    question: Question, value: Any, names: Names, of_states: bool = False
) -> str:
    """Write an argument. Kept states take labels that were read, not the name of a
    dataset.
    """
    if question.kind == "model":
        return _load(value, names)
    if question.kind == "data":
        data = _named(value, names)
        columns = "".join(
            f", {name}={column!r}" for name, column in data.columns.items()
        )
        return (
            f"hs.read({data.path!r}{columns})"
            if columns or of_states
            else repr(data.path)
        )
    if question.kind == "contrast":
        return f"hs.Contrast({', '.join(f'{name}={part!r}' for name, part in value.items())})"
    if question.kind == "direction":
        toward, away = (_as_list(value[name]) for name in ("toward", "away"))
        rest = "".join(
            f", {name}={part!r}"
            for name, part in value.items()
            if name not in ("toward", "away")
        )
        return f"hs.Direction.between(model, {toward!r}, {away!r}{rest})"
    return repr(never_a_path(question.kind, value))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _options(
    asked: Header, word: str, arguments: Header, names: Names
) -> tuple[list[str], list[str]]:
    """The options of a command, and its words."""
    words: list[str] = []
    model = asked.get("model") or {}
    options = _source(asked, names)
    # What Python measures on, if nothing else is given.
    options += ["--quality", "plain"] if word == "steer" else []
    for question in questions_of(ANALYSIS[word]):
        value = arguments.get(question.name)
        if value is None:
            continue
        if question.kind == "direction":
            options += _direction(value)
        elif question.kind == "contrast":
            words += [_text(value["clean"]), _text(value["corrupt"])]
            options += [*_pairs({"answer": value["answer"], "other": value["other"]})]
            options += [
                *_pairs({"target": value.get("targets"), "at": value.get("at")})
            ]
        elif (word, question.name) in NOT_IN_COMMANDS:
            raise _Missing(
                f"`hiddenscope {word}` has no option for {question.name}. {ONLY_PYTHON}"
            )
        elif question.kind == "data" and (columns := _named(value, names).columns):
            if word not in COLUMNS_IN_COMMANDS:
                raise _Missing(
                    f"`hiddenscope {word}` has no option for the columns of a file."
                    f" {ONLY_PYTHON}"
                )
            words.append(_named(value, names).path)
            options += _pairs(columns)
        elif question.positional and question.kind in (
            "text",
            "texts",
            "model",
            "data",
        ):
            words += _words(word, question, value, model, names)
        else:
            options += _option(word, question, value, model, names)
    return options, words


def _source(asked: Header, names: Names) -> list[str]:
    """The options that name a model, or kept states."""
    if "store" not in asked:
        return _model(asked["model"], names)
    if asked["store"] not in names:
        raise _Missing("The states are there no longer.")
    return ["--states", names[asked["store"]].path]


def _model(choice: Header, names: Names) -> list[str]:
    return [
        *_pairs(
            {"model": _named(choice["name"], names).path, "dtype": choice.get("dtype")}
        )
    ]


def _words(
    word: str, question: Question, value: Any, model: Header, names: Names
) -> list[str]:
    if question.kind == "data":
        return [_named(value, names).path]
    if question.kind == "model":
        return [_same_dtype(value, model, names)]
    if word == "search":
        raise _Missing(f"`hiddenscope search` searches a file. {ONLY_PYTHON}")
    return [_text(text) for text in _as_list(value)]


def _option(
    word: str, question: Question, value: Any, model: Header, names: Names
) -> list[str]:
    option = SPELLED.get((word, question.name), f"--{question.name.replace('_', '-')}")
    if word == "steer" and question.name == "answers":
        return [piece for one in _as_list(value) for piece in ("--answer", str(one))]
    if question.kind == "model":
        return [option, _same_dtype(value, model, names)]
    if question.kind == "flag":
        return (
            []
            if value == bool(question.default)
            else [option if value else option.replace("--", "--no-")]
        )
    if question.kind == "numbers":
        return (
            ["--ablate"]
            if value == "ablate"
            else [f"{option}={','.join(map(str, _as_list(value)))}"]
        )
    if isinstance(value, list):
        raise _Missing(
            f"`hiddenscope {word}` takes one text for {question.name}. {ONLY_PYTHON}"
        )
    return [f"{option}={value}"] if str(value).startswith("-") else [option, str(value)]


def _direction(value: Header) -> list[str]:
    texts = [
        piece
        for name in ("toward", "away")
        for text in _as_list(value[name])
        for piece in (f"--{name}", _text(text))
    ]
    flags = [
        f"--{name.replace('_', '-')}"
        for name in ("upwards", "spare_first")
        if value.get(name)
    ]
    return [
        *texts,
        *_pairs({"sites": value.get("sites"), "pool": value.get("pool")}),
        *flags,
    ]


def _pairs(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if value is not None:
            yield from (
                [f"--{name}={value}"]
                if str(value).startswith("-")
                else [f"--{name}", str(value)]
            )


def _same_dtype(choice: Header, model: Header, names: Names) -> str:
    if choice.get("dtype") != model.get("dtype"):
        raise _Missing(f"The two models have different dtypes. {ONLY_PYTHON}")
    return _named(choice["name"], names).path


def _text(text: str) -> str:
    """A text as an argument: one that looks like a file, or like stdin, cannot be given
    so.
    """
    if text.startswith("@"):
        return f"@{text}"
    if text == "-" or not text.strip() or FILE_LIKE.fullmatch(text) or "\0" in text:
        raise _Missing(
            f"A command line takes {text[:40]!r} for something else than a text."
            f" {ONLY_PYTHON}"
        )
    return text

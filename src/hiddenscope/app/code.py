"""A question of the page as code that makes the same result.

>>> request = {
...     "analysis": "lens",
...     "model": {"name": "smollm2"},
...     "arguments": {"texts": "A text.", "k": 3},
... }
>>> print(as_python(request, {}))
import hiddenscope as hs
<BLANKLINE>
model = hs.load('smollm2')
result = hs.lens(model, 'A text.', k=3)
result.save('lens.html')
<BLANKLINE>
>>> as_command(request, {}).text
"hiddenscope lens --model smollm2 -k 3 --out lens.html 'A text.'"
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from hiddenscope.app.library import holds_pair
from hiddenscope.app.schemas import form_parameters
from hiddenscope.catalog import ANALYSIS
from hiddenscope.interface import Kind, Parameter
from hiddenscope.texts import names_a_file

ONLY_PYTHON = "This can be asked in Python only."
FILE_LIKE = re.compile(r"\S+\.[A-Za-z0-9]{1,11}")
IMPORT = "import hiddenscope as hs"
NO_COMMAND = {
    **dict.fromkeys(
        ("state", "continuation", "answers"),
        f"No command reads or changes a single state. {ONLY_PYTHON}",
    ),
    "kept": f"`hiddenscope profile --states` reads all texts, not one. {ONLY_PYTHON}",
    "nearest": (
        f"`hiddenscope search --states` looks for texts, not for a state. {ONLY_PYTHON}"
    ),
}


class Named(NamedTuple):
    """The path that an opaque name stands for, and the columns chosen for it."""

    path: str
    columns: Mapping[str, str] = MappingProxyType({})


Names: TypeAlias = Mapping[str, Named]
Values: TypeAlias = Mapping[str, Any]


class NoCommand(Exception):
    """The command line cannot ask this, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} {ONLY_PYTHON}")


class Command(NamedTuple):
    """A command line, or None and why there is none."""

    text: str | None
    reason: str = ""


def as_python(request: Values, names: Names) -> str | None:
    """Return a program that makes the same result, or None where there is none.

    `names` are the paths and files that opaque names stand for.
    """
    request = _as_analysis(request)
    word = request["analysis"]
    if _is_gone(request, names):
        return None
    if word in ANALYSIS:
        return _program(*_analysis_lines(request, names))
    if word in PAGE_LINES:
        return _program(IMPORT, "", *PAGE_LINES[word](request, names))
    return None


def as_command(request: Values, names: Names) -> Command:
    """Return a command line that makes the same result."""
    request = _as_analysis(request)
    word = request["analysis"]
    if word in NO_COMMAND:
        return Command(None, NO_COMMAND[word])
    if _is_gone(request, names):
        return Command(None, "The states are there no longer.")
    try:
        if word == "store":
            word = "search"
            options, arguments = _store_words(request, names)
        else:
            options, arguments = _analysis_words(request, names)
    except NoCommand as error:
        return Command(None, str(error))
    if any(argument.startswith("-") for argument in arguments):
        arguments = ["--", *arguments]
    words = ["hiddenscope", word, *options, "--out", _file(word), *arguments]
    return Command(shlex.join(words))


def _as_analysis(request: Values) -> Values:
    """Return what the page asks in its own way as the analysis that answers it."""
    word, arguments = request["analysis"], request["arguments"]
    if word == "grid":
        word, arguments = "profile", {"texts": arguments["text"]}
    elif word == "reads":
        # Where no token was chosen, it is the last one.
        queries = str(arguments.get("token", -1))
        arguments = {"text": arguments["text"], "queries": queries, "draws": 0}
        word = "attention"
    return {**request, "analysis": word, "arguments": arguments}


def _is_gone(request: Values, names: Names) -> bool:
    """Return whether the kept states of a question have been removed."""
    store = request.get("store") or request["arguments"].get("store")
    return store is not None and store not in names


def _program(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def _file(word: str) -> str:
    """Return the file that the code writes; without a result that is an array."""
    return f"{word}.html" if ANALYSIS[word].result else f"{word}.npy"


def _analysis_lines(request: Values, names: Names) -> list[str]:
    word = request["analysis"]
    of_states = "store" in request
    if of_states:
        source, opening = "states", _opening(names[request["store"]].path)
    else:
        source, opening = "model", python_load(request["model"], names)
    parameters = form_parameters(ANALYSIS[word])
    arguments = python_arguments(
        parameters, request["arguments"], names, of_states=of_states
    )
    call = f"hs.{word}({', '.join([source, *arguments])})"
    lines = [IMPORT, "", f"{source} = {opening}"]
    if ANALYSIS[word].result:
        return [*lines, f"result = {call}", f"result.save('{_file(word)}')"]
    save = f"numpy.save('{_file(word)}', vectors)"
    return ["import numpy", *lines, f"vectors = {call}", save]


def _analysis_words(request: Values, names: Names) -> tuple[list[str], list[str]]:
    """Return the options and the arguments of the command of an analysis."""
    model = request.get("model") or {}
    parameters = form_parameters(ANALYSIS[request["analysis"]])
    options, arguments = command_words(
        parameters, request["arguments"], names, model.get("dtype")
    )
    if model:
        return [*_model_words(model, names), *options], arguments
    return ["--states", names[request["store"]].path, *options], arguments


def _store_words(request: Values, names: Names) -> tuple[list[str], list[str]]:
    """Return the options and the arguments of a search for a text in kept states."""
    arguments = request["arguments"]
    options = ["--states", names[arguments["store"]].path]
    options += _model_words(request["model"], names)
    options += option_words("-k", arguments["k"])
    if arguments.get("site") is not None:
        options += option_words("--site", arguments["site"])
    return options, [text_word(arguments["query"])]


def _model_words(choice: Values, names: Names) -> list[str]:
    words = option_words("--model", resolved(choice["name"], names).path)
    if choice.get("dtype") is not None:
        words += option_words("--dtype", choice["dtype"])
    return words


def _opening(path: str) -> str:
    """Return the call that opens kept states: a store or a file."""
    if not path.endswith(".safetensors"):
        return f"hs.open({path!r})"
    kind = "Pair" if holds_pair(Path(path)) else "States"
    return f"hs.{kind}.load({path!r})"


def _state_lines(request: Values, names: Names) -> list[str]:
    """Return one state, and what the model predicts when it is changed."""
    arguments = request["arguments"]
    lines, change = _change_lines(request, names)
    if not change:
        return [*lines, "print(float(state.norm()))"]
    changes = f"{{{arguments['site']!r}: {change}}}"
    return [
        *lines,
        f"changed = hs.edit(model, [{arguments['text']!r}], {changes}, (),"
        " logits=True)",
        "best = changed.logits[-1].float().softmax(-1).topk(10)",
        "print([(model.tokenizer.decode(int(i)), float(p)) for p, i in zip(*best)])",
    ]


def _continuation_lines(request: Values, names: Names) -> list[str]:
    """Return what the model writes after the text, and with one state changed."""
    arguments = request["arguments"]
    lines, change = _change_lines(request, names)
    write = (
        f"model.module.generate(**inputs, max_new_tokens={arguments['new_tokens']},"
        " do_sample=False)"
    )
    show = "print(model.tokenizer.decode(written[0, inputs['input_ids'].shape[1] :]))"
    lines += [
        f"inputs = model.tokenizer({arguments['text']!r},"
        " return_tensors='pt').to(model.device)",
        f"written = {write}",
        show,
    ]
    if change:
        lines += [
            f"with hs.editing(model, {{{arguments['site']!r}: {change}}}):",
            f"    written = {write}",
            show,
        ]
    return lines


def _change_lines(request: Values, names: Names) -> tuple[list[str], str]:
    """Return the lines that capture a state, and the change of it as Python."""
    arguments = request["arguments"]
    text, site, token = arguments["text"], arguments["site"], arguments["token"]
    lines = [
        f"model = {python_load(request['model'], names)}",
        f"states = model.capture({text!r})",
        f"state = states[{site!r}][{token}]",
    ]
    change = arguments.get("change")
    if change is None:
        return lines, ""
    if change["kind"] == "ablate":
        return lines, f"hs.Scale(0.0, tokens={token})"
    if change["kind"] == "replace":
        lines.append(f"other = model.capture({change.get('text')!r})")
        state = f"other[{site!r}][{change.get('token', token)}]"
        return lines, f"hs.Replace({state}, tokens={token})"
    for name in ("toward", "away"):
        lines.append(f"{name} = model.capture({change.get(name)!r})[{site!r}][-1]")
    scale = change.get("strength", 1.0)
    return (
        lines,
        f"hs.Add((toward - away).float(), tokens={token}, scale={scale!r})",
    )


def _store_lines(request: Values, names: Names) -> list[str]:
    """Return a search for a text in kept states."""
    arguments = request["arguments"]
    query = f"(model, {arguments['query']!r}), {arguments['k']}"
    if arguments.get("site"):
        query += f", site={arguments['site']!r}"
    return [
        f"states = {_opening(names[arguments['store']].path)}",
        f"model = {python_load(request['model'], names)}",
        f"result = hs.search(states, {query})",
        "result.save('search.html')",
    ]


def _kept_lines(request: Values, names: Names) -> list[str]:
    """Return the norms of one text in kept states."""
    arguments = request["arguments"]
    return [
        f"states = {_opening(names[arguments['store']].path)}",
        f"result = hs.profile(states.of({arguments['text']}))",
        "result.save('profile.html')",
    ]


def _nearest_lines(request: Values, names: Names) -> list[str]:
    """Return a search for a state in kept states."""
    arguments = request["arguments"]
    text, site, token = arguments["text"], arguments["site"], arguments["token"]
    # The nearest of all is the state itself.
    count = arguments["k"] + 1
    return [
        f"states = {_opening(names[arguments['store']].path)}",
        f"state = states.of({text})[{site!r}][{token}]",
        f"result = hs.search(hs.each_token(states), state, {count}, site={site!r})",
        "result.save('search.html')",
    ]


PAGE_LINES: dict[str, Callable[[Values, Names], Sequence[str]]] = {
    "state": _state_lines,
    "continuation": _continuation_lines,
    "store": _store_lines,
    "kept": _kept_lines,
    "nearest": _nearest_lines,
}


def protect_from_file_lookup(kind: Kind, value: Any) -> Any:
    """Return texts that no function takes for the name of a file.

    Some functions read a single string that names a file, but none in a list.

    >>> protect_from_file_lookup("texts", "diary.txt")
    ['diary.txt']
    >>> protect_from_file_lookup("texts", "A text.")
    'A text.'
    """
    if kind == "texts" and isinstance(value, str) and names_a_file(value):
        return [value]
    return value


def resolved(name: str, names: Names) -> Named:
    """Return what a name stands for; a name that is not opaque stands for itself."""
    return names.get(name, Named(name))


def python_arguments(
    parameters: Sequence[Parameter],
    values: Values,
    names: Names,
    *,
    of_states: bool = False,
) -> list[str]:
    """Return the arguments of a call, written as Python.

    Kept states take labels that were read, not the name of a dataset.
    """
    written = []
    # After a positional parameter that is left out, the others must be named.
    must_name = False
    for parameter in parameters:
        value = values.get(parameter.name)
        if value is None and not parameter.explicit:
            must_name = True
            continue
        text = _as_python(parameter, value, names, of_states)
        if must_name or not parameter.positional:
            text = f"{parameter.name}={text}"
        written.append(text)
    return written


def python_load(choice: Values, names: Names) -> str:
    """Return the call that loads a model."""
    arguments = [repr(resolved(choice["name"], names).path)]
    if choice.get("dtype"):
        arguments.append(f"dtype={choice['dtype']!r}")
    return f"hs.load({', '.join(arguments)})"


def _as_python(parameter: Parameter, value: Any, names: Names, of_states: bool) -> str:
    if parameter.kind == "model":
        return python_load(value, names)
    if parameter.kind == "data":
        path, columns = resolved(value, names)
        if not columns and not of_states:
            return repr(path)
        named = [f"{name}={column!r}" for name, column in columns.items()]
        return f"hs.read({', '.join([repr(path), *named])})"
    if parameter.fields:
        arguments = python_arguments(parameter.fields, value, names)
        if parameter.takes_model:
            arguments = ["model", *arguments]
        return f"hs.{parameter.constructor}({', '.join(arguments)})"
    if parameter.repeated and isinstance(value, str):
        return repr([value])
    return repr(protect_from_file_lookup(parameter.kind, value))


def command_words(
    parameters: Iterable[Parameter],
    values: Values,
    names: Names,
    dtype: str | None = None,
) -> tuple[list[str], list[str]]:
    """Return the options and the arguments of a command.

    `dtype` is that of the model: a command gives a second model the same.
    """
    options: list[str] = []
    arguments: list[str] = []
    for parameter in parameters:
        value = values.get(parameter.name)
        if value is None:
            options += parameter.python_default
        elif parameter.python_only:
            raise NoCommand(parameter.python_only)
        elif parameter.fields:
            more = command_words(parameter.fields, value, names, dtype)
            options += more[0]
            arguments += more[1]
        elif parameter.kind == "data":
            path, columns = resolved(value, names)
            arguments.append(path)
            for name, column in columns.items():
                options += option_words(f"--{name}", column)
        elif parameter.is_argument:
            arguments += _argument(parameter, value, names, dtype)
        else:
            options += _option(parameter, value, names, dtype)
    return options, arguments


def option_words(option: str, value: object) -> list[str]:
    """Return an option with its value; one that begins with a dash must be joined.

    >>> option_words("--pool", "mean"), option_words("--pool", -1)
    (['--pool', 'mean'], ['--pool=-1'])
    """
    word = str(value)
    if word.startswith("-"):
        return [f"{option}={word}"]
    return [option, word]


def text_word(text: str) -> str:
    """Return a text as an argument, or raise NoCommand where it would mean a file."""
    if text.startswith("@"):
        return f"@{text}"
    if text == "-" or not text.strip() or FILE_LIKE.fullmatch(text) or "\0" in text:
        raise NoCommand(
            f"A command line takes {text[:40]!r} for something else than a text."
        )
    return text


def _argument(
    parameter: Parameter, value: Any, names: Names, dtype: str | None
) -> list[str]:
    if parameter.kind == "model":
        return [_second_model(value, names, dtype)]
    return [text_word(text) for text in _listed(value)]


def _option(
    parameter: Parameter, value: Any, names: Names, dtype: str | None
) -> list[str]:
    option = parameter.option
    if parameter.kind == "flag":
        if value == parameter.default:
            return []
        return [option if value else option.replace("--", "--no-")]
    if parameter.kind == "model":
        return [option, _second_model(value, names, dtype)]
    if parameter.kind == "numbers":
        if value in parameter.choices:
            return [f"--{value}"]
        return [f"{option}={','.join(map(str, _listed(value)))}"]
    if parameter.repeated:
        return _repeated(option, _listed(value))
    if isinstance(value, list):
        raise NoCommand(f"The command takes one text for {parameter.name}.")
    return option_words(option, value)


def _repeated(option: str, values: Iterable[str]) -> list[str]:
    words = []
    for value in values:
        words += option_words(option, value)
    return words


def _second_model(choice: Values, names: Names, dtype: str | None) -> str:
    if choice.get("dtype") != dtype:
        raise NoCommand("The two models have different dtypes.")
    return resolved(choice["name"], names).path


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]

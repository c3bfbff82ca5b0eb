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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from hiddenscope.app.library import holds_pair
from hiddenscope.app.schemas import form_parameters
from hiddenscope.catalog import ANALYSIS
from hiddenscope.causes.contrast import interchanges
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
    word, arguments = request["analysis"], request["arguments"]
    store = store_of(request)
    if store is not None and store not in names:
        return None
    openings = {}
    if store is not None:
        path = names[store].path
        openings["states"] = f"hs.open({path!r})"
        if path.endswith(".safetensors"):
            kind = "Pair" if holds_pair(Path(path)) else "States"
            openings["states"] = f"hs.{kind}.load({path!r})"
    if "model" in request:
        openings["model"] = python_load(request["model"], names)
    if word in PAGE_PROGRAMS:
        values = {**arguments, **openings}
        values["at_site"] = ""
        if arguments.get("site"):
            values["at_site"] = f", site={arguments['site']!r}"
        if word == "nearest":
            # The nearest of all is the state itself.
            values["k"] += 1
        if arguments.get("change") is not None:
            word = f"{word} changed"
            values |= _change(arguments, names)
        program = "\n".join([IMPORT, "", *PAGE_PROGRAMS[word], ""])
        return program.format(**values)
    if word not in ANALYSIS:
        return None
    ((source, opening),) = openings.items()
    parameters = form_parameters(ANALYSIS[word])
    written = python_arguments(
        parameters, arguments, names, of_states=source == "states"
    )
    call = f"hs.{word}({', '.join([source, *written])})"
    lines = [IMPORT, "", f"{source} = {opening}"]
    if ANALYSIS[word].result:
        lines += [f"result = {call}", f"result.save('{_file(word)}')"]
    else:
        save = f"numpy.save('{_file(word)}', vectors)"
        lines = ["import numpy", *lines, f"vectors = {call}", save]
    return "\n".join([*lines, ""])


def as_command(request: Values, names: Names) -> Command:
    """Return a command line that makes the same result."""
    request = _as_analysis(request)
    word, arguments = request["analysis"], request["arguments"]
    store, model = store_of(request), request.get("model") or {}
    if word in NO_COMMAND:
        return Command(None, NO_COMMAND[word])
    if store is not None and store not in names:
        return Command(None, "The states are there no longer.")
    options = []
    if word == "fit" and store is not None:
        path = names[store].path
        if path.endswith(".safetensors"):
            reason = "`hiddenscope fit` reads a store, not a file."
            return Command(None, f"{reason} {ONLY_PYTHON}")
        options = [path]
        for name, value in arguments.items():
            option = "-k" if name == "k" else f"--{name}"
            options += option_words(option, value)
        return Command(shlex.join(["hiddenscope", word, *options]))
    if store is not None:
        options += ["--states", names[store].path]
    if model:
        options += option_words("--model", resolved(model["name"], names).path)
    if model.get("dtype") is not None:
        options += option_words("--dtype", model["dtype"])
    try:
        if word == "store":
            word = "search"
            options += option_words("-k", arguments["k"])
            if arguments.get("site") is not None:
                options += option_words("--site", arguments["site"])
            words = [text_word(arguments["query"])]
        else:
            parameters = form_parameters(ANALYSIS[word])
            more, words = command_words(
                parameters, arguments, names, model.get("dtype")
            )
            options += more
    except NoCommand as error:
        return Command(None, str(error))
    if any(argument.startswith("-") for argument in words):
        words = ["--", *words]
    line = ["hiddenscope", word, *options, "--out", _file(word), *words]
    return Command(shlex.join(line))


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


def store_of(request: Values) -> str | None:
    """Return the name of the kept states that are asked, which may be gone by now."""
    store: str | None = request.get("store") or request["arguments"].get("store")
    return store


def _file(word: str) -> str:
    """Return the file that the code writes; without a result that is an array."""
    return f"{word}.html" if ANALYSIS[word].result else f"{word}.npy"


def _change(arguments: Values, names: Names) -> dict[str, str]:
    """Return the change of a state as Python, and the lines before that it needs."""
    change = arguments["change"]
    values = {
        "donor": change.get("text"),
        "donor_token": change.get("token", arguments["token"]),
        "toward": change.get("toward"),
        "away": change.get("away"),
        "strength": change.get("strength", 1.0),
        "feature": change.get("feature"),
        "dictionary": resolved(arguments.get("dictionary", ""), names).path,
        "site": arguments["site"],
        "token": arguments["token"],
    }
    preparation, expression = CHANGES[change["kind"]]
    return {
        "preparation": preparation.format(**values),
        "change": expression.format(**values),
    }


FEATURE = (
    "dictionary = hs.Dictionary.read({dictionary!r}, model).at({site!r})\n"
    "feature = dictionary[{feature}]\n"
)
CHANGES = {
    "ablate": ("", "hs.Scale(0.0, tokens={token})"),
    "replace": (
        "other = model.capture({donor!r})\n",
        "hs.Replace(other[{site!r}][{donor_token}], tokens={token})",
    ),
    "steer": (
        "toward = model.capture({toward!r})[{site!r}][-1]\n"
        "away = model.capture({away!r})[{site!r}][-1]\n",
        "hs.Add((toward - away).float(), tokens={token}, scale={strength!r})",
    ),
    "add": (FEATURE, "hs.Add(feature, tokens={token}, scale={strength!r})"),
    "scale": (FEATURE, "hs.Scale({strength!r}, tokens={token}, along=feature)"),
}
CAPTURE = (
    "model = {model}",
    "states = model.capture({text!r})",
    "state = states[{site!r}][{token}]",
)
ENCODE = "inputs = model.tokenizer({text!r}, return_tensors='pt').to(model.device)"
GENERATE = (
    "written = model.module.generate(**inputs, max_new_tokens={new_tokens},"
    " do_sample=False)"
)
SHOW = "print(model.tokenizer.decode(written[0, inputs['input_ids'].shape[1] :]))"
PAGE_PROGRAMS = {
    "state": (*CAPTURE, "print(float(state.norm()))"),
    "state changed": (
        *CAPTURE,
        "{preparation}changed = hs.edit(model, [{text!r}], {{{site!r}: {change}}}, (),"
        " logits=True)",
        "best = changed.logits[-1].float().softmax(-1).topk(10)",
        "print([(model.tokenizer.decode(int(i)), float(p)) for p, i in zip(*best)])",
    ),
    "continuation": (*CAPTURE, ENCODE, GENERATE, SHOW),
    "continuation changed": (
        *CAPTURE,
        f"{{preparation}}{ENCODE}",
        GENERATE,
        SHOW,
        "with hs.editing(model, {{{site!r}: {change}}}):",
        f"    {GENERATE}",
        SHOW,
    ),
    "store": (
        "states = {states}",
        "model = {model}",
        "result = hs.search(states, (model, {query!r}), {k}{at_site})",
        "result.save('search.html')",
    ),
    "kept": (
        "states = {states}",
        "result = hs.profile(states.of({text}))",
        "result.save('profile.html')",
    ),
    "fit": (
        "states = {states}",
        "dictionary = hs.Dictionary.fit(states, {site!r}, features={features}, k={k},"
        " training=hs.Training({tokens}))",
        "dictionary.save({to!r})",
    ),
    "nearest": (
        "states = {states}",
        "state = states.of({text})[{site!r}][{token}]",
        "result = hs.search(hs.each_token(states), state, {k}, site={site!r})",
        "result.save('search.html')",
    ),
}
"""The programs of what only the page asks: the norm of a state, and what the model
predicts or writes once it is changed; searches and norms in kept states.
"""


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
    if parameter.kind == "dictionary":
        return repr(resolved(value, names).path)
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
    if parameter.kind == "pairs":
        return f"[{', '.join(f'hs.{pair!r}' for pair in interchanges(value))}]"
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
    arguments = []
    for parameter in parameters:
        value = values.get(parameter.name)
        if value is None:
            options += parameter.python_default
        elif parameter.python_only:
            raise NoCommand(parameter.python_only)
        elif parameter.kind == "pairs":
            raise NoCommand("A command reads pairs from a file.")
        elif parameter.fields:
            more = command_words(parameter.fields, value, names, dtype)
            options += more[0]
            arguments += more[1]
        elif parameter.kind == "data":
            path, columns = resolved(value, names)
            if not parameter.is_argument:
                if columns != resolved(values["data"], names).columns:
                    raise NoCommand("The two datasets have different columns.")
                options += option_words(parameter.option, path)
                continue
            arguments.append(path)
            for name, column in columns.items():
                options += option_words(f"--{name}", column)
        elif parameter.kind == "model":
            if value.get("dtype") != dtype:
                raise NoCommand("The two models have different dtypes.")
            path = resolved(value["name"], names).path
            if parameter.is_argument:
                arguments.append(path)
            else:
                options += [parameter.option, path]
        elif parameter.kind == "dictionary":
            options += option_words(parameter.option, resolved(value, names).path)
        elif parameter.is_argument:
            arguments += map(text_word, _listed(value))
        else:
            options += _option(parameter, value)
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


def _option(parameter: Parameter, value: Any) -> list[str]:
    option = parameter.option
    if parameter.kind == "flag":
        if value == parameter.default:
            return []
        return [option if value else option.replace("--", "--no-")]
    if parameter.kind == "numbers":
        if value in parameter.choices:
            return [f"--{value}"]
        return [f"{option}={','.join(map(str, _listed(value)))}"]
    if isinstance(value, list) and not parameter.repeated:
        raise NoCommand(f"The command takes one text for {parameter.name}.")
    words = []
    for word in _listed(value):
        words += option_words(option, word)
    return words


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]

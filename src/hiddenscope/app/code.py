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

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hiddenscope.app.schemas import form_parameters
from hiddenscope.app.stores import holds_pair
from hiddenscope.catalog import ANALYSIS
from hiddenscope.interface.code import (
    ONLY_PYTHON,
    Named,
    Names,
    NoCommand,
    Values,
    command_words,
    option_words,
    python_arguments,
    python_load,
    resolved,
    text_word,
)

__all__ = ["Command", "Named", "Names", "as_command", "as_python"]

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

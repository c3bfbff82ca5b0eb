"""Commands that ask an analysis: they parse, call and print.

The command of an analysis is made of its declaration (`generated`). Those that do more
than ask follow: they fit a lens, read labels, search files, write vectors, or exit with
1 when there is drift.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import typer

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli.arguments import (
    VECTORS,
    check_group,
    check_place,
    contrasts_in,
    dataset,
    is_store,
    numbers_in,
    read_saved,
    read_states,
    texts_in,
)
from hiddenscope.cli.command import (
    COLUMNS,
    EACH_TOKEN,
    STATES,
    TEXT_COLUMN,
    Arguments,
    Function,
    command,
    options_of,
)
from hiddenscope.cli.options import MODEL_HELP, RESULTS, Shared, as_variant
from hiddenscope.cli.terminal import echo, print_json, table, visible
from hiddenscope.errors import FileError, LoadError, StatesError, TextError
from hiddenscope.files import replacing, write_safetensors
from hiddenscope.interface import TEXTS_HELP, TRUNCATE, Parameter, build_value, describe
from hiddenscope.loading.outline import outline
from hiddenscope.loading.variants import SCHEMES
from hiddenscope.loading.zoo import ZOO
from hiddenscope.texts import Labelled

WITH_DICTIONARY = (
    "compare",
    "contributions",
    "examples",
    "features",
    "lens",
    "steer",
)
MORE = Parameter(
    "more",
    "word",
    "Further contrasts: a table with the columns clean, corrupt, answer, other and"
    " group.",
)
PROOF_TEXTS = Parameter(
    "proof_texts",
    "word",
    "Texts that a dictionary is proved on, in place of 40 plain sentences: a file.",
)


def generated(word: str) -> Function:
    """Return the command of an analysis that only asks."""

    def run(shared: Shared, arguments: Arguments) -> None:
        show_result(ask(word, shared, arguments), shared)

    return asks(word)(run)


def asks(
    word: str,
    *more: Parameter,
    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    **options: Any,
) -> Callable[[Function], Function]:
    """Make the command of an analysis of a function.

    The command takes the parameters that the analysis describes, with `changes` of some
    by their names, and then `more`; `options` are those of `command`.
    """
    description = describe(word)
    parameters = [
        replace(parameter, **changes.get(parameter.name, {}))
        for parameter in options_of(description)
    ]
    if word in WITH_DICTIONARY:
        more += (PROOF_TEXTS,)
    if any(parameter.kind == "contrast" for parameter in description.parameters):
        more += (MORE,)
    details = description.details or (
        f"Prints the findings. --out {word}.html keeps the pictures, .csv the numbers."
    )
    return command(
        word,
        [*parameters, *more],
        details=details,
        description=description,
        **options,
    )


def ask(word: str, shared: Shared, arguments: Arguments) -> "hs.Result":
    """Ask an analysis of a model, or of states, and return its result."""
    arguments = dict(arguments)
    # A file is read first: that it is missing should not show after a model is loaded.
    if isinstance(arguments.get("data"), str):
        columns = [arguments.pop(column.name) for column in COLUMNS]
        arguments["data"] = dataset(arguments["data"], *columns)
    description = describe(word)
    for parameter in description.parameters:
        if parameter.fields and not parameter.takes_model:
            value = build_value(parameter, None, arguments)
            if arguments.get("more") is not None:
                value = [value, *contrasts_in(arguments["more"])]
            arguments[parameter.name] = value
    source = source_of(shared, arguments)
    description.require(source, arguments)
    result: hs.Result = getattr(hs, word)(
        source, **argument_values(word, shared, arguments, source)
    )
    return result


def source_of(shared: Shared, arguments: Arguments) -> Any:
    """Load the model of a command, or open the states or vectors in its place."""
    path = _saved_path(arguments)
    if path is not None:
        return read_saved(path)
    return shared.load()


def argument_values(
    word: str, shared: Shared, arguments: Arguments, source: Any
) -> dict[str, Any]:
    """Return what an analysis takes for the arguments that are there."""
    of_states = _saved_path(arguments) is not None
    values = {}
    for parameter in describe(word).parameters:
        if parameter.of_model and of_states:
            continue
        value = arguments.get(parameter.name)
        typed = arguments.get("toward") if parameter.takes_model else value
        feature = feature_in(typed)
        if feature is not None:
            value = read_dictionary(feature[1], source, arguments)[int(feature[2])]
            if parameter.takes_model:
                value = hs.Direction.of(value, sites=arguments["sites"])
        elif parameter.takes_model:
            value = build_value(parameter, source, arguments)
        elif value is None:
            continue
        elif (
            parameter.kind == "dictionary"
            and value not in parameter.choices
            and Path(value).exists()
        ):
            # The analysis says which words there are, if there is no such folder.
            value = read_dictionary(value, source, arguments)
        elif parameter.kind == "model":
            value = shared.load_other(value)
        elif parameter.encoded:
            value = source.encode(
                value, targets=arguments["targets"], truncate=arguments["truncate"]
            )
        values[parameter.name] = value
    check_proved(arguments)
    return values


def check_proved(arguments: Arguments) -> None:
    """Refuse texts for the proof of a dictionary where none was read."""
    if arguments.get("proof_texts") is not None:
        reason = "no dictionary is read from a file"
        raise TextError("Cannot use --proof-texts", reason, "Leave it out.")


def read_dictionary(path: str, source: Any, arguments: Arguments) -> "hs.Dictionary":
    """Read a dictionary, and prove it on a model, which may be on given texts.

    Its site and these texts are then no longer among the arguments.
    """
    model = source if isinstance(source, hs.Model) else None
    site, file = arguments.pop("site", None), arguments.pop("proof_texts")
    texts = None if file is None else dataset(file).texts
    try:
        return hs.Dictionary.read(path, model, site or "", texts)
    except StatesError as error:
        call = "read(path, model, texts=...)"
        remedy = error.remedy.replace(call, "--proof-texts FILE")
        raise type(error)(error.problem, error.reason, remedy) from error


def feature_in(typed: Any) -> re.Match[str] | None:
    """Match the one word that spells a feature of a dictionary; None of other words.

    >>> feature_in(["feature:out/sae:17"]).groups()
    ('out/sae', '17')
    """
    words = [typed] if isinstance(typed, str) else typed
    if not isinstance(words, list) or not words:
        return None
    match = re.fullmatch("feature:(.+):([0-9]{1,9})", str(words[0]))
    if match is not None and len(words) == 1:
        return match
    if all(re.match(r"feature:\S+$", str(word)) for word in words):
        problem, reason = f"Cannot use {words[0][:60]!r}", "it is not one feature"
        raise TextError(problem, reason, "Give feature:PATH:17 alone.")
    return None


def _saved_path(arguments: Arguments) -> Path | None:
    """Return the path of states, or of vectors that stand in place of texts."""
    for name in ("states", "texts"):
        path = arguments.get(name)
        if isinstance(path, Path):
            return path
    return None


def show_result(result: "hs.Result", shared: Shared) -> None:
    """Save a result with --out, and print it: as JSON, or its findings and tables.

    A result that cannot be saved is printed all the same: it may have taken long.
    """
    try:
        if shared.out:
            result.save(shared.out, **shared.look)
    finally:
        if shared.json:
            with TemporaryDirectory() as folder:
                path = Path(folder, "result.json")
                result.save(path)
                echo(path.read_text("utf-8"))
        else:
            echo(visible(result.summary(), keep="\n"))
            for printed in result.tables:
                echo(f"\n{visible(printed.title)}" if printed.title else "")
                table(printed.columns, printed.rows, text=printed.text_columns)
    shared.report_written()


FIT = Parameter(
    "fit",
    "choice",
    "Fit a lens on the texts, which --out keeps.",
    choices=("tuned", "jacobian"),
)


@asks("lens", FIT, writes=(*RESULTS, ".safetensors"))
def lens(shared: Shared, arguments: Arguments) -> None:
    """Ask the lens, or fit one and save it.

    The fit of a Jacobian lens takes long: when it is interrupted, the same command
    continues it from a file beside --out.
    """
    kind = arguments["fit"]
    if kind is None:
        show_result(ask("lens", shared, arguments), shared)
        return
    if shared.out is None:
        raise FileError(
            f"Cannot keep the {kind} lens",
            "no path was given",
            "Add --out lens.safetensors.",
        )
    partial = None
    if kind == "jacobian":
        partial = shared.out.with_suffix(".partial.safetensors")
    check_proved(arguments)
    fitted = hs.Lens.fit(shared.load(), arguments["texts"], kind, partial=partial)
    fitted.save(shared.out)
    shared.report_written()
    if partial is not None:
        partial.unlink(missing_ok=True)
    if shared.json:
        print_json(fitted.facts)
    else:
        echo(visible(f"{fitted!r}, kept in {shared.out}"))


COMPARE_OPTIONS = (
    Parameter(
        "other_dtype", "word", "The other side's dtype alone; --dtype sets both."
    ),
    Parameter(
        "other_device", "word", "The other side's device alone; --device sets both."
    ),
    Parameter(
        "other_target",
        "word",
        "The decoder's text of the second side, if it differs.",
        spelling=("--other-target", "--other-targets"),
    ),
)


@asks("compare", *COMPARE_OPTIONS)
def compare(shared: Shared, arguments: Arguments) -> None:
    """Compare two texts in one model, or one text in two models."""
    text, other_text = arguments["a"], arguments["b"]
    device, dtype = arguments["other_device"], arguments["other_dtype"]
    check_place(device, dtype)
    other = arguments["other"]
    if other is None and (dtype or device):
        # The same model on both sides.
        other = shared.model or ""
    if (other_text is None) == (other is None):
        reason = "a second text and another model"
        if other is None:
            reason = "there is no second text and no other model"
        raise TextError("Cannot compare", reason, "Give a second text, or --other.")
    options = {name: arguments[name] for name in ("sites", "targets", "truncate")}
    other_target = arguments["other_target"]
    model = shared.load()
    feature = feature_in(arguments["sites"])
    if feature is not None:
        dictionary = read_dictionary(feature[1], model, arguments)
        options["sites"] = dictionary[int(feature[2])]
    check_proved(arguments)
    if other is None:
        if other_target is not None:
            other_text = model.encode(
                other_text, targets=other_target, truncate=arguments["truncate"]
            )
        show_result(hs.compare(model, text, other_text, **options), shared)
        return
    is_same = (other or None) == shared.model and not (device or dtype)
    if is_same and shared.adapter:
        # The same weights serve both sides.
        other_model = model.without_adapters()
    else:
        other_model = shared.load_other(other or None, device=device, dtype=dtype)
    if other_target is None:
        show_result(hs.compare(model, text, other=other_model, **options), shared)
        return
    # `hs.compare` gives both models the same targets, so each is captured by itself.
    states = model.capture(text, **options)
    other_states = other_model.capture(text, **options | {"targets": other_target})
    show_result(hs.compare(states, other_states), shared)


@asks("embed", writes=(".npy", ".safetensors", ".csv"))
def embed(shared: Shared, arguments: Arguments) -> None:
    """Compute the vectors, and write them or say how many there are."""
    import numpy as np
    from torch import from_numpy

    vectors = np.asarray(ask("embed", shared, arguments))
    if shared.out:
        suffix = shared.out.suffix.lower()
        with replacing(shared.out) as fresh:
            if suffix == ".npy":
                np.save(fresh, vectors)
            elif suffix == ".safetensors":
                write_safetensors(fresh, {"vectors": from_numpy(vectors)})
            else:
                # Nine digits give back every float32.
                np.savetxt(fresh, vectors, "%.9g", ",", "\r\n", encoding="utf-8")
        shared.report_written()
    if shared.json:
        print_json(vectors.tolist())
        return
    place = f" in {shared.out}" if shared.out else "; --out vectors.npy keeps them"
    echo(f"{len(vectors)} vectors, {vectors.shape[1]} wide{place}")


DIRECTION_CHANGES: dict[str, dict[str, Any]] = {
    "directions": {
        "kind": "word",
        "help": "A neuron such as layer.3.mlp.neuron.7, a probe (.safetensors or"
        " .nc), a control vector (.gguf), or the folder of a dictionary; PATH:17,18 are"
        " features of it.",
    }
}


@asks("examples", changes=DIRECTION_CHANGES)
def examples(shared: Shared, arguments: Arguments) -> None:
    """Look for the tokens that excite a direction, which may come from a file."""
    # Elsewhere a feature is spelt so, and is a direction.
    word = arguments["directions"].removeprefix("feature:")
    path, _, numbers = word.rpartition(":")
    source = source_of(shared, arguments)
    if word.endswith(".gguf"):
        arguments["directions"] = hs.Direction.load(word)
    elif word.endswith(".safetensors"):
        arguments["directions"] = hs.Probe.load(word)
    elif word.endswith(".nc"):
        arguments["directions"] = hs.Probe.of(hs.Result.load(word))
    elif path or os.path.isdir(word):
        arguments["directions"] = read_dictionary(path or word, source, arguments)
    values = argument_values("examples", shared, arguments, source)
    if path:
        values["features"] = list(map(int, numbers_in("--direction PATH:", numbers)))
    show_result(hs.examples(source, **values), shared)


# Labels that every token has, whatever the text.
READY = ("position", "word-start", "previous-token")
PROBE_CHANGES: dict[str, dict[str, Any]] = {
    "data": {"required": False, "default": "cities-incomplete"},
    "label": {"help": "The column of the labels, or a ready label of tokens."},
}


@asks("probe", EACH_TOKEN, TRUNCATE, changes=PROBE_CHANGES)
def probe(shared: Shared, arguments: Arguments) -> None:
    """Probe labels of texts, or ready labels of tokens."""
    data = arguments.pop("data")
    text, label, group = (arguments[name] for name in ("text", "label", "group"))
    check_group(label, group)
    of_states = arguments["states"] is not None
    if group is not None and (data in READY or (of_states and label in READY)):
        raise TextError(
            f"Cannot use --group {group}",
            "groups are a column of a file, and this label needs none",
            "Give a file with --label, or leave --group out.",
        )
    labels: Any
    if data in READY:
        labels = label if of_states and label in READY else data
    elif label in READY:
        labels = label if of_states else (dataset(data, text, group=group), label)
    else:
        labels = dataset(data, text, label, group)
    test = arguments.pop("test")
    if test is not None:
        test = dataset(test, text, label, group)
    source = source_of(shared, arguments)
    values = argument_values("probe", shared, arguments, source)
    if arguments["truncate"]:
        labels, test = _truncated(source, labels), _truncated(source, test)
    if arguments["each_token"]:
        source = hs.each_token(source)
    show_result(hs.probe(source, labels, test=test, **values), shared)


def _truncated(model: Any, data: Any) -> Any:
    """Cut labelled texts that are longer than the model's window."""
    if not isinstance(data, Labelled):
        return data
    return model.encode(list(data.texts), truncate=True), data


PROJECT_OPTIONS = (
    EACH_TOKEN,
    Parameter(
        "neighbours",
        "integer",
        "How many neighbours of a point count.",
        default=15,
        least=2,
    ),
    Parameter(
        "models",
        "model",
        f"{MODEL_HELP} Repeated: side by side.",
        spelling=("--model",),
        repeated=True,
    ),
    Parameter(
        "other",
        "model",
        "Another model beside the first; may be repeated.",
        repeated=True,
    ),
)


@asks(
    "project",
    *PROJECT_OPTIONS,
    changes={"data": {"repeated": True}},
    without=("model",),
)
def project(shared: Shared, arguments: Arguments) -> None:
    """Draw the texts, by PCA at once and then by the chosen method."""
    names = arguments.pop("data") or []
    columns = [arguments[column.name] for column in COLUMNS]
    check_group(*columns[1:])
    of_states = arguments["states"] is not None
    if of_states and len(names) > 1:
        raise TextError(
            "Cannot compare datasets in --states",
            f"there are {len(names)} files, and states have one label for each text",
            "Give one, or none.",
        )
    if not of_states and not names:
        raise TextError(
            "No dataset",
            "none was given",
            "Give a shipped name such as cities-incomplete, or a file.",
        )
    data: Any = {name: dataset(name, *columns) for name in names}
    # A dataset or a model by itself has no name.
    if len(data) < 2:
        data = next(iter(data.values()), None)
    source: Any
    if of_states:
        source = read_states(arguments["states"])
    else:
        models = [*(arguments["models"] or [None]), *(arguments["other"] or [])]
        source = [shared.load_other(model) for model in models]
        if len(source) == 1:
            (source,) = source
    method = arguments.pop("method")

    def preview(result: "hs.Result") -> None:
        if shared.out:
            result.save(shared.out, **shared.look)
            progress.note(f"{shared.out} shows them by PCA; {method} follows.")

    values = argument_values("project", shared, arguments, source)
    if arguments["each_token"]:
        source = hs.each_token(source)
    pictures = hs.Pictures(method, arguments["neighbours"], preview)
    result = hs.project(source, data, method=pictures, **values)
    show_result(result, shared)


SEARCH_OPTIONS = (
    Parameter(
        "source",
        "data",
        "A file of texts (- for stdin), of states (.safetensors) or of vectors (.npy);"
        " a dataset; or --states.",
        positional=True,
    ),
    Parameter("queries", "words", TEXTS_HELP, positional=True),
    Parameter("texts", "word", "A file with the texts of the vectors in a .npy file."),
    TEXT_COLUMN,
    STATES,
    TRUNCATE,
)


@asks("search", *SEARCH_OPTIONS, model_with_states=True)
def search(shared: Shared, arguments: Arguments) -> None:
    """Search a file for the texts nearest to the queries."""
    source, path = arguments["source"], arguments["states"]
    queries = arguments["queries"] or []
    if path is not None and source is not None:
        # With --states there is no source: its place holds a query.
        queries, source = [source, *queries], None
    queries = texts_in(queries, required=False)
    if path is None:
        path = Path((source or "").removeprefix("@"))
    if not path.name:
        raise TextError(
            "No source to search",
            "none was given",
            "Give a file, a dataset, or --states.",
        )
    is_saved = arguments["states"] is not None or path.suffix.lower() in VECTORS
    texts: Any = None
    file = arguments.pop("texts") if is_saved else source
    if file is not None:
        texts = list(dataset(file, arguments["text"]).texts)
    saved = read_saved(path) if is_saved else None
    if not queries:
        raise TextError("No texts", "no query was given", "Give a text to search for.")
    model = shared.load_other(
        _model_name(saved, shared.model, path),
        adapters=shared.adapter,
        scheme=shared.quantise,
    )
    truncate = arguments["truncate"]
    if truncate and saved is None:
        texts = model.encode(texts, truncate=True)
    query = model.encode(queries, truncate=truncate)
    collection = model if saved is None else saved
    values = argument_values("search", shared, arguments, collection)
    show_result(
        hs.search(collection, (model, query), **values | {"texts": texts}), shared
    )


def _model_name(saved: Any, name: str | None, path: Path) -> str | None:
    """Return the name of the model that reads the queries.

    Without --model that is the model of the states. Another model is refused before it
    is loaded, which may take minutes.
    """
    states = getattr(saved, "encoder", saved)
    source = getattr(states, "source", None)
    if source is None:
        return name
    problem = f"Cannot search for a text in {path.name}"
    if name is None:
        if source.model not in ZOO and "/" not in source.model:
            raise StatesError(
                problem,
                f"its states are of {source.model[:60]!r}, and no name says where that"
                " model is",
                "Name the folder of that model: --model PATH.",
            )
        return str(source.model)
    known = outline(name)
    is_other_zoo_model = name in ZOO and source.model in ZOO and name != source.model
    depths = {known.layers, source.depth} - {None}
    if is_other_zoo_model or len(depths) > 1:
        raise StatesError(
            problem,
            f"its states are of {source.model}, and not of {known.name}",
            "Leave --model out, or name the model that they were made with.",
        )
    return name


# On all 40 shipped sentences the perplexity of every setting takes most of the time.
FEW = 10
STEER_OPTIONS = (
    Parameter("data", "word", "Labelled texts: a shipped name, or a file."),
    # Of the labels: --text is there already.
    COLUMNS[1],
    Parameter(
        "ablate",
        "flag",
        "Project the direction out instead of adding it.",
        default=False,
        spelling=("--ablate",),
    ),
    Parameter(
        "quality",
        "word",
        "Texts for the perplexity: a file, or plain for all 40 shipped sentences;"
        f" {FEW} of them if not given.",
    ),
)


@asks("steer", *STEER_OPTIONS, changes={"away": {"required": False}})
def steer(shared: Shared, arguments: Arguments) -> None:
    """Steer along the difference of two sets of texts."""
    if arguments["ablate"]:
        if arguments["strengths"] is not None:
            raise TextError(
                "--strengths and --ablate were both given",
                "an ablation projects the direction out wholly",
                "Leave one of them out.",
            )
        arguments["strengths"] = "ablate"
    data, label = arguments.pop("data"), arguments.pop("label")
    if data is not None:
        data = dataset(data, arguments.pop("text_column"), label)
    elif label is not None:
        raise TextError(
            f"Cannot use --label {label}",
            "it is a column of --data, which is not given",
            "Give --data FILE, or leave --label out.",
        )
    is_feature = feature_in(arguments["toward"]) is not None
    if is_feature and arguments["away"]:
        raise TextError(
            "Cannot use --away", "--toward is a feature", "Leave one of them out."
        )
    if not is_feature:
        for side in ("toward", "away"):
            arguments[side] = _texts_of_side(data, arguments[side] or [])
    if arguments["quality"] is None:
        arguments["quality"] = list(dataset("plain").texts[:FEW])
    else:
        arguments["quality"] = list(dataset(arguments["quality"]).texts)
    show_result(ask("steer", shared, arguments), shared)


def _texts_of_side(data: Labelled | None, words: list[str]) -> list[str]:
    """Return one set of texts: those that were typed, or those with these labels."""
    if data is None:
        return texts_in(words)
    labels = [str(label) for label in data.labels or ()]
    for label in words:
        if label not in labels:
            reason = "it has no labels"
            if labels:
                reason = f"its labels are {', '.join(sorted(set(labels)))}"
            raise TextError(
                f"No label {label!r} in {data.name}", reason, "Give one of these."
            )
    pairs = zip(data.texts, labels, strict=True)
    return [text for text, label in pairs if label in words]


DRIFT_OPTIONS = (
    Parameter(
        "attention", "word", "The reference's attention kernel alone: eager, sdpa."
    ),
    Parameter(
        "candidate_device",
        "word",
        "The candidate's device alone; --device sets both.",
    ),
    Parameter(
        "candidate_dtype", "word", "The candidate's dtype alone; --dtype sets both."
    ),
    Parameter("candidate_attention", "word", "The candidate's attention kernel alone."),
    Parameter(
        "candidate_quantise",
        "word",
        f"Quantise the candidate alone: {', '.join(SCHEMES)}.",
    ),
    Parameter(
        "candidate_adapter", "word", "The folder of a PEFT adapter on the candidate."
    ),
)
PLACES = ("device", "dtype", "attention")


@asks("drift", *DRIFT_OPTIONS)
def drift(shared: Shared, arguments: Arguments) -> None:
    """Compare a candidate with the reference, and exit with 1 when there is drift.

    So it does where quantisation explains the drift: a baseline accepts it.
    """
    candidate = arguments["candidate"]
    names = ("device", "dtype", "attention", "quantise", "adapter")
    options = {name: arguments[f"candidate_{name}"] for name in names}
    check_place(options["device"], options["dtype"])
    as_variant(candidate, None, options["quantise"])
    if _is_saved(shared.model) and _is_saved(candidate):
        for option in ("dtype", "device"):
            value = getattr(shared, option)
            if value:
                raise LoadError(
                    f"Cannot use --{option} {value} with saved states",
                    "both sides were computed already",
                    f"Leave --{option} out.",
                )
    # A bad file of another program is refused before the reference is loaded.
    if candidate.endswith(".safetensors") and os.path.isfile(candidate):
        # Imported only here, since it needs torch.
        saved = import_module("hiddenscope.analyses.drift.saved")
        saved.open_foreign(Path(candidate))
    reference_options = {
        "attention": arguments["attention"],
        "quantise": shared.quantise,
        "adapter": shared.adapter,
    }
    result = hs.drift(
        _side(shared, shared.model, reference_options),
        _side(shared, candidate, options, prefix="candidate-"),
        arguments["texts"] or None,
        sites=arguments["sites"],
        baseline=arguments["baseline"],
        low_memory=arguments["low_memory"],
    )
    show_result(result, shared)
    if result.facts["drifted"]:
        raise typer.Exit(1)


def _side(
    shared: Shared,
    name: str | None,
    options: Mapping[str, Any],
    prefix: str = "",
) -> Any:
    """Load a model, or return the path of saved states.

    Saved states cannot be computed in another way, so they take no options.
    """
    if not _is_saved(name):
        placed = {key: options[key] for key in PLACES if key in options}
        adapters = options["adapter"]
        if isinstance(adapters, str):
            adapters = [adapters]
        return shared.load_other(
            name, adapters=adapters, scheme=options["quantise"], **placed
        )
    for option, value in options.items():
        if value:
            spelled = f"--{prefix}{option}"
            remedy = f"Leave {spelled} out."
            if prefix and option in ("device", "dtype"):
                remedy = f"Leave {spelled} out; --{option} sets the model's alone then."
            raise LoadError(
                f"Cannot use {spelled} {value} with saved states",
                f"{name} holds states that were computed already",
                remedy,
            )
    return Path(str(name))


def _is_saved(name: str | None) -> bool:
    return name is not None and (name.endswith(".safetensors") or is_store(name))

"""States of texts in a file, and of a whole corpus in a store."""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli import endings
from hiddenscope.cli.arguments import check_place, checked_source
from hiddenscope.cli.command import TEXT_COLUMN, Arguments, command
from hiddenscope.cli.options import Shared
from hiddenscope.cli.terminal import echo, print_json, visible
from hiddenscope.errors import FileError, TextError
from hiddenscope.files import replacing
from hiddenscope.interface import POOL, SEED, SITE, SITES, TEXTS, TRUNCATE, Parameter
from hiddenscope.states.pooling import CHOICES

ALL_LAYERS = replace(SITES, default="layer.*,final")
GENERATE = Parameter(
    "generate",
    "integer",
    "Generate this many tokens after the text, and capture their states too.",
    default=0,
    least=0,
)


@command(
    "capture",
    (replace(TEXTS, required=True), ALL_LAYERS, GENERATE, TRUNCATE),
    details="Prints the sites, the tokens and the shape. --out states.safetensors keeps"
    " the values.",
    writes=(".safetensors",),
)
def capture(shared: Shared, arguments: Arguments) -> None:
    """Capture the states, of the text alone or of what is generated after it too."""
    texts, sites = arguments["texts"], arguments["sites"]
    new_tokens = arguments["generate"]
    if new_tokens and len(texts) != 1:
        raise TextError(
            "--generate takes one text", f"there are {len(texts)}", "Give exactly one."
        )
    model = shared.load()
    states: hs.States | hs.Pair
    if new_tokens:
        states = model.capture_generation(
            texts[0], max_new_tokens=new_tokens, sites=sites
        )
    else:
        states = model.capture(texts, sites, truncate=arguments["truncate"])
    if shared.out:
        states.save(shared.out)
        shared.report_written()
    if shared.json:
        print_json(_states_as_json(states))
    elif not shared.out:
        echo(visible(repr(states), keep="\n"))


def _states_as_json(states: "hs.States | hs.Pair") -> dict[str, object]:
    if isinstance(states, hs.Pair):
        return {
            "encoder": _states_as_json(states.encoder),
            "decoder": _states_as_json(states.decoder),
        }
    tokens = states.tokens
    columns = {
        name: getattr(tokens, name).tolist()
        for name in ("text", "positions", "ids", "spans")
    }
    shape = [len(states.sites), len(tokens)]
    # Where widths differ, the shape ends before them.
    if len(set(states.widths)) == 1:
        shape.append(states.width)
    return {
        "sites": [str(site) for site in states.sites],
        "shape": shape,
        "widths": states.widths,
        "dtype": str(states.values.dtype).removeprefix("torch."),
        "texts": tokens.texts,
        "tokens": columns | {"strings": tokens.strings},
        "source": states.source.to_json(),
    }


# The fields of `Corpus`.
CORPUS = (
    TEXT_COLUMN,
    Parameter(
        "window", "integer", "The longest text in tokens, if not the model's own."
    ),
    Parameter(
        "stride", "integer", "Cut longer texts into windows, this many tokens apart."
    ),
    Parameter(
        "every",
        "integer",
        "Of every text keep the tokens at positions 0, n, 2n and so on.",
        default=1,
    ),
    Parameter(
        "skip_bad",
        "flag",
        "Leave broken lines out, and list them.",
        default=False,
        spelling=("--skip-bad",),
    ),
)
# The fields of `Engine`.
ENGINE = (
    Parameter("workers", "integer", "Processes that compute."),
    Parameter("threads", "integer", "Threads of each worker."),
    Parameter("unit_tokens", "integer", "Keep what is done after this many tokens."),
    Parameter("address", "word", "The Ray cluster: auto, or host:port."),
)
TO = Parameter(
    "to",
    "path",
    "The folder of the store. A job that was stopped goes on there.",
    required=True,
)
PARAMETERS = (
    Parameter(
        "corpus",
        "word",
        "A file of texts (.txt .jsonl .csv .tsv .parquet), a folder of such files, -"
        " for stdin, a shipped dataset.",
        required=True,
        positional=True,
    ),
    TO,
    ALL_LAYERS,
    replace(POOL, help=f"Keep one vector for each text: {CHOICES}."),
    Parameter(
        "store_dtype", "word", "float32, bfloat16 or float16, if not the model's."
    ),
    *CORPUS,
    Parameter(
        "engine",
        "choice",
        "This machine, or a Ray cluster.",
        default="local",
        choices=("local", "ray"),
    ),
    *ENGINE,
)
DETAILS = """
Says what the job will cost, and computes. The same command again goes on with a job
that was stopped. --json prints lines of JSON: the cost, the progress after every unit
and now and then within one, and the end; --out job.json keeps the last.
"""


@command("extract", PARAMETERS, details=DETAILS, writes=(".json",))
def extract(shared: Shared, arguments: Arguments) -> None:
    """Compute the states of a corpus, and report the progress."""
    corpus = {field.name: arguments[field.name] for field in CORPUS}
    engine = {field.name: arguments[field.name] for field in ENGINE}
    check_place(None, arguments["store_dtype"])
    source = hs.Corpus(checked_source(arguments["corpus"]), **corpus)
    how = hs.Engine(arguments["engine"], **engine)
    job = hs.ExtractJob.plan(
        shared.load(),
        source,
        arguments["to"],
        sites=arguments["sites"],
        pool=arguments["pool"],
        dtype=arguments["store_dtype"],
        engine=how,
    )
    progress.clear()
    report = _Report(shared.json)
    report.cost(job)
    try:
        with endings.explaining_resume(job.how_to_resume):
            job.run(report.progress, every_batch=True)
    except FileError as error:
        remedy = f"{error.remedy} {job.how_to_resume()}"
        raise FileError(error.problem, error.reason, remedy) from error
    report.end(job, shared.out)


@command(
    "fit",
    (
        Parameter(
            "store",
            "path",
            "The folder of a store that `extract` wrote.",
            required=True,
            positional=True,
        ),
        replace(TO, help="The folder of the dictionary."),
        Parameter("features", "integer", "How many.", required=True, least=1),
        Parameter(
            "k", "integer", "How many act on a token.", default=32, spelling=("-k",)
        ),
        replace(SITE, help="Which state, if the store has several."),
        Parameter(
            "tokens", "integer", "Train on this many states.", default=10_000_000
        ),
        replace(SEED, default=0),
    ),
    details="Writes files that SAELens reads too, which `features --dictionary` takes."
    " The same command again goes on with a run that was stopped. It trains on the CPU"
    " unless --device says cuda.",
    writes=(),
    without=("model", "dtype", "adapter", "quantise", "out"),
)
def fit(shared: Shared, arguments: Arguments) -> None:
    """Train a dictionary on a store, and keep it."""
    folder, store = arguments["to"], hs.open(arguments["store"])
    folder.mkdir(parents=True, exist_ok=True)
    training = hs.Training(
        arguments["tokens"], seed=arguments["seed"], device=shared.device
    )
    fitted = hs.Dictionary.fit(
        store,
        arguments["site"] or "",
        features=arguments["features"],
        k=arguments["k"],
        training=training,
        checkpoint=folder / "training.safetensors",
    )
    fitted.save(folder)
    if shared.json:
        print_json({"to": str(folder), **fitted.facts})
    else:
        left, dead = fitted.facts["unexplained"], fitted.facts["dead"]
        echo(visible(f"{fitted} in {folder}"))
        echo(f"{left:.1%} of the variance was left in training; {dead:,} are dead.")


# Seconds between two lines about a unit that is being computed: on a terminal, where
# each line replaces the last, and in a file.
LIVE_SECONDS, LOG_SECONDS = 0.2, 30.0


class _Report:
    """Prints the job: lines of JSON on stdout, or on stderr a line that is replaced."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.on_terminal = sys.stderr.isatty()
        self.last: dict[str, Any] = {}
        self.last_printed = time.monotonic()
        self.units = 0

    def cost(self, job: "hs.ExtractJob") -> None:
        if self.as_json:
            self._print_event("cost", asdict(job.cost))
            return
        for line in job.cost.lines():
            typer.echo(line, err=True)
        for row in job.writer.plan.corpus["skipped_rows"]:
            typer.echo(f"left out: {visible(row)}", err=True)

    def progress(self, now: Any) -> None:
        self.last = now.to_json()
        pause = LOG_SECONDS
        if self.on_terminal and not self.as_json:
            pause = LIVE_SECONDS
        is_due = time.monotonic() - self.last_printed >= pause
        has_new_unit = now.units_done > self.units
        self.units = now.units_done
        # A log file gets no line for every unit: a corpus has thousands.
        shows_units = self.as_json or self.on_terminal
        if not is_due and not (has_new_unit and shows_units):
            return
        self.last_printed = time.monotonic()
        if self.as_json:
            self._print_event("progress", self.last)
        elif self.on_terminal:
            typer.echo(f"\r\x1b[2K{now.line()}", err=True, nl=False)
        else:
            typer.echo(now.line(), err=True)

    def end(self, job: "hs.ExtractJob", out: Path | None) -> None:
        pending = len(job.writer.pending())
        end = {
            "store": str(job.writer.path),
            "units": len(job.writer.plan.units),
            "units_pending": pending,
            **self.last,
        }
        if out is not None:
            with replacing(out) as fresh:
                fresh.write_text(json.dumps(end, indent=2) + "\n", "utf-8")
        if self.as_json:
            self._print_event("end", end)
            return
        if self.on_terminal and self.last:
            typer.echo("", err=True)
        left = f", {pending:,} are left to another job" if pending else ""
        units = f"{job.cost.units:,} unit{'s' * (job.cost.units != 1)}"
        message = f"{units}, {job.cost.tokens:,} tokens in {job.writer.path}{left}"
        typer.echo(visible(message))

    def _print_event(self, event: str, values: dict[str, Any]) -> None:
        typer.echo(json.dumps({"event": event, **values}))
        sys.stdout.flush()

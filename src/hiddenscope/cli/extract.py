"""The states of a whole corpus, in a store."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import hiddenscope as hs
from hiddenscope import errors, progress
from hiddenscope.cli import interrupt
from hiddenscope.cli.command import Shared, SitesOption, command, writes
from hiddenscope.cli.embed import pooling
from hiddenscope.cli.terminal import visible
from hiddenscope.files import replacing
from hiddenscope.states.pooling import CHOICES

CORPUS = (
    "A file of texts (.txt .jsonl .csv .tsv .parquet), a folder of such files, - for"
    " stdin, a shipped dataset."
)
POOL = f"Keep one vector for each text: {CHOICES}."


@command
@writes(".json")
def extract(
    shared: Shared,
    corpus: Annotated[str, typer.Argument(help=CORPUS)],
    to: Annotated[
        Path,
        typer.Option(
            help="The folder of the store. A job that was stopped goes on there."
        ),
    ],
    sites: SitesOption = "layer.*,final",
    pool: Annotated[str | None, typer.Option(help=POOL)] = None,
    store_dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16, if not the model's."),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="The column of the texts in a file.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="The longest text in tokens, if not the model's own."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Cut longer texts into windows, so many tokens apart."),
    ] = None,
    every: Annotated[
        int,
        typer.Option(
            help="Of every text keep the tokens at positions 0, n, 2n and so on."
        ),
    ] = 1,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave broken lines out, and list them.")
    ] = False,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="This machine, or a Ray cluster.")
    ] = "local",
    workers: Annotated[int | None, typer.Option(help="Processes that compute.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each worker.")] = None,
    unit_tokens: Annotated[
        int | None, typer.Option(help="Keep what is done after so many tokens.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="The Ray cluster: auto, or host:port.")
    ] = None,
) -> None:
    """How are the states of a whole corpus computed and kept?

    Says what the job will cost, and computes. The same command again goes on with a job
    that was stopped. --json prints lines of JSON: the cost, the progress after every
    unit and now and then within one, and the end; --out job.json keeps the last.
    """
    texts = hs.Corpus(corpus.removeprefix("@"), text, window, stride, skip_bad, every)
    chosen = hs.Engine(engine, workers, threads, address, unit_tokens=unit_tokens)
    planned = hs.ExtractJob.plan(
        shared.load(),
        texts,
        to,
        sites=sites,
        pool=pooling(pool),
        dtype=store_dtype,
        engine=chosen,
    )
    progress.clear()
    said = _Said(shared.json)
    said.cost(planned)
    try:
        with interrupt.explained(planned.how_to_resume):
            planned.run(said.progress, every_batch=True)
    except errors.FileError as error:
        remedy = f"{error.remedy} {planned.how_to_resume()}"
        raise errors.FileError(error.problem, error.reason, remedy) from error
    said.end(planned, shared.out)


# Seconds between two lines about a unit that is at work: on a terminal, where one
# replaces the other, and in a file.
LIVE_SECONDS, LOG_SECONDS = 0.2, 30.0


class _Said:
    """What the command prints while it works: lines of JSON on stdout, or on stderr a
    line that is written anew.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json, self.last = as_json, {}  # type: tuple[bool, dict[str, Any]]
        self.live = sys.stderr.isatty()
        self.printed = time.monotonic()
        self.units = 0

    def cost(self, job: "hs.ExtractJob") -> None:
        if self.as_json:
            self._line("cost", asdict(job.cost))
            return
        for line in job.cost.lines():
            typer.echo(line, err=True)
        for row in job.writer.plan.corpus["skipped_rows"]:
            typer.echo(f"left out: {visible(row)}", err=True)

    def progress(self, now: Any) -> None:
        self.last = now.to_json()
        is_live = self.live and not self.as_json
        seconds = time.monotonic() - self.printed
        is_due = seconds >= (LIVE_SECONDS if is_live else LOG_SECONDS)
        has_unit = now.units_done > self.units
        self.units = now.units_done
        if not is_due and not (has_unit and (self.as_json or self.live)):
            return
        self.printed = time.monotonic()
        if self.as_json:
            self._line("progress", self.last)
        elif self.live:
            typer.echo(f"\r\x1b[2K{now.line()}", err=True, nl=False)
        else:
            typer.echo(now.line(), err=True)

    def end(self, job: "hs.ExtractJob", out: Path | None) -> None:
        pending = len(job.writer.pending())
        ended = {
            "store": str(job.writer.path),
            "units": len(job.writer.plan.units),
            "units_pending": pending,
            **self.last,
        }
        if out is not None:
            with replacing(out) as fresh:
                fresh.write_text(json.dumps(ended, indent=2) + "\n", "utf-8")
        if self.as_json:
            self._line("end", ended)
            return
        if self.live and self.last:
            typer.echo("", err=True)
        left = f", {pending:,} are left to another job" if pending else ""
        units = f"{job.cost.units:,} unit{'s' * (job.cost.units != 1)}"
        typer.echo(
            visible(f"{units}, {job.cost.tokens:,} tokens in {job.writer.path}{left}")
        )

    def _line(self, event: str, values: dict[str, Any]) -> None:
        typer.echo(json.dumps({"event": event, **values}))
        sys.stdout.flush()

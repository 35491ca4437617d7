"""Run a swarm for long while its peers come and go, and watch what it holds."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from peers.cli.common import INTERRUPTED, run_script
from peers.cli.output import complain, say
from protocol.errors import IsthmusError
from swarm.soak import soak
from swarm.soak_report import Samples, draw, report

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run, such as configs/chaos.toml.")]
Minutes = Annotated[float, typer.Option(min=0.1, help="How long.")]
Churn = Annotated[float, typer.Option(min=1, help="Seconds between two changes: one peer goes, one comes.")]
Seed = Annotated[int, typer.Option(help="Who goes, and how, follows from it.")]
Out = Annotated[Path, typer.Option(help="The page; its picture gets the same name with .png.")]
Folder = Annotated[Path, typer.Option(help="The swarm's folders, and samples.jsonl, which is written as it goes.")]
ReportOnly = Annotated[bool, typer.Option("--report-only", help="Make the page of the samples that are there.")]


def main() -> None:
    """Run the command line; errors meant for a person become one line and an exit code."""
    run_script(app)


@app.command(name="soak", help=__doc__)
def command(
    run: RunFile,
    minutes: Minutes = 30.0,
    churn: Churn = 60.0,
    seed: Seed = 0,
    out: Out = Path("docs/soak.md"),
    folder: Folder = Path("runs/soak"),
    report_only: ReportOnly = False,
) -> None:
    """See the module's text."""
    failure, code = "", 0
    os.nice(10)  # it may run for hours beside other work
    try:
        if not report_only:
            soak(run, folder, minutes, churn, seed)
    except IsthmusError as error:
        failure, code = str(error), error.exit_code
        complain(f"error: {failure}")
    except KeyboardInterrupt:
        failure, code = "it was interrupted", INTERRUPTED
    samples = Samples.load(folder / "samples.jsonl")
    picture = out.with_suffix(".png")
    draw(samples, picture)
    out.write_text(report(samples, shlex.join(["python", "scripts/soak", *sys.argv[1:]]), picture.name, failure))
    say(f"{samples.seconds / 60:.0f} minutes are in {out}")
    raise typer.Exit(code)

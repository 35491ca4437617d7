"""The verbs of `python scripts/bench_convergence`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convergence.jobs import chosen_arms
from convergence.plan import PlannedArm, choose_groups, read_plan
from peers.cli.common import INTERRUPTED, run_command, set_up_logging
from peers.cli.output import complain, say

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs" / "convergence"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

PlanPath = Annotated[Path, typer.Option("--plan", help="The plan's TOML file.")]
ResultsPath = Annotated[Path, typer.Option("--results", help="The results file, one JSON line per row.")]
GroupName = Annotated[str | None, typer.Option("--group", help="Only this group of the plan.")]
Only = Annotated[str | None, typer.Option("--only", help="Only arms whose name, or group/name, fits: 'dense*'.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Rows trained at the same time, one core each.")]


def main() -> None:
    """Run the command line; errors meant for a person become one line and an exit code."""
    set_up_logging(verbose=False)
    run_command(app)


@app.command("run")
def run(
    group: GroupName = None,
    only: Only = None,
    jobs: Jobs = 2,
    plan: PlanPath = HERE / "plan.toml",
    results: ResultsPath = DOCS / "results.jsonl",
) -> None:
    """Train the rows of the plan that are missing. Two at once need different groups or arms."""
    from convergence import runner

    arms = _arms(plan, group, only)
    try:
        trained = runner.run(arms, results, jobs)
    except KeyboardInterrupt:
        complain("interrupted: finished rows are kept, `run` goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    say(f"{trained} rows trained; all rows of {len(arms)} arms are in {results}")


@app.command("list")
def show(
    group: GroupName = None,
    only: Only = None,
    jobs: Jobs = 2,
    plan: PlanPath = HERE / "plan.toml",
    results: ResultsPath = DOCS / "results.jsonl",
) -> None:
    """Show the plan: what is done, what is missing, and how long that will take."""
    from convergence.listing import say_list

    say_list(_arms(plan, group, only), results, jobs)


@app.command("row")
def row(
    identity: Annotated[str, typer.Argument(metavar="ID", help="The first digits of a row's id.")],
    results: ResultsPath = DOCS / "results.jsonl",
) -> None:
    """Train one row again from its stored configuration; exit code 1 if it is not equal to the last bit."""
    from convergence.results import load
    from convergence.runner import describe_commit, limit_to_one_thread

    limit_to_one_thread()
    found = load(results).find(identity)
    from convergence.rerun import rerun

    raise typer.Exit(0 if rerun(found, describe_commit()) else 1)


@app.command("report")
def report(
    plan: PlanPath = HERE / "plan.toml",
    results: ResultsPath = DOCS / "results.jsonl",
    text: Annotated[Path, typer.Option("--text", help="The page as written by hand, with placeholders.")] = DOCS
    / "text.md",
    page: Annotated[Path, typer.Option("--page", help="Where the page goes.")] = DOCS.with_suffix(".md"),
) -> None:
    """Write the page: the text with its tables, figures and pictures."""
    from convergence.report import write_report
    from convergence.results import load

    for path in write_report(read_plan(plan), load(results), text, page):
        say(f"wrote {path}")


def _arms(plan: Path, group: str | None, only: str | None) -> list[PlannedArm]:
    return chosen_arms(choose_groups(read_plan(plan), group), only)

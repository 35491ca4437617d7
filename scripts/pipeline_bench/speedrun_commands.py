"""The verbs of `python scripts/speedrun_meter`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from convergence.plan import choose_groups, read_plan
from convergence.results import load
from convergence.summary import GroupSummary, summarise

from peers.cli.common import INTERRUPTED, run_script
from peers.cli.output import complain, say
from pipeline_bench.cases import Arm, choose_links
from pipeline_bench.commands import DOCS
from pipeline_bench.homes import ROOT
from pipeline_bench.results import Results
from protocol.errors import UserError

SECTION = "speedrun"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

ResultsPath = Annotated[Path, typer.Option("--results", help="The measured steps, JSON.")]


def main() -> None:
    """Run the command line; errors meant for a person become one line and an exit code."""
    run_script(app)


@app.command("run")
def run(
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm; may be given again.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 8,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before those.")] = 2,
    microbatches: Annotated[int, typer.Option(min=1, help="Per step; they divide the study's 16 sequences.")] = 16,
    timeout: Annotated[float, typer.Option(min=10, help="Seconds for an arm, start included.")] = 300.0,
    loopback: Annotated[bool, typer.Option("--loopback", help="Without the laboratory: only to try it out.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep here what the processes wrote.")] = None,
    results: ResultsPath = DOCS / "benchmarks" / "speedrun.json",
) -> None:
    """Measure the steady step of eight peers behind 200 Mbit/s + 50 ms, for each arm that is missing."""
    from convergence.runner import describe_commit

    from pipeline_bench.bench import Terms, compare
    from pipeline_bench.isthmus_arm import AFTER
    from pipeline_bench.speedrun import ENTRANTS, LAB_LINK, find, lab_config

    unknown = set(arm or ()) - {entrant.name for entrant in ENTRANTS}
    if unknown:
        raise UserError(f"expected --arm of {', '.join(e.name for e in ENTRANTS)}, got {', '.join(sorted(unknown))}")
    terms = Terms(steps, warmup, None, timeout, timeout, loopback, None if keep is None else keep.resolve())
    group, store, failed = study(), Results(results), 0
    try:
        for entrant in ENTRANTS:
            found = find(group, entrant)
            if found is not None and (not arm or entrant.name in arm):
                config = lab_config(found, steps + warmup + AFTER, microbatches)
                as_it_is = Arm(entrant.name, "isthmus", "default", entrant.title)
                failed += compare(config, [as_it_is], choose_links([LAB_LINK]), terms, store, describe_commit(), say)
    except KeyboardInterrupt:
        complain("interrupted: what was measured is kept, `run` goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(1 if failed else 0)


@app.command("report")
def report(
    results: ResultsPath = DOCS / "benchmarks" / "speedrun.json",
    page: Annotated[Path, typer.Option("--page", help="The page whose table is written.")] = DOCS / "benchmarks.md",
) -> None:
    """Write T side by side."""
    from pipeline_bench.page import write_section
    from pipeline_bench.speedrun import failures, table, times

    store = Results(results)
    text = table(times(study(), store))
    write_section(page, SECTION, "\n\n".join(filter(None, (text, failures(store.rows)))))
    say(f"wrote {page}")


def study() -> GroupSummary:
    """The group of the convergence study whose steps are used."""
    from pipeline_bench.speedrun import GROUP

    plan = read_plan(ROOT / "scripts" / "convergence" / "plan.toml")
    arms = choose_groups(plan, GROUP)[GROUP]
    return summarise(GROUP, arms, load(DOCS / "convergence" / "results.jsonl"))

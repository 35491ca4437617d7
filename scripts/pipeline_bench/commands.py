"""The verbs of `python scripts/bench_pipeline`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peers.cli.common import INTERRUPTED, run_script
from peers.cli.output import complain, say
from pipeline_bench.cases import choose_arms, choose_links
from pipeline_bench.homes import ROOT
from pipeline_bench.results import Results

DOCS = ROOT / "docs"
SECTION = "pipeline"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

ResultsPath = Annotated[Path, typer.Option("--results", help="The results, JSON; what is in it is not measured again.")]


def main() -> None:
    """Run the command line; errors meant for a person become one line and an exit code."""
    run_script(app)


@app.command("run")
def run(
    config: Annotated[Path, typer.Argument(help="The run that all arms train.")] = ROOT / "configs" / "bench.toml",
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm; may be given again.")] = None,
    link: Annotated[list[str] | None, typer.Option(help="Only this link; may be given again.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 6,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before those.")] = 2,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Per step (default: the configuration's).")] = None,
    window: Annotated[float, typer.Option(min=1, help="Seconds after which a hivemind chain begins no more.")] = 90.0,
    timeout: Annotated[float, typer.Option(min=10, help="Seconds for an arm on a link, start included.")] = 600.0,
    loopback: Annotated[bool, typer.Option("--loopback", help="Without the laboratory: only to try it out.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep here what the processes wrote.")] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also write traces/ARM-LINK.json beside the results: the arm's last step.")
    ] = False,
    results: ResultsPath = DOCS / "benchmarks" / "pipeline.json",
) -> None:
    """Measure what is missing, one arm at a time; exit code 1 if one failed, which costs the others nothing."""
    from convergence.runner import describe_commit

    from peers.config_file import read_config
    from pipeline_bench.bench import Terms, compare

    arms, links = choose_arms(arm or []), choose_links(link or [])
    kept, traces = None if keep is None else keep.resolve(), results.resolve().parent / "traces" if trace else None
    terms = Terms(steps, warmup, microbatches, window, timeout, loopback, kept, traces)
    try:
        failed = compare(read_config(config), arms, links, terms, Results(results), describe_commit(), say)
    except KeyboardInterrupt:
        complain("interrupted: what was measured is kept, `run` goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    say(f"results in {results}; `report` writes the page")
    if traces is not None:
        say(f"traces in {traces}: open one at ui.perfetto.dev, or draw them with scripts/draw_trace --arms")
    raise typer.Exit(1 if failed else 0)


@app.command("report")
def report(
    results: ResultsPath = DOCS / "benchmarks" / "pipeline.json",
    page: Annotated[Path, typer.Option("--page", help="The page whose table is written.")] = DOCS / "benchmarks.md",
    plot: Annotated[Path, typer.Option("--plot", help="The picture.")] = DOCS / "bench_pipeline.png",
) -> None:
    """Write the table and the picture."""
    from pipeline_bench.page import write_section
    from pipeline_bench.plot import draw
    from pipeline_bench.table import comparison

    rows = Results(results).rows
    draw(rows, plot)
    write_section(page, SECTION, f"{comparison(rows)}\n\n![tokens per second]({plot.name})")
    say(f"wrote {page} and {plot}")

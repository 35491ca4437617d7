"""A step of a pipeline in simulated time: how long it takes, against its floor, and what it keeps in memory.

One pipeline by the options, or, with --write, the tables and the picture of docs/scale.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from peers.cli.common import run_command
from peers.cli.output import say
from peers.config_file import read_config
from pipeline_model import page, study
from pipeline_model.floor import floor
from pipeline_model.layout import Home, Layout, megabits
from pipeline_model.simulation import STEPS, Outcome, simulate
from protocol.config import RunConfig, parse_config
from protocol.errors import UserError
from protocol.frame import Kind
from protocol.model.payload import payload_rules
from protocol.work import Schedule

DOCS = Path(__file__).resolve().parents[2] / "docs"
STAGES, MICROBATCHES = (2, 4, 8, 16), (8, 16, 32, 64, 128)
HOME, DATACENTRE = "80 Mbit/s, 50 ms", "10 Gbit/s, 0.1 ms"
# What the page is about when no file is given: microbatches of 8 x 1024 tokens, 64 of 1024 coordinates cross in int4.
CASE: dict[str, dict[str, int]] = {
    "model": {"dim": 1024, "layers": 16, "heads": 16, "kv_heads": 4, "hidden": 2816},
    "boundary": {"rank": 64},
    "data": {"vocab_size": 32768},
    "train": {"microbatches": 32, "microbatch_size": 8, "sequence_length": 1024},
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Run = Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="What crosses (default: see docs/scale.md).")]
Forward = Annotated[str, typer.Option(help="Seconds of a microbatch's forward: for all stages, or 0.02,0.03,... each.")]
Backward = Annotated[str, typer.Option(help="The same of its backward.")]
Apply = Annotated[float, typer.Option(help="Seconds of the update.")]
Up = Annotated[float, typer.Option(help="Mbit/s of each home's uplink; 0: unlimited.")]
Down = Annotated[float | None, typer.Option(help="Mbit/s of its downlink (default: as up).")]
Delay = Annotated[float, typer.Option(help="Milliseconds one way between two peers.")]
Stages = Annotated[int, typer.Option(min=1, help="Stages, one a peer.")]
Microbatches = Annotated[int, typer.Option(min=1, help="Microbatches a step.")]
Window = Annotated[int, typer.Option(min=1, help="pipeline.window.")]
Credits = Annotated[str, typer.Option(help="pipeline.credits: measured or fixed.")]
ScheduleName = Annotated[Schedule, typer.Option("--schedule", help="pipeline.schedule.")]
Steps = Annotated[int, typer.Option(min=1, help="How many; the last one is reported.")]
Write = Annotated[bool, typer.Option("--write", help="Fill docs/scale.md and draw docs/scale.png (some minutes).")]


def main() -> None:
    """Run the command line; errors meant for a person become one line and an exit code."""
    run_command(app)


@app.command(help=__doc__)
def pipeline_scale(
    run: Run = None,
    forward: Forward = "0.02",
    backward: Backward = "0.04",
    apply: Apply = 0.0,
    up: Up = 80.0,
    down: Down = None,
    delay: Delay = 50.0,
    stages: Stages = 4,
    microbatches: Microbatches = 32,
    window: Window = 16,
    credits: Credits = "measured",
    schedule: ScheduleName = Schedule.ONE_F_ONE_B,
    steps: Steps = STEPS,
    write: Write = False,
) -> None:
    """See the module's text."""
    config = parse_config(CASE, "the page's case") if run is None else read_config(run)
    if credits not in ("measured", "fixed"):
        raise UserError(f"expected --credits measured or fixed, got {credits!r}")
    times = zip(_seconds("forward", forward, stages), _seconds("backward", backward, stages), strict=True)
    rates = megabits(up), megabits(up if down is None else down)
    homes = tuple(Home(f, b, apply, *rates, delay / 1e3) for f, b in times)
    layout = Layout(homes, microbatches, *sizes(config), window, credits == "measured", schedule)
    if write:
        _write(layout)
    else:
        _say(simulate(layout, steps))


def sizes(config: RunConfig) -> tuple[int, int]:
    """Bytes of a payload, forward and backward; of a codec that may save some, the most."""
    rules = payload_rules(config)
    return rules[Kind.FORWARD].most, rules[Kind.BACKWARD].most


def _seconds(name: str, text: str, stages: int) -> list[float]:
    try:
        each = [float(word) for word in text.split(",")]
    except ValueError:
        each = []
    if len(each) not in (1, stages) or min(each) < 0:
        raise UserError(f"expected --{name} as seconds, one number or {stages} with commas, got {text!r}")
    return each * (stages if len(each) == 1 else 1)


def _say(outcome: Outcome) -> None:
    layout, least = outcome.layout, floor(outcome.layout)
    forward, backward = (f"{layout.frame_bytes(kind):,}" for kind in (Kind.FORWARD, Kind.BACKWARD))
    parts = f"compute {least.compute_seconds:.3f}, wire {least.wire_seconds:.3f}, fill {least.fill_seconds:.3f}"
    say(f"simulated: {len(layout.homes)} stages, {layout.microbatches} microbatches, {layout.schedule}")
    say(f"a frame      {forward} bytes forward, {backward} backward")
    say(f"floor        {least.seconds:.3f} s ({parts})")
    say(f"step         {outcome.seconds:.3f} s ({_words(outcome.step_seconds, '.3f')})")
    say(f"step / floor {outcome.over_floor:.3f}")
    say(f"in flight    {_words(outcome.most_in_flight, 'd')}, at most, by stage")
    say(f"credits      {_words(outcome.credits, 'd') or 'fixed'}")
    say(f"computing    {_words(outcome.busy, '.0%')} of the time")
    say(f"sent         {_words([size / 1e6 for size in outcome.sent_bytes], '.2f')} MB a step, by peer")


def _words(numbers: Iterable[float], form: str) -> str:
    return " ".join(f"{number:{form}}" for number in numbers)


def _write(layout: Layout) -> None:
    first = layout.homes[0]
    near = Home(first.forward, first.backward, first.apply, megabits(10_000), megabits(10_000), 1e-4)
    fast = Layout.of(near, len(layout.homes), layout.microbatches, (layout.forward_bytes, layout.backward_bytes))
    grids = {HOME: study.grid(layout, STAGES, MICROBATCHES), DATACENTRE: study.grid(fast, STAGES, MICROBATCHES)}
    eight = Layout.of(first, 8, 64, (layout.forward_bytes, layout.backward_bytes))
    tables = {
        "home": study.grid_table(grids[HOME]),
        "datacentre": study.grid_table(grids[DATACENTRE]),
        "windows-4": study.windows_table(layout),
        "windows-8": study.windows_table(eight),
        "orders": study.orders_table(layout),
        "interleaving": study.interleaving_table(_interleavings(layout, fast)),
    }
    page.fill(DOCS / "scale.md", tables)
    page.draw(grids, DOCS / "scale.png")
    for name, table in tables.items():
        say(f"\n{name}\n{page.plain(table)}")


def _interleavings(far: Layout, near: Layout) -> list[study.Interleaving]:
    found = []
    for name, layout in ((HOME, far), (DATACENTRE, near)):
        for slower in (1, 10):
            first = layout.homes[0]
            home = Home(slower * first.forward, slower * first.backward, 0.0, first.up, first.down, first.delay)
            title = f"{name}, a microbatch computes {slower * (first.forward + first.backward):g} s"
            for stages, microbatches in ((4, 8), (4, 32), (8, 32)):
                case = Layout.of(home, stages, microbatches, (layout.forward_bytes, layout.backward_bytes))
                found.append(study.interleaving(title, case))
    return found

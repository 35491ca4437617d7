"""The cases that docs/scale.md shows. Each is a few calls of `simulate`, and a table of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline_model.coordinator import step_bytes
from pipeline_model.floor import floor
from pipeline_model.layout import UNLIMITED, Layout
from pipeline_model.simulation import STEPS, Outcome, simulate
from protocol.work import Schedule

WIDE = 64  # a window that bounds little


@dataclass(frozen=True)
class Table:
    """Of text, with a heading for each column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Grid:
    """Outcomes by (stages, microbatches)."""

    measured: dict[tuple[int, int], Outcome]
    gpipe: dict[tuple[int, int], Outcome]


def grid(layout: Layout, stages: Sequence[int], microbatches: Sequence[int]) -> Grid:
    """The pipeline at other sizes, all stages like its first one."""
    cells = {(s, m): replace(layout, homes=layout.homes[:1] * s, microbatches=m) for s in stages for m in microbatches}
    return Grid(
        {cell: simulate(each.with_window(WIDE, measured=True)) for cell, each in cells.items()},
        {cell: simulate(_gpipe(each), 2) for cell, each in cells.items()},
    )


def grid_table(found: Grid) -> Table:
    """How the step, memory and the coordinator's traffic grow."""
    rows = []
    for (stages, microbatches), outcome in found.measured.items():
        other = found.gpipe[stages, microbatches]
        kilobytes = step_bytes(stages, outcome.seconds) / 1e3
        most, most_gpipe = outcome.most_in_flight, other.most_in_flight
        rows.append(
            (
                *(str(stages), str(microbatches), f"{floor(outcome.layout).seconds:.2f}"),
                *(f"{outcome.seconds:.2f}", f"{outcome.over_floor:.2f}", f"{most[0]} / {max(most[-2:])}"),
                *(f"{other.seconds:.2f}", f"{other.over_floor:.2f}", str(most_gpipe[0])),
                f"{kilobytes:.1f}",
            )
        )
    heads = ("stages", "microbatches", "floor, s", "1f1b, s", "/ floor", "in flight, first / last two stages")
    return Table((*heads, "gpipe, s", "/ floor", "in flight", "coordinator, kB a step"), tuple(rows))


def windows_table(layout: Layout, fixed: Sequence[int] = (2, 4, 6, 8, 16, 32)) -> Table:
    """The step and the memory under other credits."""
    arms = [(f"fixed {window}", simulate(layout.with_window(window), 2)) for window in fixed]
    arms += [("unlimited", simulate(layout.with_window(UNLIMITED), 2))]
    for window in (16, WIDE):
        arms.append((f"measured, window {window}", simulate(layout.with_window(window, measured=True))))
    arms += [("gpipe", simulate(_gpipe(layout), 2))]
    rows = [(n, f"{o.seconds:.2f}", f"{o.over_floor:.2f}", " ".join(map(str, o.most_in_flight))) for n, o in arms]
    return Table(("credits", "step, s", "/ floor", "most in flight, by stage"), tuple(rows))


def orders_table(layout: Layout) -> Table:
    """What a home's uplink sends first."""
    rows = []
    for order in ("fair", "fifo", "gradients first"):
        arms = [replace(layout, order=order).with_window(w, measured=True) for w in (16, WIDE)]
        outcomes = [simulate(arm) for arm in arms]
        rows.append((order, *(f"{outcome.over_floor:.3f}" for outcome in outcomes)))
    return Table(("uplink", "window 16: step / floor", f"window {WIDE}: step / floor"), tuple(rows))


@dataclass(frozen=True)
class Interleaving:
    """The same work in three ways: whole stages; two slices a peer; whole stages with microbatches of half the size."""

    name: str
    whole: Outcome
    sliced: Outcome
    halved: Outcome


def interleaving(name: str, layout: Layout) -> Interleaving:
    """Each with the best of a few windows: none is to lose for lack of credits, or of their excess."""
    halved = replace(
        layout,
        homes=tuple(replace(h, forward=h.forward / 2, backward=h.backward / 2) for h in layout.homes),
        microbatches=2 * layout.microbatches,
        forward_bytes=layout.forward_bytes // 2,
        backward_bytes=layout.backward_bytes // 2,
    )
    return Interleaving(name, best(layout), best(replace(layout, slices=2)), best(halved))


def best(layout: Layout) -> Outcome:
    """Of some fixed windows, and of measured credits where the stages are whole."""
    arms = [layout.with_window(window) for window in (2, 4, 8, 16, 32, UNLIMITED)]
    outcomes = [simulate(arm, 2) for arm in arms]
    if layout.slices == 1:
        outcomes.append(simulate(layout.with_window(UNLIMITED, measured=True), STEPS))
    return min(outcomes, key=lambda outcome: outcome.seconds)


def interleaving_table(found: Sequence[Interleaving]) -> Table:
    """Seconds of a step, and the gain over whole stages."""
    rows = [
        (
            *(each.name, str(len(each.whole.layout.homes)), str(each.whole.layout.microbatches)),
            f"{each.whole.seconds:.3f}",
            *(f"{o.seconds:.3f} ({o.seconds / each.whole.seconds - 1:+.0%})" for o in (each.sliced, each.halved)),
        )
        for each in found
    ]
    heads = ("link", "peers", "microbatches", "whole stages, s", "two slices a peer, s", "half-size microbatches, s")
    return Table(heads, tuple(rows))


def _gpipe(layout: Layout) -> Layout:
    return replace(layout.with_window(UNLIMITED), schedule=Schedule.GPIPE)

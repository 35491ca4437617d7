"""The pictures of docs/convergence.md, four a group."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from convergence.public_case import LINKS
from convergence.summary import ArmSummary, GroupSummary, step_time
from convergence.sweep import sweep_cell
from peers.files import write_atomically

Draw = Callable[[Any, GroupSummary], None]


def draw(group: GroupSummary, name: str, path: Path) -> None:
    """Write the group's picture `name`, one of PLOTS, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    PLOTS[name](axes, group)
    axes.set(title=f"{group.name}: {axes.get_title()}")
    if axes.get_xscale() == "log":
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False, fontsize=7, ncols=2)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))


def _bytes(axes: Any, group: GroupSummary) -> None:
    for style, arm in _styled(group):
        size = arm.metered_wire.forward + arm.metered_wire.backward
        axes.errorbar(size, arm.loss, yerr=arm.spread, capsize=3, **style | {"linestyle": "none"})
        axes.annotate(arm.arm.name, (size, arm.loss), (5, 4), textcoords="offset points", fontsize=7)
    _target_line(axes, group)
    axes.set(
        xscale="log",
        xlabel="bytes per token, forward + backward (float32 counted as bf16)",
        ylabel=_LOSS,
        title="loss against bytes (float32 counted as bf16)",
    )


def _time(axes: Any, group: GroupSummary) -> None:
    for style, arm in _styled(group):
        seconds = step_time(arm, LINKS[0]).seconds
        lengths = [steps for steps in sorted(arm.arm.horizons) if arm.finals(steps)]
        losses = [statistics.mean(arm.finals(steps).values()) for steps in lengths]
        axes.plot([steps * seconds for steps in lengths], losses, **style)
    _target_line(axes, group)
    axes.set(xscale="log", xlabel=f"T: steps x seconds a step of the public case at {LINKS[0]}", ylabel=_LOSS)
    axes.set(title="loss against time, a point for each length of run")


def _rates(axes: Any, group: GroupSummary) -> None:
    for style, arm in _styled(group):
        cells = sorted(
            c for c, loss in arm.losses.items() if math.isfinite(loss) and c == sweep_cell(arm.arm, c.learning_rate)
        )
        axes.plot([cell.learning_rate for cell in cells], [arm.losses[cell] for cell in cells], **style)
    axes.set(xscale="log", xlabel="learning rate", ylabel=_LOSS, title="the learning-rate sweep of each arm, one seed")


def _curves(axes: Any, group: GroupSummary) -> None:
    for style, arm in _styled(group):
        axes.plot(*zip(*arm.row["held_out_curve"], strict=True), **style)
    axes.set(xlabel="step", ylabel=_LOSS, title="held-out loss on the way, one seed, best learning rate")


_LOSS = "held-out loss (nats per token)"
PLOTS: Mapping[str, Draw] = {"bytes": _bytes, "time": _time, "rates": _rates, "curves": _curves}


def _target_line(axes: Any, group: GroupSummary) -> None:
    if group.dense is not None:
        axes.axhline(group.dense.loss, color="#888888", linestyle=":", linewidth=1.2, label="target: best dense")


def _styled(group: GroupSummary) -> Sequence[tuple[dict[str, Any], ArmSummary]]:
    """Each arm with its line: dense ones dashed; colours repeat after ten, markers later."""
    return [
        (
            {
                "label": arm.arm.name,
                "color": f"C{number % 10}",
                "marker": "osD^vPX"[number % 7],
                "markersize": 4.5,
                "linewidth": 1.3,
                "linestyle": "--" if arm.arm.role == "dense" else "-",
            },
            arm,
        )
        for number, arm in enumerate(group.arms)
    ]

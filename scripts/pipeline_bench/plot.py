"""The comparison as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline_bench.cases import ARMS, LINKS
from pipeline_bench.measure import Row
from pipeline_bench.table import floor_seconds, rate


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write tokens per second by link and arm to `path`, PNG; black lines are what floors would give."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.2), dpi=110)
    width = 0.8 / len(ARMS)
    for number, arm in enumerate(ARMS):
        for place, link in enumerate(LINKS):
            row = next((row for row in rows if (row["arm"], row["link"]) == (arm.name, link.name)), None)
            speed, x = rate(row), place + (number - (len(ARMS) - 1) / 2) * width
            axes.bar(x, speed or 0, width, color=f"C{number}", label=arm.title if place == 0 else None)
            if row is not None and speed is None:
                axes.text(x, 0.02, "failed", transform=axes.get_xaxis_transform(), rotation=90, ha="center", fontsize=7)
            if row is not None and speed is not None and (floor := floor_seconds(row)) is not None:
                limit = speed * row["step_seconds"] / floor
                axes.hlines(limit, x - width / 2, x + width / 2, colors="black", linewidth=1.5)
    axes.set_yscale("log")
    axes.set_xticks(range(len(LINKS)), [str(link) for link in LINKS])
    axes.set_ylabel("tokens per second")
    axes.set_title("four stages, the same model and microbatches (black: the floor of the bar below)", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)

"""docs/scale.md: the tables between its marks, and its picture. The text around them is written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from peers.files import write_atomically
from pipeline_model.study import Grid, Table
from protocol.errors import UserError


def markdown(table: Table) -> str:
    """The table."""
    lines = [table.columns, ("---",) * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(table: Table) -> str:
    """The table for a terminal."""
    lines = [table.columns, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.columns))]
    return "\n".join("  ".join(word.rjust(w) for word, w in zip(line, widths, strict=True)) for line in lines)


def fill(path: Path, tables: Mapping[str, Table]) -> None:
    """Put each table between its marks, `<!-- NAME -->` and `<!-- end -->`.

    Raises:
        UserError: the page lacks one.
    """
    text = path.read_text()
    for name, table in tables.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        filled = f"\n{markdown(table)}\n\n"
        text, found = between.subn(lambda marks, filled=filled: marks[1] + filled + marks[2], text)  # type: ignore[misc]
        if not found:
            raise UserError(f"expected the marks <!-- {name} --> and <!-- end --> in {path}, found none: put them back")
    write_atomically(path, lambda temporary: temporary.write_text(text))


def draw(grids: Mapping[str, Grid], path: Path) -> None:
    """Step / floor against microbatches, a line for each number of stages, a panel for each link."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(grids), sharey=True, squeeze=False)[0]
    for axes, (name, grid) in zip(panels, grids.items(), strict=True):
        for index, stages in enumerate(sorted({stages for stages, _ in grid.measured})):
            for cells, style in ((grid.measured, "-o"), (grid.gpipe, "--")):
                points = [(m, outcome.over_floor) for (s, m), outcome in cells.items() if s == stages]
                label = f"{stages} stages" if style == "-o" else None
                axes.plot(*zip(*points, strict=True), style, color=f"C{index}", label=label, markersize=3)
        axes.set(xscale="log", xlabel="microbatches", title=f"{name} (simulated; dashed: gpipe)")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=7)
    panels[0].set(ylabel="step / floor")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))

"""The picture of a run: its loss over steps, beside the unigram baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.files import write_atomically


def plot_loss(rows: Sequence[Mapping[str, Any]], unigram_loss: float, title: str, path: Path) -> None:
    """Write a PNG of the training loss (nats) to `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    told = [row for row in rows if row["loss"] is not None]
    steps, losses = [row["step"] for row in told], [row["loss"] for row in told]
    axes.plot(steps, losses, linewidth=1.0, color="#1f6f8b", alpha=0.45, label="loss of each step")
    axes.plot(steps, _smoothed(losses), linewidth=1.8, color="#1f6f8b", label="smoothed")
    axes.axhline(unigram_loss, color="#b5651d", linestyle="--", linewidth=1.2, label="unigram baseline")
    axes.set(xlabel="step", ylabel="loss (nats)", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))


def _smoothed(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """An exponential moving average without the bias of its start."""
    smoothed, weight, total = [], 0.0, 0.0
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        smoothed.append(total / weight)
    return smoothed

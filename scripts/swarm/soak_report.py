"""The samples of a soak as a page: a table over time, slopes, and a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.processes import COORDINATOR
from swarm.sampling import FIGURES

ROWS = 12
WARM_SECONDS = 300.0  # in which a process still allocates for the first time
DRAWN = ("rss", "p2pd", "files", "sockets", "threads", "frames", "tensors", "blobs", "reports")

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Samples:
    """All lines of a soak's file."""

    lines: Sequence[Line]

    @classmethod
    def load(cls, path: Path) -> Samples:
        """Those in `path`; a torn last line is passed over."""
        return cls(list(_lines(path)))

    @property
    def seconds(self) -> float:
        """How long it went on."""
        return float(max((line["seconds"] for line in self.lines), default=0.0))

    def of(self, kind: str) -> list[Line]:
        """The lines of a kind: sample, step, churn."""
        return [line for line in self.lines if line["kind"] == kind]

    def stayers(self) -> list[str]:
        """Who was there the whole time."""
        names = {line["name"] for line in self.of("sample")}
        return sorted(name for name in names if name == COORDINATOR or name.startswith("stays"))

    def series(self, name: str, figure: str) -> list[tuple[float, float]]:
        """(seconds, figure) of a process."""
        return [(s["seconds"], s[figure]) for s in self.of("sample") if s["name"] == name and figure in s]


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """What a figure grows by in an hour, by least squares after the warm-up; None: too few points."""
    late = [(x, y) for x, y in points if x >= WARM_SECONDS]
    if len(late) < 3:
        return None
    return statistics.linear_regression(*zip(*late, strict=True)).slope * 3600


def report(samples: Samples, command: str, picture: str, failure: str) -> str:
    """The page, Markdown."""
    steps, churn = samples.of("step"), samples.of("churn")
    minutes = samples.seconds / 60
    killed = sum("kill" in line for line in churn)
    parts = [
        "# Soak: a swarm whose peers come and go\n",
        f"`{command}`\n",
        f"{minutes:.0f} minutes, {steps[-1]['step'] if steps else 0} steps; {len(churn)} times a peer went "
        f"({killed} killed, {len(churn) - killed} by Ctrl-C) and one came. The coordinator and the peers "
        f"`stays-*` were left alone: in them a leak would show.\n",
    ]
    if failure:
        parts.append(f"It ended early: {failure}\n")
    parts += ["## Over time\n", _over_time(samples), "## What stayed\n", _slopes(samples), f"![]({picture})\n"]
    return "\n".join(parts)


def draw(samples: Samples, path: Path) -> None:
    """The picture, PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 3, figsize=(11, 7), sharex=True)
    for axis, name in zip(axes.flat, DRAWN, strict=True):
        axis.set_title(FIGURES[name], fontsize=8)
        axis.tick_params(labelsize=7)
        for process in samples.stayers():
            points = samples.series(process, name)
            axis.plot([x / 60 for x, _ in points], [y for _, y in points], linewidth=0.9, label=process)
        axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("minutes", fontsize=8)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _over_time(samples: Samples) -> str:
    """Each row the largest figures of all processes in one part of the time."""
    names = list(FIGURES)
    header = ["minutes", "step", "peers", *(f"{FIGURES[name]}, most" for name in names)]
    lines = [_row(header), _row(["---"] * len(header))]
    width = samples.seconds / ROWS or 1.0
    for part in range(ROWS):
        within = [line for line in samples.lines if part <= line["seconds"] / width < part + 1]
        found = [line for line in within if line["kind"] == "sample"]
        steps = [line["step"] for line in within if line["kind"] == "step"]
        if not found or not steps:
            continue
        peers = (len(found) / len(steps)) - 1
        most = [max((line[name] for line in found if name in line), default=0.0) for name in names]
        lines.append(_row([f"{(part + 1) * width / 60:.1f}", str(steps[-1]), f"{peers:.1f}", *map(_number, most)]))
    return "\n".join(lines) + "\n"


def _slopes(samples: Samples) -> str:
    header = ["process", "figure", "at first", "in the middle", "at last", "grows in an hour"]
    lines = [_row(header), _row(["---"] * len(header))]
    for process in samples.stayers():
        for name, text in FIGURES.items():
            points = samples.series(process, name)
            warm = [y for x, y in points if x >= WARM_SECONDS] or [y for _, y in points]
            if not warm:
                continue
            growth = slope(points)
            shown = "-" if growth is None else f"{growth:+.1f}"
            values = [warm[0], warm[len(warm) // 2], warm[-1]]
            lines.append(_row([process, text, *map(_number, values), shown]))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    return f"{value:.1f}" if value % 1 else f"{value:.0f}"


def _lines(path: Path) -> Iterator[Line]:
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(text)
        except ValueError:
            continue

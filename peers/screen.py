"""What a person sees of a run: a live line on a terminal, plain lines where the output is piped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from peers.floor_report import floor_line
from protocol.config import RunConfig
from protocol.plain_text import printable

PLAIN_SECONDS = 5.0
NARROW, MIDDLE, WIDE = 40, 60, 120  # columns of a terminal


class Screen:
    """Shows a run's progress. Implements `peers.coordinator_daemon.Observer`."""

    def __init__(self, console: Console, config: RunConfig, unigram_loss: float) -> None:
        self._console, self._config, self._unigram = console, config, unigram_loss
        self._progress: Progress | None = None
        self._task: Any = None
        self._last_step = 0
        self._shown = float("-inf")
        self._present = -1

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(printable(text), highlight=False, soft_wrap=True, markup=False)

    def waiting(self, present: int, needed: int) -> None:
        """Peers are awaited."""
        if present != self._present:
            self._present = present
            self.say(f"peers: {present} of {needed}")

    def began(self, first_step: int, last_step: int) -> None:
        """All stages have a peer."""
        self._last_step = last_step
        form, width = self._config.boundary.form, self._config.boundary_width
        self.say(f"all {self._config.pipeline.stages} stages have peers; {_plan(first_step, last_step)}")
        self.say(
            f"boundary: {form}, {width} of {self._config.model.dim} numbers per token; "
            f"unigram baseline: {self._unigram:.3f} nats"
        )
        if self._console.is_terminal:
            self._progress = Progress(*_columns(self._console.width), console=self._console)
            self._task = self._progress.add_task(
                "", total=last_step, completed=first_step - 1, loss="", speed="", numbers=""
            )
            self._progress.start()

    def row(self, row: dict[str, Any]) -> None:
        """A step is done everywhere."""
        if row.get("skipped"):
            self.say(f"step {row['step']} was passed over: its numbers were not finite")
            return
        loss = "unknown" if row["loss"] is None else f"{row['loss']:.4f}"
        speed = f"{row['tokens_per_second']:,.0f} tokens/s"
        numbers = (
            f"loss {loss}  {speed}  "
            f"{row['forward_bytes_per_token']:.1f}+{row['backward_bytes_per_token']:.1f} bytes/token  "
            f"{row['seconds']:.2f} s/step{_over_floor(row)}"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], loss=loss, speed=speed, numbers=numbers)
        elif time.monotonic() - self._shown > PLAIN_SECONDS or row["step"] == self._last_step:
            self._shown = time.monotonic()
            eta = (self._last_step - row["step"]) * row["seconds"]
            self.say(f"step {row['step']}/{self._last_step}  {numbers}  ETA {_duration(eta)}")

    def note(self, text: str) -> None:
        """Something a person should know."""
        self.say(text)

    def close(self) -> None:
        """End the live line."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def summary(self, report: dict[str, Any], folder: Path) -> None:
        """The run in a few lines."""
        if not report["steps"]:
            self.say(f"no step was done; run folder: {folder}")
            return
        wire = report["wire"]
        lines = [
            (
                "loss",
                f"{report['loss_first']:.4f} -> {report['loss_last']:.4f} nats "
                f"(unigram baseline {report['unigram_loss']:.4f})",
            ),
            ("steps", f"{report['steps']} ({report['tokens']:,} tokens), median {report['step_seconds_median']:.2f} s"),
        ]
        if wire["ratio_to_dense_bf16"]:
            lines += [
                (
                    "wire",
                    f"{wire['forward_bytes_per_token']:.2f} bytes/token forward, "
                    f"{wire['backward_bytes_per_token']:.2f} backward; dense bf16 would be "
                    f"{wire['dense_bf16_bytes_per_token']:.0f} each way: {compared(wire['ratio_to_dense_bf16'])}",
                ),
                ("overhead", f"{100 * wire['overhead_fraction']:.2f} % of the payload (headers, control messages)"),
            ]
            lines.append(("declared", f"{_declared(wire['declared_ratio'])} of the codecs' declared bytes"))
        if wire.get("ratio_of_all_to_dense_bf16"):
            lines.append(("in all", in_all_line(wire)))
        lines.append(("floor", floor_line(report)))
        if wire["chunk_payload_bytes"]:
            lines.append(("replicas", f"{wire['chunk_payload_bytes']:,} bytes of gradients, states and checkpoints"))
        lines += [("folder", str(folder)), ("plot", str(folder / "loss.png"))]
        for name, text in lines:
            self.say(f"  {name:<9} {text}")


def compared(ratio: float) -> str:
    """How much less than something else it is, `ratio` being what that is over it: a ratio below 1 is more."""
    if 0.95 < ratio < 1.05:
        return "as much"
    return f"{ratio:.1f}x less" if ratio > 1 else f"{1 / ratio:.1f}x more"


def _plan(first_step: int, last_step: int) -> str:
    if first_step > last_step:
        return f"step {last_step} is done already, nothing is left to train"
    return f"training from step {first_step} to {last_step}"


def _columns(width: int) -> list[ProgressColumn]:
    """Of the live line, as many as a terminal of `width` columns can show, the most telling ones first."""
    if width < NARROW:
        return [TextColumn("{task.completed}/{task.total} {task.fields[loss]}")]
    steps = [TextColumn("step"), MofNCompleteColumn()]
    if width < MIDDLE:
        return [*steps, TextColumn("loss {task.fields[loss]}"), TextColumn("{task.fields[speed]}")]
    left = [TextColumn("ETA"), TimeRemainingColumn(compact=True)]
    if width < WIDE:
        return [*steps, TextColumn("loss {task.fields[loss]}"), TextColumn("{task.fields[speed]}"), *left]
    return [*steps, BarColumn(bar_width=20), TextColumn("{task.fields[numbers]}"), *left]


def in_all_line(wire: Mapping[str, Any]) -> str:
    """What everything together was, for people: what crossed the boundaries may be the smaller part."""
    sent, dense, ratio = wire["all_bytes"], wire["dense_bf16_bytes"], wire["ratio_of_all_to_dense_bf16"]
    return f"{sent:,} bytes sent, whatever for; dense bf16 boundaries alone {dense:,}: {compared(ratio)}"


def _over_floor(row: dict[str, Any]) -> str:
    ratio = row.get("step_over_floor")
    return "" if ratio is None else f" ({ratio:.2f} x floor)"


def _declared(ratios: dict[str, float]) -> str:
    return f"{100 * ratios['forward']:.2f} % forward, {100 * ratios['backward']:.2f} % backward"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

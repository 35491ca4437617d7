"""Our own daemons in the homes: a peer in each, the coordinator in one more."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from peers.config_file import format_config
from peers.run_folder import RunFolder
from pipeline_bench.arms import Crew
from pipeline_bench.homes import python
from pipeline_bench.job import POLL_SECONDS, Deadline
from pipeline_bench.measure import Trained
from protocol.config import RunConfig
from protocol.frame import Kind
from protocol.model.payload import payload_rules

AFTER = 1  # steps after the window, so that the end of the run is not in it


def isthmus(crew: Crew, config: RunConfig, addresses: Sequence[str], warmup: int, deadline: Deadline) -> Trained:
    """Run all steps of `config`; the window is all but the first `warmup` and the last one."""
    stages, folder = config.pipeline.stages, RunFolder(crew.folder / "run")
    file = crew.folder / "run.toml"
    file.write_text(format_config(config))
    terms: list[str | Path] = [
        "--dir",
        folder.root,
        "--wait-for",
        str(stages),
        "--no-newcomers",
        "--with-parent",
        str(os.getpid()),
    ]
    crew.start(
        "coordinator",
        stages,
        python("peers.cli", "coordinator", "start", file, "--host", addresses[stages], *terms),
    )
    crew.wait_for_file(folder.invite, "the coordinator's invite", deadline)
    invite = folder.invite.read_text().strip()
    for index in range(stages):
        home = folder.peer(index)
        home.mkdir(parents=True)
        own: list[str | Path] = ["--dir", home, "--host", addresses[index], "--threads", "1", "--device", "cpu"]
        command = python("peers.cli", "peer", "join", invite, *own, "--with-parent", str(os.getpid()))
        crew.start(f"peer-{index}", index, command)
    end = _wait_for_rows(crew, folder, config.train.steps - AFTER, deadline)
    names = list(crew.running)
    crew.wait_for_end(names, deadline)
    return trained(config, list(folder.rows()), end, warmup, json.loads(folder.report.read_text()))


def _wait_for_rows(crew: Crew, folder: RunFolder, steps: int, deadline: Deadline) -> float:
    """When the row of step `steps` was there."""
    while _newest(folder.metrics) < steps:
        crew.check()
        deadline.check(f"step {steps}, the newest is {_newest(folder.metrics)}")
        time.sleep(POLL_SECONDS)
    return time.monotonic()


def _newest(metrics: Path) -> int:
    with suppress(OSError, ValueError, IndexError, KeyError):
        lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return int(json.loads(lines[-1])["step"])
    return 0


def trained(
    config: RunConfig, rows: Sequence[dict[str, Any]], end: float, warmup: int, report: dict[str, Any]
) -> Trained:
    """What the rows and the report of a run say of its window, whose last row was there at `end`."""
    window = [row for row in rows if warmup < row["step"] <= config.train.steps - AFTER]
    seconds = [row["seconds"] for row in window]
    sent = [row["forward_bytes_per_token"] + row["backward_bytes_per_token"] for row in window]
    extra = {
        "wire": wire_name(config),
        "declared_bytes_per_token": declared_bytes(config),
        "frame_bytes_per_token": sum(sent) / len(sent),
        # The product's own judgement of its steps.
        "step_over_floor": report.get("step_over_floor"),
        "floor": report.get("floor"),
    }
    losses = [row["loss"] for row in window if row["loss"] is not None]
    return Trained(end - sum(seconds), end, sum(row["tokens"] for row in window), seconds, losses, extra)


def declared_bytes(config: RunConfig) -> float:
    """Bytes per token across a boundary that the codecs declare, both ways, ids included."""
    rules = payload_rules(config)
    return (rules[Kind.FORWARD].most + rules[Kind.BACKWARD].most) / config.tokens_per_microbatch


def wire_name(config: RunConfig) -> str:
    """What crosses, in a few words."""
    boundary = config.boundary
    codecs = " / ".join(dict.fromkeys([boundary.codec, boundary.gradient_codec or boundary.codec]))
    return codecs if boundary.form == "none" else f"{boundary.form} k = {boundary.rank}, {codecs}"

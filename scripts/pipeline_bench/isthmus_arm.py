"""Our own daemons in the homes: a peer in each, the coordinator in one more."""

from __future__ import annotations

import json
import os
import statistics
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


def isthmus(
    crew: Crew, config: RunConfig, addresses: Sequence[str], warmup: int, deadline: Deadline, trace: bool
) -> Trained:
    """Run all steps of `config`; the window is all but the first `warmup` and the last one."""
    stages, folder = config.pipeline.stages, RunFolder(crew.folder / "run")
    file = crew.folder / "run.toml"
    file.write_text(format_config(config))
    watched = ("--with-parent", str(os.getpid()))
    command = python("peers.cli", "coordinator", "start", file, "--dir", folder.root, "--host", addresses[stages])
    wanted = ["--wait-for", str(stages), "--no-newcomers", *premises(crew.homes.lab_file(crew.folder))]
    crew.start("coordinator", stages, [*command, *wanted, *watched])
    crew.wait_for_file(folder.invite, "the coordinator's invite", deadline)
    join = python("peers.cli", "peer", "join", folder.invite.read_text().strip(), "--threads", "1", "--device", "cpu")
    join += ["--trace"] if trace else []
    for index in range(stages):
        home = folder.peer(index)
        home.mkdir(parents=True)
        crew.start(f"peer-{index}", index, [*join, "--dir", str(home), "--host", addresses[index], *watched])
    end = _wait_for_rows(crew, folder, config.train.steps - AFTER, deadline)
    crew.wait_for_end(list(crew.running), deadline)
    return trained(config, list(folder.rows()), end, warmup)


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


def trained(config: RunConfig, rows: Sequence[dict[str, Any]], end: float, warmup: int) -> Trained:
    """What the rows of a run say of its window, whose last row was there at `end`."""
    window = [row for row in rows if warmup < row["step"] <= config.train.steps - AFTER]
    seconds = [row["seconds"] for row in window]
    sent = [row["forward_bytes_per_token"] + row["backward_bytes_per_token"] for row in window]
    extra = {
        "wire": wire_name(config),
        "declared_bytes_per_token": declared_bytes(config),
        "frame_bytes_per_token": sum(sent) / len(sent),
        **floor_of(window),
    }
    losses = [row["loss"] for row in window if row["loss"] is not None]
    return Trained(end - sum(seconds), end, sum(row["tokens"] for row in window), seconds, losses, extra)


def floor_of(window: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The window's floor by the product's own reports: the median of each part, and of the steps over it."""
    known = [row["floor"] for row in window if row.get("floor")]
    if not known:
        return {"floor": None, "step_over_floor": None}
    parts = ("compute_seconds", "wire_seconds", "fill_seconds", "seconds")
    floor = {part: statistics.median(one[part] for one in known) for part in parts}
    step = statistics.median(row["seconds"] for row in window)
    return {"floor": floor, "step_over_floor": step / floor["seconds"]}


def premises(lab: Path | None) -> list[str]:
    """What the coordinator must be told of this machine to know a step's floor."""
    return ["--shared-cores", str(os.cpu_count() or 1), *(["--lab", str(lab)] if lab is not None else [])]


def declared_bytes(config: RunConfig) -> float:
    """Bytes per token across a boundary that the codecs declare, both ways, ids included."""
    rules = payload_rules(config)
    return (rules[Kind.FORWARD].most + rules[Kind.BACKWARD].most) / config.tokens_per_microbatch


def wire_name(config: RunConfig) -> str:
    """What crosses, in a few words."""
    boundary = config.boundary
    codecs = " / ".join(dict.fromkeys([boundary.codec, boundary.gradient_codec or boundary.codec]))
    return codecs if boundary.form == "none" else f"{boundary.form} k = {boundary.rank}, {codecs}"

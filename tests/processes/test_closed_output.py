"""A launched run whose output nobody reads any more: `| head`, or `| tee` that the same Ctrl-C ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def long_toml(small_values: dict[str, Any], write_toml: Callable[[str, dict[str, Any]], Path]) -> Path:
    """The small run with more steps than the test waits for."""
    return write_toml("long.toml", {**small_values, "train": {**small_values["train"], "steps": 2000}})


def rows(folder: Path) -> list[int]:
    """The steps that are written down."""
    path = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for `condition`, long enough for a busy machine."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def test_ctrl_c_winds_the_run_down_when_its_reader_is_gone(long_toml: Path, tmp_path: Path, cache: Path) -> None:
    """Both outputs close in mid-run. It trains on, and after Ctrl-C has all rows, one checkpoint step and its report.

    A module of the user's in the working folder, with the name of one of ours, is in nobody's way either.
    """
    (tmp_path / "protocol.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong module')")
    program = "import sys; from peers.cli.app import main; main()"
    command = [sys.executable, "-P", "-c", program, "launch", str(long_toml), "--peers", "3", "--dir", "run"]
    environment = {**os.environ, "ISTHMUS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    launched = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)  # type: ignore[call-overload]
    try:
        folder = tmp_path / "run"
        wait_until(lambda: rows(folder) or launched.poll() is not None, "a first step")
        assert launched.poll() is None and launched.stdout is not None, launched.stdout and launched.stdout.read()
        launched.stdout.close()
        seen = len(rows(folder))
        wait_until(lambda: len(rows(folder)) > seen + 5, "the run to go on unseen")
        launched.send_signal(signal.SIGINT)
        assert launched.wait(120) == 130
    finally:
        if launched.poll() is None:
            launched.kill()
            launched.wait()
    report = json.loads((folder / "report.json").read_text())
    assert rows(folder) == list(range(1, report["steps"] + 1)) and report["ended"]["failed"] is False
    files = [sorted(folder.glob(f"peers/{n}/checkpoints/stage-*/step-*.safetensors")) for n in range(3)]
    newest = [max(int(file.stem.removeprefix("step-")) for file in found) for found in files]
    assert newest == [report["steps"]] * 3

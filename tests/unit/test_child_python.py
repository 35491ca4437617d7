"""Children run the parent's code, whatever lies in the folder that they are started from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from peers.child_python import child_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["random", "protocol", "peers", "compression", "logging"])
def test_a_module_in_the_working_folder_is_not_taken_for_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    done = subprocess.run(child_python("peers.cli", "launch", "--help"), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "RUN.toml" in done.stdout, done.stderr


def test_arguments_and_exit_code_are_those_of_the_module(tmp_path: Path) -> None:
    done = subprocess.run(child_python("peers.cli", "launch"), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "expected a RUN.toml" in done.stderr


def test_the_command_is_this_python_and_nothing_of_the_working_folder() -> None:
    assert child_python("json.tool")[:2] == [sys.executable, "-P"]

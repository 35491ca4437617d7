"""What a command cannot show must not end it, nor change its exit code."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from peers.cli.output import LastingConsole


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_costs_lines_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    file = Path("/dev/full").open("w")  # noqa: SIM115  (closing it fails too)
    console = LastingConsole(file=file)
    console.print("one")
    console.print("two")
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    with suppress(OSError):
        file.close()


ROOT = Path(__file__).resolve().parents[2]
WORK = """
import logging, sys
from pathlib import Path
from rich.progress import Progress
from peers.cli.common import run_command, set_up_logging
from peers.cli.output import complain, console, say
def work():
    set_up_logging(verbose=True)
    say("ready")
    sys.stdin.readline()  # until nobody reads any more
    with Progress(console=console) as bar:
        for step in bar.track(range(3)):
            say(f"step {step}"), complain("something"), logging.info("a line"), console.write("raw")
    Path(sys.argv[1]).write_text("done")
    sys.exit(7)
run_command(work)
"""


def test_the_work_goes_on_when_nobody_reads_what_it_says(tmp_path: Path) -> None:
    """Both outputs are pipes whose readers go away, as of `| head -1`, or of `| tee log` after a Ctrl-C."""
    command = [sys.executable, "-c", WORK, str(tmp_path / "result")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == "ready\n"
        process.stdout.close()
        process.stderr.close()
        process.stdin.write("go on\n")
        process.stdin.close()
        assert process.wait(60) == 7
    assert (tmp_path / "result").read_text() == "done"


def test_a_configuration_can_be_looked_at_through_head(tmp_path: Path) -> None:
    shell = f"{sys.executable} -m peers.cli launch configs/tiny.toml --print-config | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""


MISTAKE = """
import sys
from peers.cli.common import run_command
def work():
    raise LookupError("nobody thought of this")
run_command(work)
"""


def test_a_mistake_of_ours_is_one_line_and_a_file_to_report(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MISTAKE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"TMPDIR": str(tmp_path), "PATH": ""})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "LookupError: nobody thought of this" in done.stderr
    (file,) = tmp_path.glob("isthmus-error-*.txt")
    assert str(file) in done.stderr and "Traceback" in file.read_text()

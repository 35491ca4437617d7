"""The commands as a user runs them: real processes, real p2pd, loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peers.segments import PREFIX_BYTES

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def home(cache: Path) -> dict[str, str]:
    """The environment of the commands: a cache of the session's own, few threads."""
    return {**os.environ, "ISTHMUS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def isthmus(home: dict[str, str], tmp_path: Path) -> Run:
    """Runs a command to its end and returns it."""

    def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "peers.cli", *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=home, capture_output=True, text=True, timeout=240)
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.fixture
def long_toml(small_values: dict[str, Any], write_toml: Callable[[str, dict[str, Any]], Path]) -> Path:
    """The small run with more steps than any test waits for."""
    return write_toml("long.toml", {**small_values, "train": {**small_values["train"], "steps": 2000}})


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on loopback that is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.fixture
def start(home: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command in the background; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "peers.cli", *map(str, arguments)]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for `condition`, long enough for a busy machine."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run so far."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def one_line_error(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """The command said one error line that has all `parts`."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    for part in parts:
        assert part in lines[0]


def test_launch_verifies_reports_and_draws(isthmus: Run, small_toml: Path, tmp_path: Path) -> None:
    done = isthmus("launch", small_toml, "--peers", 3, "--steps", 6, "--verify", "--dir", "run")
    assert "equal within 1e-05" in done.stdout
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["steps"] == 6 and report["tokens"] == 6 * 4 * 2 * 16
    assert report["verify"]["max_loss_diff"] <= 1e-5 and report["verify"]["max_grad_diff"] <= 1e-5
    assert report["verify"]["steps"] == 6 and report["verify"]["parameters"] > 20
    assert {peer["stage"] for peer in report["peers"]} == {0, 1, 2}
    payload, ids = 4 * 4, 2 * 17 / 16
    assert payload + ids <= report["wire"]["forward_bytes_per_token"] <= payload + ids + PREFIX_BYTES / 32
    assert payload <= report["wire"]["backward_bytes_per_token"] <= payload + PREFIX_BYTES / 32
    assert report["wire"]["dense_bf16_bytes_per_token"] == 64
    assert (tmp_path / "run/loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "run/gradients").exists()
    assert sorted(path.name for path in (tmp_path / "run/peers").iterdir()) == ["0", "1", "2"]

    assert report["held_out"]["targets"] == 64 * 16 and report["held_out"]["loss"] < report["loss_first"]
    assert f"held-out  {report['held_out']['loss']:.4f} nats, " in done.stdout and "tokens right" in done.stdout


def test_launch_trains_on_images(
    isthmus: Run, image_values: dict[str, Any], write_toml: Callable[..., Path], tmp_path: Path
) -> None:
    done = isthmus("launch", write_toml("images.toml", image_values), "--steps", 4, "--verify", "--dir", "run")
    assert "bit for bit" in done.stdout and "of 388 images right" in done.stdout
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["tokens"] == 4 * 4 * 2 * 4 and report["verify"]["within"]


def test_a_run_is_resumed_with_another_rate_and_ends_at_once_when_it_is_done(
    isthmus: Run, small_values: dict[str, Any], write_toml: Callable[..., Path], small_toml: Path, tmp_path: Path
) -> None:
    """Old folders, the same invite's run id; what cannot change is refused by name, before anything is written."""
    isthmus("launch", small_toml, "--steps", 5, "--dir", "run", "--no-evaluate")
    wider = write_toml("wider.toml", {**small_values, "model": {**small_values["model"], "hidden": 64}})
    one_line_error(isthmus("launch", "--resume", "run", wider, code=2), "model.hidden 48 -> 64", "set it back")
    train = {**small_values["train"], "learning_rate": 1e-3, "steps": 9}
    slower = write_toml("slower.toml", {**small_values, "train": train})
    done = isthmus("launch", "--resume", "run", slower)
    assert "train.learning_rate 0.005 -> 0.001" in done.stdout and "ended after step 9 of 9" in done.stdout
    assert "held-out" in done.stdout and "tokens right" in done.stdout
    newest = json.loads((tmp_path / "run/manifest.json").read_text())["body"]
    assert (newest["from_step"], newest["config"]["train"]["steps"]) == (6, 9)
    assert newest["first"] == json.loads((tmp_path / "run/report.json").read_text())["run_id"]
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 10))
    again = isthmus("coordinator", "start", "--resume", "run", "--host", "127.0.0.1")
    assert "ended after step 9 of 9: all 9 steps were done before" in again.stdout


def test_interrupt_then_resume_equals_undisturbed(
    isthmus: Run, start: Callable[..., Any], long_toml: Path, tmp_path: Path
) -> None:
    process = start("launch", long_toml, "--dir", "a")
    wait_until(lambda: len(rows(tmp_path / "a")) >= 3, "three steps")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130, output
    reached = len(rows(tmp_path / "a"))
    assert f"ended after step {reached} of 2000: stopped as asked" in output
    assert "isthmus launch --resume a" in output
    isthmus("launch", "--resume", "a", "--steps", reached + 4)
    undisturbed = isthmus("launch", long_toml, "--dir", "b", "--steps", reached + 4, "--no-evaluate")
    assert "held-out" not in undisturbed.stdout
    both = [[(row["step"], row["loss"], row["gradient_norms"]) for row in rows(tmp_path / d)] for d in "ab"]
    assert both[0] == both[1]
    assert len(both[0]) == reached + 4


def test_a_start_after_sigkill_cleans_up_and_goes_on(
    isthmus: Run, start: Callable[..., Any], long_toml: Path, tmp_path: Path
) -> None:
    process = start("launch", long_toml, "--dir", "a")
    wait_until(lambda: len(rows(tmp_path / "a")) >= 6, "a checkpoint")
    children = _descendants(process.pid)
    process.kill()
    for child in children:
        os.kill(child, signal.SIGKILL)
    process.wait()
    sockets = [s for f in (tmp_path / "a").rglob("daemon.json") for s in json.loads(f.read_text())["sockets"]]
    assert len(sockets) == 8
    last = len(rows(tmp_path / "a")) + 10
    isthmus("launch", "--resume", "a", "--steps", last)
    assert [row["step"] for row in rows(tmp_path / "a")] == list(range(1, last + 1))
    assert not [path for path in sockets if Path(path).exists()]


def test_ctrl_c_ends_a_coordinator_that_waits(start: Callable[..., Any], long_toml: Path, tmp_path: Path) -> None:
    process = start("coordinator", "start", long_toml, "--host", "127.0.0.1", "--dir", "run")
    wait_until(lambda: (tmp_path / "run/invite.txt").exists(), "the invite")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert not (tmp_path / "run/report.json").exists()


def test_a_second_launch_in_a_held_folder_harms_nothing(
    isthmus: Run, start: Callable[..., Any], long_toml: Path, tmp_path: Path
) -> None:
    process = start("launch", long_toml, "--dir", "a")
    wait_until(lambda: len(rows(tmp_path / "a")) >= 5, "a checkpoint")
    refused = isthmus("launch", "--resume", "a", code=2)
    assert "is in use by process" in refused.stderr
    reached = len(rows(tmp_path / "a"))
    wait_until(lambda: len(rows(tmp_path / "a")) > reached + 3, "the first run to go on")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output


def test_a_killed_parent_takes_its_children_along(start: Callable[..., Any], long_toml: Path, tmp_path: Path) -> None:
    process = start("launch", long_toml, "--dir", "a")
    wait_until(lambda: rows(tmp_path / "a"), "a step")
    children = _descendants(process.pid)
    process.kill()
    wait_until(lambda: not any(_alive(child) for child in children), "the children's end")


def test_a_killed_peer_ends_the_launch_with_the_reason(
    start: Callable[..., Any], long_toml: Path, tmp_path: Path
) -> None:
    process = start("launch", long_toml, "--dir", "a")
    wait_until(lambda: rows(tmp_path / "a"), "a step")
    record = json.loads((tmp_path / "a/peers/1/daemon.json").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 1, output
    assert "peer 1 ended with exit code -9" in output
    assert "lost its peer" in output
    assert "go on" in output
    assert not [path for path in record["sockets"] if Path(path).exists()]
    assert not _alive(record["p2pd"])


def test_coordinator_peers_and_status_in_terminals_of_their_own(
    isthmus: Run, start: Callable[..., Any], long_toml: Path, tmp_path: Path
) -> None:
    coordinator = start("coordinator", "start", long_toml, "--host", "127.0.0.1", "--dir", "run", "--steps", 100)
    wait_until(lambda: (tmp_path / "run/invite.txt").exists(), "the invite")
    invite = (tmp_path / "run/invite.txt").read_text().strip()
    peers = [start("peer", "join", invite) for _ in range(2)]
    wait_until(lambda: "waiting" in isthmus("status", invite).stdout, "the peers in the status")
    one_line_error(isthmus("peer", "join", invite, "--data", "nowhere", code=2), "nowhere", "; correct --data")
    (tmp_path / "other.txt").write_text("quite another text, which is not the run's, for anyone to see. " * 30)
    one_line_error(isthmus("peer", "join", invite, "--data", "other.txt", code=2), "data differs from the run's")
    peers.append(start("peer", "join", invite))
    outputs = [process.communicate(timeout=240)[0] for process in (coordinator, *peers)]
    assert [process.returncode for process in (coordinator, *peers)] == [0, 0, 0, 0], outputs
    assert "all steps are done" in outputs[0] and "all steps are done" in outputs[1]
    assert "held-out  not evaluated: the stages are on other machines" in outputs[0]
    folders = {path.name for path in (tmp_path / "runs").glob("small-*/peer-*")}
    assert {"peer-0", "peer-1", "peer-2"} <= folders
    assert len(rows(tmp_path / "run")) == 100


def test_mistakes_get_one_line_and_their_code(
    isthmus: Run,
    small_values: dict[str, Any],
    small_toml: Path,
    write_toml: Callable[[str, dict[str, Any]], Path],
    tmp_path: Path,
    listener: int,
) -> None:
    one_line_error(isthmus("launch", "none.toml", code=2), "none.toml")
    one_line_error(isthmus("launch", small_toml, "--peers", 2, code=2), "expected --peers 3", "got 2")
    one_line_error(isthmus("peer", "join", "nonsense", code=2), "isthmus1.")
    for section, key, value, said in (
        ("boundary", "rnak", 3, "did you mean 'rank'"),
        ("boundary", "rank", 33, "model.dim = 32, got 33"),
        ("model", "layers", 4, "divisible by pipeline.stages"),
        ("data", "path", "/no/such/folder", "/no/such/folder"),
    ):
        wrong = write_toml("wrong.toml", {**small_values, section: {**small_values[section], key: value}})
        one_line_error(isthmus("launch", wrong, "--dir", "wrong", code=2), said)
        assert not (tmp_path / "wrong/manifest.json").exists()
    taken = isthmus("coordinator", "start", small_toml, "--host", "127.0.0.1", "--port", listener, "--dir", "t", code=2)
    one_line_error(taken, str(listener))
    assert not (tmp_path / "t/manifest.json").exists()


def test_an_unreachable_run_is_the_networks_fault(isthmus: Run) -> None:
    from protocol.invite import Invite

    nobody = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    invite = str(Invite("small-000000000000", "00" * 32, (nobody,)))
    one_line_error(isthmus("peer", "join", invite, code=3), "/ip4/127.0.0.1/tcp/9", "nobody answered")


def test_print_config_reads_back(isthmus: Run, small_toml: Path, tmp_path: Path) -> None:
    printed = isthmus("launch", small_toml, "--print-config").stdout
    (tmp_path / "printed.toml").write_text(printed)
    assert isthmus("launch", "printed.toml", "--print-config").stdout == printed
    assert "# width of the SwiGLU" in printed


def _descendants(pid: int) -> list[int]:
    """Children started by `launch`; p2pd runs in a session of its own below them and follows its parent."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

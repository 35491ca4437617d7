"""Running one arm in its homes: start its processes, wait for the end, and see to it that none is left."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline_bench.homes import Homes, environment, python
from pipeline_bench.job import POLL_SECONDS, Deadline, Job
from pipeline_bench.measure import Trained
from pipeline_bench.processes import Marked, remove_sockets
from protocol.errors import RunFailed

END_SECONDS = 15.0


@dataclass(slots=True)
class Crew:
    """The processes that were started for one arm. As a context manager it ends them, and all that they started."""

    homes: Homes
    folder: Path
    marked: Marked
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        sockets = self.marked.sockets()
        self.stop()
        self.marked.end()
        remove_sockets(sockets)

    def start(self, name: str, home: int, argv: Sequence[str]) -> None:
        """Start `name` in `home`; what it says is in `folder`/`name`.txt."""
        log = self.folder / f"{name}.txt"
        self.running[name] = self.homes.popen(home, argv, log, environment(self.marked.mark))

    def check(self, *may_end: str) -> None:
        """Raises:
        RunFailed: a process has failed, or ended though it should not.
        """
        for name, process in self.running.items():
            code = process.poll()
            if code is not None and (code != 0 or name not in may_end):
                raise RunFailed(f"{name} ended with exit code {code}: {self.last_line(name)}")

    def last_line(self, name: str) -> str:
        """The last that it said."""
        lines = (self.folder / f"{name}.txt").read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")[:300]

    def wait_for_file(self, path: Path, what: str, deadline: Deadline) -> None:
        """Until `path` is there.

        Raises:
            RunFailed: a process failed, or the time is up.
        """
        while not path.exists():
            self.check()
            deadline.check(what)
            time.sleep(POLL_SECONDS)

    def wait_for_end(self, names: Sequence[str], deadline: Deadline) -> None:
        """Until the processes `names` have ended well. Raises as `wait_for_file`."""
        while any(self.running[name].poll() is None for name in names):
            self.check(*names)
            deadline.check(", ".join(names))
            time.sleep(POLL_SECONDS)
        self.check(*names)

    def stop(self) -> None:
        """Ask those that still run to end, the last started first, and give them some time."""
        deadline = Deadline(END_SECONDS)
        for process in reversed(self.running.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            try:
                process.wait(deadline.left)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def hivemind_chain(crew: Crew, job: Job, deadline: Deadline) -> Trained:
    """A server in each home, and the trainer in one more."""
    stages = job.config.pipeline.stages
    for stage in range(stages):
        crew.start(f"server-{stage}", stage, python("pipeline_bench.hivemind_server", job.folder, str(stage)))
    for stage in range(stages):
        crew.wait_for_file(job.place(stage), f"server {stage} to listen", deadline)
    crew.start("trainer", stages, python("pipeline_bench.hivemind_client", job.folder))
    crew.wait_for_file(job.result, "the trainer", deadline)
    return job.told()


def torch_pipeline(crew: Crew, job: Job, deadline: Deadline) -> Trained:
    """A worker in each home."""
    names = [f"worker-{stage}" for stage in range(job.config.pipeline.stages)]
    for stage, name in enumerate(names):
        crew.start(name, stage, python("pipeline_bench.torch_worker", job.folder, str(stage)))
    crew.wait_for_end(names, deadline)
    return job.told()


def free_port() -> int:
    """A TCP port that is free on this machine, and so also in a home, which has ports of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Hours of a swarm whose peers come and go: each minute one is killed and one joins. Samples go to a file as they come.

Some peers, and the coordinator, are left alone the whole time: in them a leak would show.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.config_file import format_config, read_config
from protocol.config import RunConfig
from protocol.errors import RunFailed
from swarm.processes import COORDINATOR, Swarm, last_line
from swarm.sampling import LOAD_FILE, newest_step, sample

STAYERS = 2
SAMPLE_SECONDS = 10.0
STILL_SECONDS = 300.0  # without a new step, after which the soak has failed
MOST_STEPS = 10_000_000


@dataclass(slots=True)
class Soak:
    """One soak: peers by name in a swarm, samples in `file`."""

    swarm: Swarm
    file: Path
    churn_seconds: float
    dice: random.Random
    began: float = field(default_factory=time.monotonic)
    step: int = 0
    _count: int = 0
    _moved: float = field(default_factory=time.monotonic)
    _seen_step: int = -1

    def begin(self, config: RunConfig, peers: int) -> None:
        """Start all."""
        endless = config.model_copy(update={"train": config.train.model_copy(update={"steps": MOST_STEPS})})
        file = self.swarm.root / "soak.toml"
        file.write_text(format_config(endless))
        self.swarm.open(file)
        for index in range(peers):
            self._join(f"stays-{index}" if index < STAYERS else self._new_name())

    def run(self, seconds: float) -> None:
        """Sample and disturb for `seconds`.

        Raises:
            RunFailed: the run stands still, or has ended.
        """
        next_sample = next_churn = self.began
        next_churn += self.churn_seconds
        while (now := time.monotonic()) < self.began + seconds:
            if now >= next_sample:
                self._sample()
                self._check(now)
                next_sample += SAMPLE_SECONDS
            if now >= next_churn:
                self._churn()
                next_churn += self.churn_seconds
            time.sleep(max(0.0, min(next_sample, next_churn) - time.monotonic()))

    def _churn(self) -> None:
        """One goes, killed or by Ctrl-C, and another one comes: with the folder of one that went, or as a newcomer."""
        going = self.dice.choice([name for name in self._living() if not name.startswith("stays")])
        how = self.dice.choice(["kill", "kill", "interrupt"])
        self.swarm.signal(going, signal.SIGKILL if how == "kill" else signal.SIGINT)
        returning = [name for name in self.swarm.running if self.swarm.is_gone(name) and name != COORDINATOR]
        coming = self.dice.choice(returning) if returning and self.dice.random() < 0.5 else self._new_name()
        self._join(coming)
        self._write({"kind": "churn", how: going, "start": coming})
        self._clear()

    def _clear(self) -> None:
        """Folders of peers that do not come back would fill the disk in days."""
        gone = [name for name in self.swarm.running if self.swarm.is_gone(name) and name != COORDINATOR]
        for name in gone[:-4]:
            self.swarm.remove(name)

    def _join(self, name: str) -> None:
        load = self.swarm.home(name) / LOAD_FILE
        load.unlink(missing_ok=True)
        self.swarm.start(name, "--load-file", str(load))

    def _new_name(self) -> str:
        self._count += 1
        return f"p{self._count}"

    def _living(self) -> list[str]:
        return [name for name in self.swarm.running if name != COORDINATOR and not self.swarm.is_gone(name)]

    def _sample(self) -> None:
        self.step = newest_step(self.swarm.folder.metrics)
        for name in [COORDINATOR, *self._living()]:
            figures = sample(self.swarm.running[name].pid, self.swarm.home(name))
            self._write({"kind": "sample", "name": name, "pid": self.swarm.running[name].pid, **figures})
        self._write({"kind": "step", "step": self.step})

    def _check(self, now: float) -> None:
        if self.swarm.is_gone(COORDINATOR):
            raise RunFailed(f"the coordinator has ended: {last_line(self.swarm.log(COORDINATOR))}")
        lost = [n for n in self.swarm.running if n.startswith("stays") and self.swarm.is_gone(n)]
        if lost:
            raise RunFailed(f"{lost[0]} has ended, which nobody disturbed: {last_line(self.swarm.log(lost[0]))}")
        if self.step != self._seen_step:
            self._seen_step, self._moved = self.step, now
        elif now - self._moved > STILL_SECONDS:
            raise RunFailed(f"no step since {STILL_SECONDS:.0f} s, the last is {self.step}")

    def _write(self, line: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"seconds": round(time.monotonic() - self.began, 1), **line}) + "\n")


def soak(run: Path, root: Path, minutes: float, churn_seconds: float, seed: int) -> Path:
    """Soak a swarm of two replicas a stage in `root`. Returns the file of the samples.

    Raises:
        RunFailed: the run stood still or ended; the samples until then are there.
    """
    config = read_config(run)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    peers = 2 * config.pipeline.stages
    with Swarm(root, peers, None) as swarm:
        soaked = Soak(swarm, root / "samples.jsonl", churn_seconds, random.Random(seed))
        soaked.begin(config, peers)
        soaked.run(60 * minutes)
        return soaked.file

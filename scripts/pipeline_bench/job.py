"""What an arm's worker processes are told and what they tell: small JSON files in the arm's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.files import write_json
from pipeline_bench.measure import Trained
from protocol.config import RunConfig, parse_config
from protocol.errors import RunFailed

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Job:
    """An arm's work.

    Attributes:
        folder: where the files are.
        config: dense, as all workers but our own daemons train it.
        variant: of the arm.
        addresses: of the homes.
        warmup: steps before the window.
        steps: in the window.
        window: seconds after which no new round begins.
        port: of torch's first worker.
        trace: whether each process is to leave its trace in the folder.
    """

    folder: Path
    config: RunConfig
    variant: str
    addresses: Sequence[str]
    warmup: int
    steps: int
    window: float
    port: int = 0
    trace: bool = False

    @property
    def file(self) -> Path:
        """The job itself."""
        return self.folder / "job.json"

    @property
    def result(self) -> Path:
        """What was trained."""
        return self.folder / "result.json"

    def place(self, index: int) -> Path:
        """Where server `index` says where it listens."""
        return self.folder / f"server-{index}.json"

    def write(self) -> None:
        """For `read`."""
        names = ("variant", "addresses", "warmup", "steps", "window", "port", "trace")
        write_json(self.file, {"config": self.config.model_dump()} | {name: getattr(self, name) for name in names})

    @classmethod
    def read(cls, folder: Path) -> Job:
        """The job in `folder`."""
        values = json.loads((folder / "job.json").read_text())
        config = parse_config(values.pop("config"), "the job")
        return cls(folder=folder, config=config, **values)

    def tell(self, trained: Trained) -> None:
        """The worker's result."""
        write_json(self.result, asdict(trained))

    def told(self) -> Trained:
        """The worker's result.

        Raises:
            RunFailed: it told none.
        """
        try:
            values: dict[str, Any] = json.loads(self.result.read_text())
        except (OSError, ValueError) as error:
            raise RunFailed(f"the workers ended without a result: {error}") from error
        return Trained(**values)


class Deadline:
    """A moment after which nothing is waited for."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, not below 0."""
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str) -> None:
        """Raises:
        RunFailed: it has passed, while waiting for `what`.
        """
        if not self.left:
            raise RunFailed(f"timed out waiting for {what}")

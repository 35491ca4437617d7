"""What every disturbed run of a configuration begins from, and what it must be equal to.

Both are made once and kept, by the hash of the configuration:

    undisturbed   the whole run, a peer for each stage, nobody touches it; all its checkpoints are kept
    beginning     the same run's first steps; every disturbed run goes on from there, so it is known who serves what:
                  of the replicas `0a`, `0b`, `1a`, ... each has the checkpoint of its stage, and of no other
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from peers.child_python import child_python
from peers.cli.output import say
from peers.config_file import format_config, read_config
from peers.run_folder import RunFolder
from protocol.config import RunConfig
from protocol.errors import RunFailed
from swarm.processes import REPOSITORY, last_line

FILES = ("manifest.json", "coordinator.key", "coordinator.id", "metrics.jsonl")
REPLICAS = "ab"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The two runs of `config`, in `folder`."""

    config: RunConfig
    folder: Path

    @property
    def undisturbed(self) -> RunFolder:
        """The whole run."""
        return RunFolder(self.folder / "undisturbed")

    @property
    def beginning(self) -> RunFolder:
        """Its first steps."""
        return RunFolder(self.folder / "beginning")

    @property
    def first_step(self) -> int:
        """Where disturbed runs go on."""
        return self.config.checkpoint.every + 1

    @property
    def replicas(self) -> list[str]:
        """Their names: two for each stage."""
        return [f"{stage}{letter}" for stage in range(self.config.pipeline.stages) for letter in REPLICAS]

    def copy_to(self, root: Path) -> None:
        """Make a swarm's folders in `root`, from which it goes on."""
        shutil.rmtree(root, ignore_errors=True)
        (root / "run").mkdir(parents=True)
        for name in FILES:
            shutil.copy(self.beginning.root / name, root / "run" / name)
        for name in self.replicas:
            state = Path(f"stage-{name[:-1]}") / f"step-{self.first_step - 1:08d}.safetensors"
            target = root / "peers" / name / "checkpoints" / state
            target.parent.mkdir(parents=True)
            shutil.copy(next(self.beginning.root.glob(f"peers/*/checkpoints/{state}")), target)


def prepare(run: Path, cache: Path, fresh: bool = False) -> Prepared:
    """The prepared runs of the configuration in `run`, made where they are missing.

    Raises:
        RunFailed: they did not come to their end.
    """
    config = read_config(run)
    prepared = Prepared(config, cache / config.hash()[:12])
    if fresh:
        shutil.rmtree(prepared.folder, ignore_errors=True)
    keep_all = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep": 1_000_000})})
    _launch(config, prepared.beginning, config.checkpoint.every)
    _launch(keep_all, prepared.undisturbed, config.train.steps)
    return prepared


def _launch(config: RunConfig, folder: RunFolder, steps: int) -> None:
    if folder.report.exists() and json.loads(folder.report.read_text())["steps"] == steps:
        return
    say(f"preparing {steps} undisturbed steps in {folder.root}")
    shutil.rmtree(folder.root, ignore_errors=True)
    folder.root.parent.mkdir(parents=True, exist_ok=True)
    file = folder.root.with_suffix(".toml")
    file.write_text(format_config(config))
    options = ["--peers", str(config.pipeline.stages), "--steps", str(steps), "--no-evaluate", "--device", "cpu"]
    command = child_python("peers.cli", "launch", str(file), "--dir", str(folder.root), *options)
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise RunFailed(f"the undisturbed run ended with {done.returncode}: {last_line(done.stdout + done.stderr)}")

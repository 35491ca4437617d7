"""Checkpoints of one peer: the state of its stage every n steps, `checkpoints/stage-2/step-00000050.safetensors`."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from peers.files import remove_temporary, write_atomically
from protocol.errors import RunFailed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of run `run_id` in `folder`; the newest `keep` of each stage stay."""

    folder: Path
    run_id: str
    keep: int

    def held(self) -> dict[int, list[int]]:
        """The steps held of each stage, whole files of this run only."""
        stages: dict[int, list[int]] = {}
        for path in sorted(self.folder.glob("stage-*/step-*.safetensors")):
            found = self._identify(path)
            if found is not None:
                stages.setdefault(found[0], []).append(found[1])
        return stages

    def save(self, stage: int, step: int, state: dict[str, torch.Tensor]) -> Path:
        """Write the state that `stage` has after `step`, then drop the oldest ones.

        Raises:
            OSError: the disk is full or the folder not writable; the earlier checkpoints are as they were.
        """
        path = self._path(stage, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        labels = {"run": self.run_id, "stage": str(stage), "step": str(step)}
        try:
            write_atomically(path, lambda temporary: save_file(tensors, temporary, labels))
        except SafetensorError as error:  # how it says that the disk is full
            raise OSError(str(error)) from error
        self._prune(stage, step)
        return path

    def load(self, stage: int, step: int) -> dict[str, torch.Tensor]:
        """The state that `stage` had after `step`, on the CPU.

        Raises:
            RunFailed: there is no whole checkpoint of it.
        """
        path = self._path(stage, step)
        if not path.exists() or self._identify(path) != (stage, step):
            raise RunFailed(f"expected a checkpoint of stage {stage}, step {step} of run {self.run_id} at {path}")
        return load_file(path)

    def size(self, stage: int, step: int) -> int:
        """The bytes of the checkpoint of `stage` after `step`, which `held` names."""
        return self._path(stage, step).stat().st_size

    def parameters(self, stage: int, step: int) -> int:
        """How many weights the checkpoint of `stage` after `step` holds, whatever its optimiser keeps beside them."""
        with safe_open(self._path(stage, step), framework="pt") as file:
            names = [name for name in file.keys() if name.startswith("weight/")]  # noqa: SIM118  (not a dictionary)
            shapes = [file.get_slice(name).get_shape() for name in names]
        return sum(map(math.prod, shapes))

    def _path(self, stage: int, step: int) -> Path:
        return self.folder / f"stage-{stage}" / f"step-{step:08d}.safetensors"

    def _identify(self, path: Path) -> tuple[int, int] | None:
        try:
            with safe_open(path, framework="pt") as file:
                labels = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            logger.warning("ignoring the checkpoint %s: %s", path, error)
            return None
        if labels.get("run") != self.run_id or not {"stage", "step"} <= set(labels):
            return None
        found = int(labels["stage"]), int(labels["step"])
        return found if path == self._path(*found) else None

    def _prune(self, stage: int, newest: int) -> None:
        remove_temporary(self._path(stage, newest).parent)
        steps = self.held().get(stage, [])
        # Later steps than the one just written are of a future that a restart from an earlier step gave up.
        kept = [step for step in steps if step <= newest][-self.keep :]
        for step in set(steps) - set(kept):
            self._path(stage, step).unlink(missing_ok=True)

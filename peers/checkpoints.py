"""Checkpoints of one peer, `checkpoints/stage-2/step-00000050.safetensors`: of its stage, and copies of other stages'.

A file is whole or absent when this process or its machine dies, and a disk that spoils a file later is found out:

    torn           the header states another length: `held` leaves the file out
    bits changed   the header holds a SHA-256 of all tensors, which `load` compares. `held` does not read so much: it
                   leaves out what `load` found damaged and set aside, as `step-00000050.safetensors.damaged`
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from peers.faults import Fault, Phase
from peers.files import remove_temporary, write_atomically
from protocol.errors import RunFailed
from protocol.lineage import Lineage

logger = logging.getLogger(__name__)

_NAME = re.compile(r"stage-(\d+)/step-(\d{8,})\.safetensors")
_Stamp = tuple[int, int, int]  # of a file: another one, or one that was written again, has another


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of run `run_id` in `folder`; the newest `keep` of each stage stay.

    `lineage`: the run's history, where it is known; files of another one are passed over.
    """

    folder: Path
    run_id: str
    keep: int
    fault: Fault = field(default_factory=Fault, repr=False, compare=False)
    lineage: Lineage | None = None
    # What a look at each file has shown: so `held` opens a file once, and a bad one is said once.
    _seen: dict[Path, tuple[_Stamp, bool]] = field(default_factory=dict, init=False, repr=False)
    _failing: set[int] = field(default_factory=set, init=False, repr=False)
    # Own states and copies are written by several threads; one would take the other's file for a dead writer's.
    _writing: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def follow(self, skipped: tuple[int, ...], first_step: int | None) -> bool:
        """The run passes over `skipped`, and begins with `first_step` (None: it goes on). Whether that is new here."""
        if self.lineage is None:
            return False
        lineage = replace(self.lineage, skipped=skipped)
        lineage = lineage if first_step is None else lineage.begun(first_step)
        if lineage == self.lineage:
            return False
        with self._writing:
            self.lineage = lineage
            self._seen = {}
        return True

    def held(self) -> dict[int, list[int]]:
        """The steps held of each stage, whole files of this run only. Cheap: it reads headers, and each only once."""
        stages: dict[int, list[int]] = {}
        seen = {}
        for path in sorted(self.folder.glob("stage-*/step-*.safetensors")):
            look = self._look(path)
            if look is None:
                continue
            seen[path] = look
            if look[1]:
                stage, step = self._named(path)
                stages.setdefault(stage, []).append(step)
        self._seen = seen
        return {stage: sorted(steps) for stage, steps in stages.items()}

    def save(self, stage: int, step: int, state: Mapping[str, torch.Tensor]) -> Path:
        """Write the state that `stage` has after `step`, then drop the oldest ones.

        Raises:
            OSError: the disk is full or the folder not writable; the earlier checkpoints are as they were.
        """
        path = self._path(stage, step)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        history = {} if self.lineage is None else self.lineage.labels(step)
        labels = self._labels(stage, step) | history | {"sha256": _digest(tensors)}

        def write(temporary: Path) -> None:
            save_file(tensors, temporary, labels)
            self.fault.reached(Phase.CHECKPOINT, step)

        with self._writing:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                write_atomically(path, write)
            except SafetensorError as error:  # how it says that the disk is full
                raise OSError(str(error)) from error
            self._prune(stage, step)
        return path

    def save_or_say(self, stage: int, step: int, state: Mapping[str, torch.Tensor]) -> bool:
        """`save`, but a disk that fails does not end the run: it is said once, and once more when it works again."""
        try:
            self.save(stage, step, state)
        except OSError as error:
            if stage not in self._failing:
                logger.error(
                    "no checkpoint of stage %d, step %d could be written: %s; the run goes on and tries again at each "
                    "checkpoint, the last good one is kept: make room on the disk, or make %s writable",
                    stage, step, error, self.folder,
                )  # fmt: skip
            self._failing.add(stage)
            return False
        if stage in self._failing:
            self._failing.remove(stage)
            logger.warning("checkpoints of stage %d are written again, from step %d on", stage, step)
        return True

    def forget_after(self, step: int) -> None:
        """The run goes on from `step`: what was kept of later steps is of a future that was given up.

        It would not do to keep it: the same steps come again, with other bits in the last places.
        """
        with self._writing, suppress(OSError):  # a folder that cannot be looked through
            for stage, steps in self.held().items():
                for later in steps:
                    if later > step:
                        with suppress(OSError):  # a folder that cannot be written to; weights are compared anyway
                            self._path(stage, later).unlink(missing_ok=True)

    def load(self, stage: int, step: int) -> dict[str, torch.Tensor]:
        """The state that `stage` had after `step`, on the CPU, with the bits that `save` was given.

        Raises:
            RunFailed: there is no whole checkpoint of it, or its content has changed since it was written.
        """
        path = self._path(stage, step)
        look = self._look(path)
        if look is None or not look[1]:
            raise RunFailed(f"expected a checkpoint of stage {stage}, step {step} of run {self.run_id} at {path}")
        try:
            with safe_open(path, framework="pt") as file:
                expected = (file.metadata() or {}).get("sha256")
            state: dict[str, torch.Tensor] = load_file(path)
        except (SafetensorError, OSError) as error:
            self._seen[path] = look[0], False  # held no longer, as long as it stays as it is
            raise RunFailed(f"expected a whole checkpoint at {path}, got: {error}") from error
        if _digest(state) != expected:
            self._set_aside(path, look[0])
            raise RunFailed(
                f"expected in {path} what was written there, got other bits: the disk has damaged it; it is set aside"
            )
        return state

    def set_aside(self, stage: int, step: int) -> None:
        """It is whole, and not what the run had: `held` leaves it out from now on."""
        path = self._path(stage, step)
        look = self._look(path)
        if look is not None:
            self._set_aside(path, look[0])

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

    def _named(self, path: Path) -> tuple[int, int]:
        """The stage and step that a file's name states; (-1, -1) if that is no name of ours."""
        found = _NAME.fullmatch(f"{path.parent.name}/{path.name}")
        stage, step = (int(found[1]), int(found[2])) if found else (-1, -1)
        return (stage, step) if path == self._path(stage, step) else (-1, -1)

    def _labels(self, stage: int, step: int) -> dict[str, str]:
        return {"run": self.run_id, "stage": str(stage), "step": str(step)}

    def _look(self, path: Path) -> tuple[_Stamp, bool] | None:
        """The file's stamp, and whether it is a whole one of this run; None if there is no file."""
        try:
            status = path.stat()
        except OSError:
            return None
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        seen = self._seen.get(path)
        if seen is None or seen[0] != stamp:
            seen = self._seen[path] = stamp, self._is_ours(path)
        return seen

    def _is_ours(self, path: Path) -> bool:
        try:
            with safe_open(path, framework="pt") as file:
                labels = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            logger.warning("ignoring the checkpoint %s: %s", path, error)
            return False
        stage, step = self._named(path)
        ours = "sha256" in labels and self._labels(stage, step).items() <= labels.items()
        return ours and (self.lineage is None or self.lineage.accepts(labels, step))

    def _set_aside(self, path: Path, stamp: _Stamp) -> None:
        self._seen[path] = stamp, False  # also where the folder cannot be written to
        with suppress(OSError):
            path.replace(path.with_name(path.name + ".damaged"))

    def _prune(self, stage: int, newest: int) -> None:
        remove_temporary(self._path(stage, newest).parent)
        older = [step for step in self.held().get(stage, []) if step != newest]
        # What was just written stays, also beside later ones: those are of a future that was given up.
        for step in older[: len(older) - (self.keep - 1)]:
            self._path(stage, step).unlink(missing_ok=True)


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names, types, shapes and numbers, hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

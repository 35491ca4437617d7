"""Whether a disturbed run is as the undisturbed one: a row for each step, the same losses, the same parameters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from peers.run_folder import RunFolder

TOLERANCE = 1e-4


@dataclass(slots=True)
class Comparison:
    """What was found.

    Attributes:
        wrong: what is not as it must be, in words.
        loss: the largest relative difference of a loss.
        parameters: the largest distance of a tensor, relative to its norm.
        replicas: how many files of each stage's last state were compared.
    """

    wrong: list[str] = field(default_factory=list)
    loss: float = 0.0
    parameters: float = 0.0
    replicas: list[int] = field(default_factory=list)


def compare(run: RunFolder, peers: Path, undisturbed: RunFolder, stages: int, last_step: int) -> Comparison:
    """Compare the run in `run`, whose peers' folders are in `peers`, with the undisturbed one, up to `last_step`."""
    found = Comparison()
    _compare_rows(found, run, undisturbed, last_step)
    for stage in range(stages):
        _compare_states(found, stage, last_step, peers, undisturbed)
    if found.loss > TOLERANCE:
        found.wrong.append(f"a loss differs by {found.loss:.1e} of it, at most {TOLERANCE:.0e} is expected")
    if found.parameters > TOLERANCE:
        found.wrong.append(
            f"parameters differ by {found.parameters:.1e} of their norm, at most {TOLERANCE:.0e} is expected"
        )
    return found


def _compare_rows(found: Comparison, run: RunFolder, undisturbed: RunFolder, last_step: int) -> None:
    # Not `run.rows()`, which passes over a row that was written twice.
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()] if run.metrics.exists() else []
    counts = Counter(row["step"] for row in rows)
    expected = range(1, last_step + 1)
    if missing := [step for step in expected if not counts[step]]:
        found.wrong.append(f"no rows of steps {_some(missing)}")
    if several := [step for step, count in counts.items() if count > 1]:
        found.wrong.append(f"several rows of steps {_some(several)}")
    if beyond := [step for step in counts if step not in expected]:
        found.wrong.append(f"rows of steps {_some(beyond)}, which are none of the run")
    if silent := [row["step"] for row in rows if row["loss"] is None]:
        found.wrong.append(f"no loss in the rows of steps {_some(silent)}")
    losses = {row["step"]: row["loss"] for row in undisturbed.rows()}
    for row in rows:
        if row["loss"] is not None and losses.get(row["step"]) is not None:
            found.loss = max(found.loss, abs(row["loss"] - losses[row["step"]]) / abs(losses[row["step"]]))


def _compare_states(found: Comparison, stage: int, step: int, peers: Path, undisturbed: RunFolder) -> None:
    name = f"checkpoints/stage-{stage}/step-{step:08d}.safetensors"
    files = sorted(peers.glob(f"*/{name}"))
    found.replicas.append(len(files))
    if not files:
        found.wrong.append(f"nobody has the state of stage {stage} after step {step}")
        return
    first = load_file(files[0])
    for file in files[1:]:
        other = load_file(file)
        if first.keys() != other.keys() or not all(torch.equal(first[key], other[key]) for key in first):
            found.wrong.append(f"stage {stage} ends with other bits at {_owner(file)} than at {_owner(files[0])}")
    right = load_file(next(undisturbed.root.glob(f"peers/*/{name}")))
    found.parameters = max([found.parameters, *_distances(first, right)])


def _distances(state: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> Iterable[float]:
    for key, expected in right.items():
        if key.startswith("weight/"):
            yield float((state[key] - expected).norm() / expected.norm().clamp_min(1e-30))


def _owner(file: Path) -> str:
    return file.parents[2].name


def _some(steps: list[int]) -> str:
    shown = ", ".join(map(str, sorted(steps)[:5]))
    return shown if len(steps) <= 5 else f"{shown} and {len(steps) - 5} more"

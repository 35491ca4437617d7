"""What is one machine's own affair: where its files are and what it computes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from peers.faults import Fault
from peers.trace import StepTracer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """A peer's folder, its torch device, and what some runs need.

    Attributes:
        gradients: where to keep each step's gradients (for `--verify`; None: nowhere).
        basis_DK: the basis of a run that is given one, as this machine has it.
        fault: what is to happen to it, for tests.
        load: where to tell how much is kept in memory (None: nowhere).
        tracer: keeps what the newest steps did, for trace.json in the folder (None: no trace).
        network_pid: the process of its p2pd (None: it has none).
    """

    folder: Path
    device: str = "cpu"
    gradients: Path | None = None
    basis_DK: torch.Tensor | None = None
    fault: Fault = field(default_factory=Fault)
    load: Path | None = None
    tracer: StepTracer | None = None
    network_pid: int | None = None

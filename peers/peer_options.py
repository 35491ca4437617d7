"""What is one machine's own affair: where its files are and what it computes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """A peer's folder, its torch device, and where to keep each step's gradients (for `--verify`; None: nowhere)."""

    folder: Path
    device: str = "cpu"
    gradients: Path | None = None

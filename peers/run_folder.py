"""A run's folder, as the coordinator keeps it.

manifest.json       the signed manifest            invite.txt     what volunteers are given
coordinator.key     signs it (mode 0600)           metrics.jsonl  one line a step
coordinator.id      libp2p identity (mode 0400)    report.json    the whole run in numbers
coordinator.json    next view number               loss.png       its picture
peers/0, peers/1..  the peers' own folders, where `launch` started them
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.files import write_bytes, write_json
from protocol.errors import BadSignature, RemoteError, UserError
from protocol.manifest import Manifest
from protocol.signing import SigningKey, open_record


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run under `root`."""

    root: Path

    @property
    def metrics(self) -> Path:
        """One JSON object a line, one line a step."""
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """The run in numbers."""
        return self.root / "report.json"

    @property
    def plot(self) -> Path:
        """The loss over steps, PNG."""
        return self.root / "loss.png"

    @property
    def invite(self) -> Path:
        """The invite, one line."""
        return self.root / "invite.txt"

    @property
    def identity(self) -> Path:
        """The coordinator's libp2p identity."""
        return self.root / "coordinator.id"

    def peer(self, index: int) -> Path:
        """The folder of the peer that `launch` starts as `index`."""
        return self.root / "peers" / str(index)

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.root / "manifest.json").exists()

    def refuse_existing(self) -> None:
        """Raise a UserError if a run was begun here."""
        if self.exists():
            raise UserError(
                f"expected a folder without a run, {self.root} holds one: "
                f"go on with it by --resume {self.root}, or give another --dir"
            )

    def create(self, manifest: Manifest, key: SigningKey) -> None:
        """Begin a run here.

        Raises:
            UserError: one was begun before.
        """
        self.refuse_existing()
        self.root.mkdir(parents=True, exist_ok=True)
        write_bytes(self.root / "coordinator.key", key.secret.hex().encode(), mode=0o600)
        write_bytes(self.root / "manifest.json", key.sign("manifest", manifest.to_json()))

    def open(self) -> tuple[Manifest, SigningKey]:
        """The run that was begun here.

        Raises:
            UserError: none was, or its files are damaged.
        """
        if not self.exists():
            raise UserError(f"expected a run in {self.root}, there is no manifest.json: start it without --resume")
        try:
            key = SigningKey(bytes.fromhex((self.root / "coordinator.key").read_text().strip()))
            body = open_record((self.root / "manifest.json").read_bytes(), "manifest", key.public)
            return Manifest.from_json(body), key
        except (OSError, ValueError, BadSignature, RemoteError) as error:
            raise UserError(f"the run in {self.root} cannot be opened: {error}") from error

    def next_view(self) -> int:
        """The first view number that this coordinator never used."""
        path = self.root / "coordinator.json"
        return int(json.loads(path.read_text())["next_view"]) if path.exists() else 1

    def remember_view(self, number: int) -> None:
        """Note that `number` is used, before it is."""
        write_json(self.root / "coordinator.json", {"next_view": number + 1})

    def rows(self) -> Iterator[dict[str, Any]]:
        """The steps of `metrics.jsonl`. A torn last line, left by a killed writer, is passed over."""
        if not self.metrics.exists():
            return
        for line in self.metrics.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def forget_rows_after(self, step: int) -> None:
        """Keep the rows up to `step`: a resumed run writes the later ones again."""
        kept = [json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step]
        write_bytes(self.metrics, "".join(kept).encode())

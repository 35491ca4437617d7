"""A run's folder, as the coordinator keeps it.

manifest.json       the signed manifest            invite.txt     what volunteers are given
manifests/1.json..  those before it, if the run was changed, in order
coordinator.key     signs it (mode 0600)           metrics.jsonl  one line a step
coordinator.id      libp2p identity (mode 0400)    events.jsonl   one line a decision: who, when and why
coordinator.json    what its coordinator must      report.json    the whole run in numbers
                    not forget: see `Memory`       loss.png       its picture
peers/0, peers/1..  the peers' own folders, where `launch` started them
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from peers.files import write_bytes, write_json
from protocol.errors import BadSignature, RemoteError, UserError
from protocol.manifest import Manifest, check_chain
from protocol.signing import SigningKey, open_record


class Memory(TypedDict, total=False):
    """What a coordinator writes down before it acts on it, so that one that returns goes on where it was.

    Attributes:
        membership: the newest view and the members, as `Membership.to_json` gives them.
        wire: what all daemons have sent, as `RunRecord.to_json` gives it.
        listen: [host, port, announced address]: peers look for a coordinator that returns where it was.
    """

    membership: dict[str, Any]
    wire: dict[str, Any]
    listen: list[Any]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run under `root`."""

    root: Path

    @property
    def metrics(self) -> Path:
        """One JSON object a line, one line a step."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One JSON object a line, one line a decision of the coordinator."""
        return self.root / "events.jsonl"

    @property
    def report(self) -> Path:
        """The run in numbers."""
        return self.root / "report.json"

    @property
    def plot(self) -> Path:
        """The loss over steps, PNG."""
        return self.root / "loss.png"

    @property
    def trace(self) -> Path:
        """What all peers did in the last steps, for Perfetto, where that was asked for."""
        return self.root / "trace.json"

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

    def peers(self) -> list[Path]:
        """The folders of all peers that `launch` ever started here: any of them may hold any stage's checkpoints."""
        return sorted((self.root / "peers").glob("*/"))

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
            manifests = self.manifests(key.public)
            check_chain(manifests)
            return manifests[-1], key
        except (OSError, ValueError, BadSignature, RemoteError, UserError) as error:
            raise self.cannot_open(str(error)) from error

    def _read_manifest(self, path: Path, key: str) -> Manifest:
        return Manifest.from_json(open_record(path.read_bytes(), "manifest", key))

    def manifests(self, key: str) -> list[Manifest]:
        """The run's manifests from the first to the newest, each signed with `key`.

        Raises:
            OSError, BadSignature, RemoteError: one of them cannot be read.
        """
        paths = sorted((self.root / "manifests").glob("*.json"), key=lambda path: int(path.stem))
        found = [self._read_manifest(path, key) for path in paths]
        newest = self._read_manifest(self.root / "manifest.json", key)
        return found if newest in found else [*found, newest]  # it is where a coordinator died in `amend`

    def amend(self, manifest: Manifest, key: SigningKey) -> None:
        """`manifest`, which follows the newest one, takes its place; that one is kept beside it.

        Raises:
            OSError: the disk is full or the folder not writable; the newest one is as it was.
        """
        newest = self.root / "manifest.json"
        older = self.root / "manifests"
        older.mkdir(exist_ok=True)
        number = len(self.manifests(key.public))
        write_bytes(older / f"{number}.json", newest.read_bytes())
        write_bytes(newest, key.sign("manifest", manifest.to_json()))

    def memory(self) -> Memory:
        """What the coordinator wrote down last.

        Raises:
            UserError: the file is damaged; without it, view numbers could be used twice.
        """
        path = self.root / "coordinator.json"
        if not path.exists():
            return {}
        try:
            memory: Memory = json.loads(path.read_text())
            if not isinstance(memory, dict) or not isinstance(memory.get("membership", {}), dict):
                raise ValueError("it is not what a coordinator writes")
        except (OSError, ValueError) as error:
            raise self.cannot_open(f"{path}: {error}") from error
        return memory

    def cannot_open(self, why: str) -> UserError:
        """The error to raise where the run's files are of no use."""
        return UserError(f"the run in {self.root} cannot be opened: {why}")

    @property
    def views(self) -> int:
        """How many views were ever numbered."""
        return int(self.memory().get("membership", {}).get("next_view", 1)) - 1

    def remember(self, changes: Memory) -> None:
        """Write `changes` down; what they do not name stays.

        Raises:
            OSError: the disk is full or the folder not writable; the file is as it was.
        """
        write_json(self.root / "coordinator.json", {**self.memory(), **changes})

    def rows(self) -> list[dict[str, Any]]:
        """The steps of `metrics.jsonl`, in order.

        A torn line, left by a killed writer, is passed over. A row takes the place of those of its step and later ones
        that stand before it: the run went back, and they could not be removed.
        """
        rows: list[dict[str, Any]] = []
        for row in _lines(self.metrics):
            while rows and rows[-1]["step"] >= row["step"]:
                rows.pop()
            rows.append(row)
        return rows

    def noted(self) -> Iterator[dict[str, Any]]:
        """The decisions of `events.jsonl`."""
        return _lines(self.events)

    def forget_rows_after(self, step: int) -> None:
        """Keep the rows up to `step`: a resumed run writes the later ones again.

        Raises:
            OSError: the disk is full or the folder not writable; the file is as it was.
        """
        kept = [json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step]
        write_bytes(self.metrics, "".join(kept).encode())


def append_lines(path: Path, values: Sequence[dict[str, Any]]) -> None:
    """Add `values` to a file of JSON lines, in one write. A torn last line, left by a killed writer, stays by itself.

    The bytes are the system's when this returns: they outlive this process, but not a power cut.

    Raises:
        OSError: the disk is full or the folder not writable; nothing, or a torn line, may have been added.
    """
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        else:
            torn = False
        file.write(b"\n" * torn + b"".join(json.dumps(value).encode() + b"\n" for value in values))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value

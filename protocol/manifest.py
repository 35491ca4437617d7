"""The manifest: what fixes a run. The coordinator signs it; every peer checks it before it joins.

A run may be resumed with another configuration (`protocol.run_changes`) and may pass over a step (`protocol.skipping`).
Then another manifest takes the place of the first, signed by the same key, with the hash of the one before it and the
step from which it holds: a chain, in which the run keeps its id. What became of which step can be told from it alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from protocol import strict_json
from protocol.config import RunConfig, parse_config
from protocol.errors import ConfigError, InputError, RemoteError, UserError
from protocol.frame import PROTOCOL_VERSION
from protocol.lineage import Lineage
from protocol.plain_text import is_plain, plain

LONGEST_NAME = 128  # of a hash, a key, a run


@dataclass(frozen=True, slots=True)
class Manifest:
    """The run's configuration and what must agree with it.

    Attributes:
        data_fingerprint: SHA-256 of the tokenizer and the tokens, or of the images; a peer with other data is told.
        unigram_loss: nats per token of a model that knows only how often each token (or label) occurs; what to beat.
        nonce: random, so that two runs of one configuration have two ids.
        basis_fingerprint: SHA-256 of the basis if it is given, else None; a peer with another one is told.
        first: the run's id, which the chain's first manifest gave it; "": this is the first.
        previous: the hash of the manifest before this one.
        from_step: the first step for which it holds; 0: not decided, the run has not gone on with it yet.
        history: (first step, hash of the configuration) of those before it.
        skipped: the steps that are passed over.
    """

    config: RunConfig
    data_fingerprint: str
    unigram_loss: float
    coordinator_key: str
    nonce: str
    basis_fingerprint: str | None
    first: str = ""
    previous: str = ""
    from_step: int = 1
    history: tuple[tuple[int, str], ...] = ()
    skipped: tuple[int, ...] = ()
    protocol_version: int = PROTOCOL_VERSION

    @property
    def run_id(self) -> str:
        """The run's id: its name and 12 digits of the first manifest's hash."""
        return self.first or f"{self.config.name}-{self.hash[:12]}"

    @property
    def hash(self) -> str:
        """SHA-256 of all of it, hexadecimal."""
        return hashlib.sha256(strict_json.canonical(self.to_json())).hexdigest()

    @property
    def lineage(self) -> Lineage:
        """Which states are of this run's history."""
        return Lineage((*self.history, (self.from_step, self.config.hash())), self.skipped)

    def followed_by(
        self, from_step: int, config: RunConfig | None = None, skipped: tuple[int, ...] | None = None
    ) -> Manifest:
        """The next manifest of the chain. None: as it is in this one."""
        return replace(
            self,
            config=config or self.config,
            first=self.run_id,
            previous=self.hash,
            from_step=from_step,
            history=(*self.history, (self.from_step, self.config.hash())),
            skipped=self.skipped if skipped is None else skipped,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "config"}
        return {**fields, "config": self.config.model_dump(), "config_hash": self.config.hash()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Manifest:
        """The manifest in `value`.

        Raises:
            RemoteError: a field is missing, or the configuration is not the one that was hashed; most often the
                other side runs another release.
        """
        values = dict(value)
        try:
            version, claimed = values["protocol_version"], values.pop("config_hash")
            if version != PROTOCOL_VERSION:
                raise RemoteError(
                    f"the run speaks protocol version {version}, this release {PROTOCOL_VERSION}: "
                    "install the release of isthmus that the run uses"
                )
            config = parse_config(values.pop("config"), "the run's manifest")
            if missing := {*cls.__slots__} - {*values, "config"}:
                raise KeyError(*missing)
            values["history"] = tuple((int(step), str(config)) for step, config in values["history"])
            values["skipped"] = tuple(int(step) for step in values["skipped"])
            manifest = cls(config=config, **values)
            manifest._check()
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise RemoteError(f"the run's manifest cannot be read by this release of isthmus: {error}") from error
        if config.hash() != claimed:
            raise RemoteError("the manifest's configuration does not hash to what it claims: other releases differ?")
        return manifest

    def _check(self) -> None:
        """Look at what a stranger may have written and peers show, compare and calculate with; ValueError."""
        texts = [self.data_fingerprint, self.coordinator_key, self.nonce, self.first, self.previous]
        texts += [self.basis_fingerprint or "", *(name for _, name in self.history)]
        if not all(is_plain(text, LONGEST_NAME) for text in texts):
            raise ValueError(f"expected names and hashes of at most {LONGEST_NAME} printable characters")
        if type(self.unigram_loss) not in (int, float) or not 0 <= self.unigram_loss < math.inf:
            raise ValueError(f"expected the loss of the unigram baseline in nats, got {plain(self.unigram_loss, 40)}")
        if type(self.from_step) is not int or self.from_step < 0:
            raise ValueError(f"expected the first step for which it holds, got {plain(self.from_step, 40)}")


def check_chain(manifests: Sequence[Manifest]) -> None:
    """Check that each of `manifests`, from the first on, follows the one before it.

    Raises:
        UserError: one of them does not.
    """
    for index, (before, after) in enumerate(pairwise(manifests), 1):
        expected = before.followed_by(after.from_step, after.config, after.skipped)
        if after != expected:
            raise UserError(
                f"expected manifest {index} to follow from the one before it, it names {after.previous[:16]}"
            )
    if manifests and (manifests[0].first or manifests[0].previous):
        raise UserError("expected a run's first manifest, got one that follows another: an earlier one is missing")


_INSTALLED_DATA = {
    "stdlib": (
        "the Python standard library's source",
        "it differs between Python versions: use the version the coordinator uses",
    ),
    "digits": ("scikit-learn's digits", "use the version of scikit-learn that the coordinator uses"),
}


def check_data(manifest: Manifest, fingerprint: str) -> None:
    """Check that data with `fingerprint` is the run's.

    Raises:
        InputError: other files are needed.
        UserError: another release of what brings the data is needed.
    """
    if fingerprint == manifest.data_fingerprint:
        return
    data = manifest.config.data
    source, hint = _INSTALLED_DATA.get(data.source, (f"{data.source} {data.path}", None))
    fact = (
        f"this machine's data differs from the run's: expected {source} with fingerprint "
        f"{manifest.data_fingerprint[:16]}, got {fingerprint[:16]}"
    )
    if hint is not None:
        raise UserError(f"{fact}; {hint}")
    raise InputError("data", "differs", fact, "copy the coordinator's files")


def check_given_basis(manifest: Manifest, fingerprint: str | None) -> None:
    """Check that a basis with `fingerprint` (None: no basis) is the run's.

    Raises:
        InputError: it is another.
    """
    wanted = manifest.basis_fingerprint
    if fingerprint == wanted:
        return
    expected, got = (f"fingerprint {f[:16]}" if f else "none given" for f in (wanted, fingerprint))
    fact = f"this machine's basis differs from the run's: expected {expected}, got {got}"
    raise InputError("basis", "differs", fact, "copy the coordinator's file")

"""The manifest: what fixes a run. The coordinator signs it once; every peer checks it before it joins."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from protocol import strict_json
from protocol.config import RunConfig, parse_config
from protocol.errors import ConfigError, InputError, RemoteError, UserError
from protocol.frame import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Manifest:
    """The run's configuration and what must agree with it.

    Attributes:
        data_fingerprint: SHA-256 of the tokenizer and the tokens, or of the images; a peer with other data is told.
        unigram_loss: nats per token of a model that knows only how often each token (or label) occurs; what to beat.
        nonce: random, so that two runs of one configuration have two ids.
        basis_fingerprint: SHA-256 of the basis if it is given, else None; a peer with another one is told.
    """

    config: RunConfig
    data_fingerprint: str
    unigram_loss: float
    coordinator_key: str
    nonce: str
    basis_fingerprint: str | None
    protocol_version: int = PROTOCOL_VERSION

    @property
    def run_id(self) -> str:
        """The run's id: its name and 12 digits of the manifest's hash."""
        digest = hashlib.sha256(strict_json.canonical(self.to_json())).hexdigest()
        return f"{self.config.name}-{digest[:12]}"

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
            manifest = cls(config=config, **values)
        except (KeyError, TypeError, ConfigError) as error:
            raise RemoteError(f"the run's manifest cannot be read by this release of isthmus: {error}") from error
        if config.hash() != claimed:
            raise RemoteError("the manifest's configuration does not hash to what it claims: other releases differ?")
        return manifest


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

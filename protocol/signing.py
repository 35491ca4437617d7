"""Signed records: what the DHT and the control channel carry that everybody must be able to check.

A record is JSON `{"kind", "body", "key", "signature"}`. The Ed25519 signature covers the canonical JSON of
`[kind, body]`, so a signed manifest cannot be passed off as a view.
"""

from __future__ import annotations

import json
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol import strict_json
from protocol.errors import BadSignature

MAX_RECORD_BYTES = 1 << 19  # a view of `admission.MOST_MEMBERS`, and as many lost ones


class SigningKey:
    """An Ed25519 key pair. `secret` is its 32 raw bytes."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self._private = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._private.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> SigningKey:
        """A new key from the system's randomness."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    def sign(self, kind: str, body: dict[str, Any]) -> bytes:
        """A record of `kind` that carries `body`."""
        signature = self._private.sign(_message(kind, body)).hex()
        record = {"kind": kind, "body": body, "key": self.public, "signature": signature}
        return json.dumps(record, separators=(",", ":")).encode()


def open_record(record: bytes, kind: str, public: str) -> dict[str, Any]:
    """The body of a record of `kind` signed by `public` (hexadecimal).

    Raises:
        BadSignature: too long, not a record, of another kind, by another key, or changed.
    """
    if len(record) > MAX_RECORD_BYTES:
        raise BadSignature(f"expected a record of at most {MAX_RECORD_BYTES} bytes, got {len(record)}")
    try:
        parsed = strict_json.loads(record)
        body, signature = parsed["body"], bytes.fromhex(parsed["signature"])
        found = (parsed["kind"], parsed["key"])
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        message = _message(found[0], body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadSignature(f"expected a signed record, got {record[:40]!r}") from error
    if found != (kind, public):
        raise BadSignature(f"expected a {kind} signed by {public[:16]}, got a {found[0]} by {str(found[1])[:16]}")
    try:
        key.verify(signature, message)
    except InvalidSignature as error:
        raise BadSignature(f"the {kind}'s signature does not match its content") from error
    if not isinstance(body, dict):
        raise BadSignature(f"expected a {kind} with an object as its body")
    return body


def _message(kind: str, body: Any) -> bytes:
    return strict_json.canonical([kind, body])

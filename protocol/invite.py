"""The invite: one string that lets a volunteer find a run and know that it is the right one.

    isthmus1.<base64url of JSON [run id, coordinator key, addresses]>.<8 digits of its SHA-256>

The digits at the end tell a mistyped or cut string from a wrong one. It holds no secret.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass

from protocol import strict_json
from protocol.errors import UserError
from protocol.plain_text import plain

_PREFIX = "isthmus1"
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,39}-[0-9a-f]{12}")  # as `Manifest.run_id` makes it
_KEY = re.compile(r"[0-9a-f]{64}")
MOST_ADDRESSES, LONGEST_ADDRESS = 64, 400


@dataclass(frozen=True, slots=True)
class Invite:
    """Where a run is, and the key that signs its manifest."""

    run_id: str
    coordinator_key: str
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        raw = json.dumps([self.run_id, self.coordinator_key, list(self.addresses)], separators=(",", ":"))
        body = base64.urlsafe_b64encode(raw.encode()).decode().rstrip("=")
        return f"{_PREFIX}.{body}.{_checksum(body)}"

    @classmethod
    def parse(cls, text: str) -> Invite:
        """The invite that prints as `text`; white space that a mail program put in is ignored.

        Raises:
            UserError: not an invite, or cut or changed on its way.
        """
        parts = "".join(text.split()).split(".")
        if len(parts) != 3 or parts[0] != _PREFIX:
            raise UserError(
                f"expected an invite that starts with '{_PREFIX}.', got {text[:30]!r}: "
                "copy the whole line that `isthmus coordinator start` printed"
            )
        if _checksum(parts[1]) != parts[2]:
            raise UserError(
                "the invite was cut or changed on its way (its checksum does not match): copy the whole line again"
            )
        try:
            padded = parts[1] + "=" * (-len(parts[1]) % 4)
            run_id, key, addresses = strict_json.loads(base64.urlsafe_b64decode(padded))
            invite = cls(str(run_id), str(key), tuple(map(str, addresses)))
        except (ValueError, TypeError) as error:
            raise UserError("the invite cannot be read by this release of isthmus: ask for a new one") from error
        if not invite.addresses:
            raise UserError("the invite names no address: ask for a new one")
        invite._check()
        return invite

    def _check(self) -> None:
        """Look at what a stranger may have written: the run's id becomes the name of a folder here."""
        if not _RUN_ID.fullmatch(self.run_id):
            wrong = f"a run's name and 12 digits, got {plain(self.run_id, 60)!r}"
        elif not _KEY.fullmatch(self.coordinator_key):
            wrong = f"a key of 64 digits, got {plain(self.coordinator_key, 60)!r}"
        elif len(self.addresses) > MOST_ADDRESSES or max(map(len, self.addresses)) > LONGEST_ADDRESS:
            wrong = f"at most {MOST_ADDRESSES} addresses of at most {LONGEST_ADDRESS} characters"
        else:
            return
        raise UserError(f"expected an invite with {wrong}: whoever made it did not use isthmus; do not trust it")


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:8]

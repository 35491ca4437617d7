"""What the step protocol hears: the events of `protocol.stage_machine`. `protocol.effects` is what it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protocol.blob import Blob, BlobKey, Offer
from protocol.frame import Buffer, Kind
from protocol.view import View
from protocol.work import Action

Payload = Any


@dataclass(frozen=True, slots=True)
class Arrived:
    """A tensor frame came from `peer`. `codec` is its tag, handed on to whoever decodes it."""

    peer: str
    kind: Kind
    view: int
    step: int
    microbatch: int
    payload: Payload
    codec: int = 0


@dataclass(frozen=True, slots=True)
class Offered:
    """`peer` has a blob."""

    peer: str
    view: int
    offer: Offer


@dataclass(frozen=True, slots=True)
class ChunkAsked:
    """`peer` wants a chunk of a blob that was offered to it."""

    peer: str
    blob: bytes
    index: int


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A chunk came from `peer`."""

    peer: str
    blob: bytes
    index: int
    data: Buffer


@dataclass(frozen=True, slots=True)
class Taken:
    """`peer` has all of a blob."""

    peer: str
    blob: bytes


@dataclass(frozen=True, slots=True)
class Wanted:
    """`peer` misses these microbatches' coordinates (`forward`) and gradients (`backward`) of `step`."""

    peer: str
    view: int
    step: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Used:
    """`peer` has used this gradient of `step`, and will not ask for it again."""

    peer: str
    view: int
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class BlobWanted:
    """`peer` misses a blob, of which it has heard no offer."""

    peer: str
    view: int
    key: BlobKey


@dataclass(frozen=True, slots=True)
class BlobGone:
    """`peer` does not have the blob, and will not."""

    peer: str
    view: int
    key: BlobKey


@dataclass(frozen=True, slots=True)
class StateFound:
    """The state that `FindState` asked for; None: there is no whole file of it."""

    peer: str
    key: BlobKey
    blob: Blob | None


@dataclass(frozen=True, slots=True)
class Computed:
    """The action that was started has ended; `payload` is what it made, as `Compute` says."""

    action: Action
    payload: Payload = None


@dataclass(frozen=True, slots=True)
class Spoiled:
    """F, B, APPLY or LOAD could not be done with what `peer` had sent for it; nothing was changed by it."""

    action: Action
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class ViewChanged:
    """A newer view of the same epoch was verified, in which this peer is at the same stage."""

    view: View


@dataclass(frozen=True, slots=True)
class CreditsChanged:
    """`protocol.credits` has measured that so many microbatches in flight keep the pipeline full."""

    credits: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing came for a long time, or (with `peer`) the link to that peer was lost and is back."""

    peer: str | None = None


Event = (
    Arrived
    | Offered
    | ChunkAsked
    | ChunkArrived
    | Taken
    | Wanted
    | Used
    | BlobWanted
    | BlobGone
    | StateFound
    | Computed
    | Spoiled
    | ViewChanged
    | CreditsChanged
    | Stalled
)

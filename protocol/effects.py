"""What the step protocol asks for: the effects of `protocol.stage_machine`, to be carried out in their order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from protocol.blob import Blob, BlobKey, Offer
from protocol.frame import Buffer, Kind
from protocol.work import Action

Payload = Any


@dataclass(frozen=True, slots=True)
class Reduce:
    """What APPLY is to add up.

    Attributes:
        parts: in this order; or one total; or nothing, if this replica is alone and has all.
        givers: whose parts they are; nothing for a total.
        keep: make the total's blob.
        donor: of a total: who offered it.
        skip: nothing: the step is passed over, without an update.
    """

    parts: tuple[Blob, ...] = ()
    givers: tuple[str, ...] = ()
    keep: bool = False
    donor: str = ""
    skip: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `action` of `step` on `payload` and report `Computed`, or `Spoiled`.

    action      payload                                        makes
    F, B        what `sender` sent, in `codec`; None at an end  the payload for the neighbour, or None
    PART        the microbatches that it covers                the `Blob`
    APPLY       `Reduce`                                       the total's `Blob` if it is to be kept, else None
    RESET       microbatches to drop; None: all of the step    nothing
    STATE       nothing                                        the `Blob` of the state after `step`
    LOAD        the `Blob`                                     the hash of the weights

    Attributes:
        receiver: who gets what F or B makes, by the view at its start; "": nobody.
    """

    step: int
    action: Action
    payload: Payload = None
    codec: int = 0
    sender: str = ""
    receiver: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a tensor frame to `peer`, which serves `stage`."""

    peer: str
    kind: Kind
    view: int
    step: int
    microbatch: int
    stage: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class SendOffer:
    """Offer a blob to `peer`."""

    peer: str
    view: int
    offer: Offer


@dataclass(frozen=True, slots=True)
class AskChunk:
    """Ask `peer` for a chunk."""

    peer: str
    blob: bytes
    index: int


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Send `peer` a chunk."""

    peer: str
    blob: bytes
    index: int
    data: Buffer


@dataclass(frozen=True, slots=True)
class SendTaken:
    """Tell `peer` that its blob is here."""

    peer: str
    blob: bytes


@dataclass(frozen=True, slots=True)
class SendWant:
    """Ask `peer` for tensor frames that are missing."""

    peer: str
    view: int
    step: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendUsed:
    """Tell `peer` that its gradient of `step` has been used here."""

    peer: str
    view: int
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class WantBlob:
    """Ask `peer` to offer a blob."""

    peer: str
    view: int
    key: BlobKey


@dataclass(frozen=True, slots=True)
class SendGone:
    """Tell `peer` that a blob is not here any more."""

    peer: str
    view: int
    key: BlobKey


@dataclass(frozen=True, slots=True)
class FindState:
    """Look for the state under `key` in this peer's files, for `peer`, and report `StateFound`."""

    peer: str
    key: BlobKey


@dataclass(frozen=True, slots=True)
class KeepState:
    """Write another stage's state to this peer's files."""

    blob: Blob


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not act on what `peer` sent; log the reason. `stale`: send it the newest view."""

    peer: str
    reason: str
    stale: bool = False


@dataclass(frozen=True, slots=True)
class StepApplied:
    """The stage has applied `step`. `last` if the view ends here.

    Attributes:
        most_in_flight: microbatches of it whose activations were kept here at a time.
    """

    step: int
    last: bool
    most_in_flight: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Ready:
    """A newcomer has loaded the state after `step`; `weights` is its hash."""

    step: int
    weights: str


@dataclass(frozen=True, slots=True)
class Differs:
    """Replicas came to the reduction of `step` with unlike weights: hash by peer. Nobody applies it in this view."""

    step: int
    hashes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Accuse:
    """What `peer` sent does not decode, though its frame was well-formed; `state`: it is not the state it should be."""

    peer: str
    reason: str
    state: bool = False


@dataclass(frozen=True, slots=True)
class LostTrack:
    """This peer cannot go on from what the others still keep, and must begin from a newer state."""

    reason: str


@dataclass(frozen=True, slots=True)
class Irreplaceable:
    """A neighbour needs a tensor of `step` that went down with its maker, and the stage has applied that step.

    Nobody can make it again: the run must go back. `epoch` is that of the view.
    """

    epoch: int
    step: int
    reason: str


Effect = (
    Compute
    | Send
    | SendOffer
    | AskChunk
    | SendChunk
    | SendTaken
    | SendWant
    | SendUsed
    | WantBlob
    | SendGone
    | FindState
    | KeepState
    | Refuse
    | StepApplied
    | Ready
    | Differs
    | Accuse
    | LostTrack
    | Irreplaceable
)

"""What happens to a run, and what the coordinator does about it: events in, effects out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.peer_report import PeerReport
from protocol.view import View


@dataclass(frozen=True, slots=True)
class JoinAsked:
    """`peer` asks to join.

    Attributes:
        checkpoints: `checkpoints[stage]` are the steps whose state it has in files.
        session: new each time a peer's daemon starts, so that a repeated request is told from a restart.
        speed: GFLOP/s that it measured of itself; 0: unknown.
        memory: bytes that it has for its stage; 0: unknown.
        source: the network address from which its connection comes, as the transport sees it; "": unknown.
        claimed: the addresses that it named, whether they lead to it or not.
    """

    peer: str
    addresses: tuple[str, ...]
    checkpoints: Mapping[int, Sequence[int]] = field(default_factory=dict)
    session: str = ""
    speed: float = 0.0
    memory: int = 0
    source: str = ""
    claimed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Heard:
    """Something came from `peer`: its report, or anything else, which proves that it and its link are there."""

    peer: str
    report: PeerReport | None = None


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """The coordinator's link to `peer` is down."""

    peer: str


@dataclass(frozen=True, slots=True)
class Left:
    """`peer` is gone: its daemon said goodbye, or its process is known to have ended."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """`peer` cannot go on. `fatal`: nor could another in its place (the run's own numbers are bad).

    Attributes:
        epoch, step: of fatal ones: by which view, and of which step numbers are not finite; 0: it is something else.
    """

    peer: str
    reason: str
    fatal: bool = False
    epoch: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Expelled:
    """What `peer` said could not be dealt with, by an error that is ours: its word is worth no further one."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """The owner of `peer` wants it back. It stays until it is released, or for a bounded time."""

    peer: str


@dataclass(frozen=True, slots=True)
class Differs:
    """`peer` saw that the replicas of its stage began `step` with unlike weights; `hashes` says who has which."""

    peer: str
    step: int
    hashes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Accused:
    """`peer` says that what `accused` sent it does not decode. `state`: that it is not the state that it should be."""

    peer: str
    accused: str
    reason: str
    state: bool = False


@dataclass(frozen=True, slots=True)
class LostTrack:
    """What `peer` misses of its stage nobody keeps any more. `view`: the newest that it acts on; 0: unknown."""

    peer: str
    reason: str
    view: int = 0


@dataclass(frozen=True, slots=True)
class Irreplaceable:
    """What a neighbour of `peer` needs of `step` went down with lost peers: that step cannot be ended. By `epoch`."""

    peer: str
    epoch: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The run is to stop soon, at a step that all stages have. `failed` if its owner did not ask for it."""

    reason: str = "stopped as asked"
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. To be fed about every second."""


Event = (
    JoinAsked | Heard | LinkBroken | Left | Failed | Expelled | LeaveAsked | Differs | Accused | LostTrack
    | Irreplaceable | StopAsked | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Admit:
    """Tell `peer` that it is in, and send it `Membership.view_for(peer)` if there is one."""

    peer: str


@dataclass(frozen=True, slots=True)
class TurnAway:
    """Tell `peer` that it is not in, or not any more, and why."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Issue:
    """Store `view`, then sign it, put it into the DHT and send it to each member that `view_for` gives it to."""

    view: View
    reason: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A person should know this. It is said once, when it changes."""

    text: str


@dataclass(frozen=True, slots=True)
class Release:
    """Tell `peer` that it may go: nothing depends on it any more, or it has waited long enough."""

    peer: str


@dataclass(frozen=True, slots=True)
class End:
    """The run is over after `step`."""

    step: int
    failed: bool
    reason: str


Effect = Admit | TurnAway | Issue | Notice | Release | End


def short_peer(peer: str) -> str:
    """A peer id's last eight characters: its first ones are alike in all."""
    return peer[-8:]

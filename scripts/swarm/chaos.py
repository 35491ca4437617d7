"""One disturbed run: begun, disturbed, ended, compared, and nothing left."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peers.cli.common import INTERRUPTED
from protocol.errors import IsthmusError, NetworkError
from swarm.compare import Comparison, compare
from swarm.director import Director, Done
from swarm.prepared import Prepared
from swarm.processes import COORDINATOR, Swarm, last_line
from swarm.script import Act
from swarm.timing import Loss, losses
from swarm.traces import traces


@dataclass(slots=True)
class Outcome:
    """How a disturbed run went. `wrong` is empty if all is as it must be."""

    seconds: float
    wrong: list[str]
    comparison: Comparison
    done: list[Done] = field(default_factory=list)
    undone: tuple[Act, ...] = ()
    losses: list[Loss] = field(default_factory=list)
    events: list[dict[str, object]] = field(default_factory=list)

    def count(self, kind: str) -> int:
        """How many events of a kind the coordinator noted."""
        return sum(event["kind"] == kind for event in self.events)


def disturb(
    prepared: Prepared,
    root: Path,
    acts: Sequence[Act],
    faults: Mapping[str, str],
    last_step: int,
    seconds: float,
) -> Outcome:
    """Run the prepared swarm in `root` to `last_step`, with `faults` of its first replicas, while `acts` are done.

    Args:
        seconds: the most that it may take.
    """
    began, wrong = time.monotonic(), []
    prepared.copy_to(root)
    with Swarm(root, len(prepared.replicas), last_step) as swarm:
        director = Director(swarm, seconds)
        try:
            swarm.start(COORDINATOR)
            for name in prepared.replicas:
                swarm.start(name, *(["--fault", faults[name]] if name in faults else []))
            director.direct(acts)
            wrong += _wrong_ends(director, faults)
        except IsthmusError as error:
            wrong.append(str(error))
    found = compare(swarm.folder, root / "peers", prepared.undisturbed, prepared.config.pipeline.stages, last_step)
    wrong += found.wrong + traces(swarm.mark, director.sockets, root)
    events = list(swarm.folder.noted())
    return Outcome(time.monotonic() - began, wrong, found, director.done, director.undone, losses(director), events)


def _wrong_ends(director: Director, faults: Mapping[str, str]) -> list[str]:
    """Whoever was left alone must have ended well, and who was asked to go as one that was asked to."""
    swarm, ends = director.swarm, {"kill": -signal.SIGKILL, "gone": -signal.SIGKILL, "interrupt": INTERRUPTED}
    last = {done.act.subject: done for done in director.done}
    found = []
    for name, process in swarm.running.items():
        code, done = process.returncode, last.get(name)
        late = code == NetworkError.exit_code and done is not None and not _joined_since(swarm, name, done.time)
        by_fault = code == -signal.SIGKILL and name in faults
        if code != ends.get(done.act.verb if done else "", 0) and not late and not by_fault:
            found.append(f"{name} ended with {code}: {last_line(swarm.log(name))}")
    return found


def _joined_since(swarm: Swarm, name: str, time: float) -> bool:
    """Whether it got in. Who came when the run had ended could not."""
    peer = swarm.peer_id(name)
    return any(
        event["kind"] == "join" and event["peer"] == peer and event["time"] > time for event in swarm.folder.noted()
    )

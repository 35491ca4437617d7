"""A swarm with one hostile process in it, and what must hold: no honest peer is crashed, blamed or turned away, the
result is the undisturbed run's, and honest steps per second stay at least half.

The measure of the steps is the same swarm with nobody hostile in it, run just before. On a machine whose cores all
processes share, what the hostile one computes for itself is taken from the others too; half allows for that.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import IsthmusError
from swarm.compare import compare
from swarm.director import Director
from swarm.prepared import Prepared
from swarm.processes import COORDINATOR, REPOSITORY, Swarm, last_line, wait_until
from swarm.script import Act
from swarm.traces import traces

FIRST, LAST = 5, 180  # steps after the beginning: when it comes, and when the run ends
LEAST_PART = 0.5  # of the undisturbed steps per second
MOST_LOG_BYTES = 2_000_000  # of one honest process
MOST_DESCRIPTORS, MOST_MEMORY = 400, 700_000_000  # of the coordinator's process: descriptors, resident bytes
CASE_SECONDS = 900.0
END_SECONDS = 20.0
_FOREIGN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@dataclass(slots=True)
class Verdict:
    """How it went. `wrong` is empty if all is as it must be.

    Attributes:
        pace: honest steps per second while harm was done; None: too few steps to tell.
        descriptors, memory: the coordinator's most.
        log_bytes: of the honest process that logged most.
        refused: how often the hostile one was turned away.
    """

    wrong: list[str] = field(default_factory=list)
    pace: float | None = None
    descriptors: int = 0
    memory: int = 0
    log_bytes: int = 0
    refused: int = 0


class HostileProcess:
    """The hostile process of one case, or nobody."""

    def __init__(self, swarm: Swarm, name: str | None) -> None:
        self.folder = swarm.root / "hostile"
        self._log = swarm.root / "logs" / "hostile.txt"
        self._swarm, self._name = swarm, name
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Let it come."""
        if self._name is None:
            return
        self.folder.mkdir()
        invite = self._swarm.folder.invite.read_text().strip()
        paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "scripts")])
        own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ISTHMUS_SWARM": self._swarm.mark}
        command = [sys.executable, "-P", "-m", "swarm.hostile_process", invite, str(self.folder), self._name]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | own, start_new_session=True
            )

    @property
    def began(self) -> float | None:
        """When it began to do harm, in seconds since the epoch; None: not yet."""
        mark = self.folder / "began"
        return mark.stat().st_ctime if mark.exists() else None

    def end(self) -> None:
        """End it."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def endure(prepared: Prepared, root: Path, name: str | None, usual: float | None) -> Verdict:
    """Run the prepared swarm in `root` beside the hostile act called `name`; None: beside nobody.

    Args:
        usual: steps per second of the same swarm beside nobody; None: not to be compared.
    """
    verdict = Verdict()
    every, first = prepared.config.checkpoint.every, prepared.first_step
    last_step = (first + LAST) // every * every
    prepared.copy_to(root)
    with Swarm(root, len(prepared.replicas), last_step) as swarm:
        director, hostile = _Watcher(swarm, CASE_SECONDS, verdict=verdict), HostileProcess(swarm, name)
        try:
            swarm.start(COORDINATOR)
            for replica in prepared.replicas:
                swarm.start(replica)
            honest = dict(_identities(swarm, prepared.replicas))
            director.perform(Act("step", str(first + FIRST)))
            came = time.time()
            hostile.start()
            director.direct([])
            verdict.pace = _pace(director.rows, came if name is None else hostile.began)
            verdict.wrong += _wrong_ends(swarm)
            verdict.wrong += _blamed(swarm, honest, verdict)
        except IsthmusError as error:
            verdict.wrong.append(str(error))
        finally:
            hostile.end()
    found = compare(swarm.folder, root / "peers", prepared.undisturbed, prepared.config.pipeline.stages, last_step)
    verdict.wrong += found.wrong + traces(swarm.mark, director.sockets, root)
    _judge_limits(verdict, swarm, name, usual)
    return verdict


class _Watcher(Director):
    """A director that notes what the coordinator's process takes."""

    def __init__(self, swarm: Swarm, seconds: float, verdict: Verdict) -> None:
        super().__init__(swarm, seconds)
        self._verdict = verdict

    def perform(self, act: Act) -> None:
        """Do one act."""
        self._perform(act)

    def look(self) -> None:
        """See `Director.look`."""
        super().look()
        process = Path(f"/proc/{self.swarm.running[COORDINATOR].pid}")
        try:
            self._verdict.descriptors = max(self._verdict.descriptors, len(list((process / "fd").iterdir())))
            pages = int((process / "statm").read_text().split()[1])
        except OSError:
            return
        self._verdict.memory = max(self._verdict.memory, pages * os.sysconf("SC_PAGE_SIZE"))


def _identities(swarm: Swarm, replicas: Sequence[str]) -> list[tuple[str, str]]:
    """The peer id of each honest peer, and its name."""
    found: Callable[[], bool] = lambda: all(swarm.peer_id(name) for name in replicas)  # noqa: E731
    wait_until(found, "the identities of the peers", CASE_SECONDS)
    return [(swarm.peer_id(name), name) for name in replicas]


def _pace(rows: Sequence[tuple[float, int]], since: float | None) -> float | None:
    """Steps per second after `since`."""
    later = [] if since is None else [row for row in rows if row[0] >= since]
    if len(later) < 2 or later[-1][0] <= later[0][0]:
        return None
    return (later[-1][1] - later[0][1]) / (later[-1][0] - later[0][0])


def _wrong_ends(swarm: Swarm) -> list[str]:
    ends = {name: process.returncode for name, process in swarm.running.items()}
    return [f"{name} ended with {code}: {last_line(swarm.log(name))}" for name, code in ends.items() if code]


def _blamed(swarm: Swarm, honest: dict[str, str], verdict: Verdict) -> list[str]:
    """Honest peers that lost their place, by the coordinator's own record."""
    wrong = []
    for event in swarm.folder.noted():
        peer, text = str(event.get("peer", "")), str(event["text"])
        if event["kind"] == "turned_away":
            verdict.refused += peer not in honest
            if peer in honest:
                wrong.append(f"honest {honest[peer]} was turned away: {text}")
        if event["kind"] == "view":
            wrong += [f"honest {name} lost its place: {text}" for id_, name in honest.items() if _out(text, id_)]
        if event["kind"] == "mistake":
            wrong.append(f"the coordinator met a mistake of its own: {text}")
    return wrong


def _out(text: str, peer: str) -> bool:
    return re.search(rf"peer {re.escape(peer[-8:])} of stage \d+(, peer [^:]*)? (is out|starts anew)", text) is not None


def _judge_limits(verdict: Verdict, swarm: Swarm, name: str | None, usual: float | None) -> None:
    logs = {other: swarm.log(other) for other in swarm.running}
    verdict.log_bytes = max(map(len, logs.values()))
    if verdict.log_bytes > MOST_LOG_BYTES:
        verdict.wrong.append(f"an honest process wrote {verdict.log_bytes:,} bytes of log")
    if verdict.descriptors > MOST_DESCRIPTORS or verdict.memory > MOST_MEMORY:
        verdict.wrong.append(f"the coordinator had {verdict.descriptors} descriptors, {verdict.memory:,} bytes")
    wrong = [other for other, text in logs.items() if _FOREIGN.search(text)]
    if wrong:
        verdict.wrong.append(f"control characters in what {', '.join(wrong)} said")
    if name is None or usual is None:
        return
    if verdict.pace is None:
        verdict.wrong.append("the hostile process never did its harm, or the run ended before")
    elif verdict.pace < LEAST_PART * usual:
        verdict.wrong.append(f"{verdict.pace:.2f} steps/s beside it, {usual:.2f} without: less than half")

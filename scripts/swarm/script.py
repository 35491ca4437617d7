"""What is done to a swarm, as text: acts in their order, each waiting for the one before it.

    step 20                 until the row of step 20 is written
    wait 5                  that many seconds
    gone NAME               until its process has ended by itself (by a fault)
    stopped NAME            until it stands still by itself (by a fault)
    kill NAME               SIGKILL
    stop NAME               SIGSTOP
    continue NAME           SIGCONT
    interrupt NAME          SIGINT, as by Ctrl-C
    start NAME [FAULT]      start it with the folder it had, or with a new one if it never was
    renew NAME [FAULT]      start it with an empty folder, as somebody else

NAME is `coordinator`, one of the first replicas (`0a`: of stage 0), or any other name for a newcomer. An example:
"step 20; kill 0a; wait 5; start 0a". Pure.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import UserError

WITH_NUMBER = ("step", "wait")
WITH_NAME = ("gone", "stopped", "kill", "stop", "continue", "interrupt")
WITH_FAULT = ("start", "renew")

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


@dataclass(frozen=True, slots=True)
class Act:
    """One act: `subject` is a name or a number, `fault` that of a peer that is started."""

    verb: str
    subject: str
    fault: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.verb, self.subject, self.fault) if part)

    @property
    def is_deed(self) -> bool:
        """Whether it changes anything."""
        return self.verb not in ("step", "wait")

    def makes_good(self, replicas: Sequence[str]) -> bool:
        """Whether a run in which it is left out, for it has ended, was disturbed all the same."""
        returns = self.verb == "start" and self.subject in (*replicas, "coordinator")
        return returns or self.verb in ("wait", "continue")


def parse_script(text: str) -> list[Act]:
    """The acts that `text` means.

    Raises:
        UserError: one of them is none.
    """
    return [_parse(line.strip()) for line in re.split(r"[;\n]", text) if line.strip()]


def format_script(acts: Sequence[Act]) -> str:
    """Reads back equal."""
    return "; ".join(map(str, acts))


def _parse(text: str) -> Act:
    verb, *rest = text.split()
    if verb in WITH_NUMBER and len(rest) == 1 and re.fullmatch(r"\d+(\.\d+)?", rest[0]):
        return Act(verb, rest[0])
    named = bool(rest) and _NAME.fullmatch(rest[0]) is not None
    if named and ((verb in WITH_NAME and len(rest) == 1) or (verb in WITH_FAULT and len(rest) <= 2)):
        return Act(verb, *rest)
    verbs = ", ".join((*WITH_NUMBER, *WITH_NAME, *WITH_FAULT))
    raise UserError(f"expected an act, one of {verbs} with what it needs, got {text!r}")


def plan(seed: int, replicas: Sequence[str], first_step: int, last_step: int, every: int) -> list[Act]:
    """A disturbance each `every` steps or so, from `seed`.

    Each one is made good before the next begins, so that no stage is ever without hope: somebody always has its state
    in a file and comes back. One of them takes all replicas of a stage at once.
    """
    dice = random.Random(seed)
    kinds = [_killed, _renewed, _stopped, _coordinator, _stage, _joined]
    dice.shuffle(kinds)
    acts: list[Act] = []
    for index, step in enumerate(range(first_step + every // 2, last_step - every, every)):
        acts.append(Act("step", str(step + dice.randrange(max(1, every // 2)))))
        acts += kinds[index % len(kinds)](dice, replicas, index)
    return acts


def _pause(dice: random.Random, least: float, most: float) -> Act:
    return Act("wait", f"{dice.uniform(least, most):.1f}")


def _killed(dice: random.Random, replicas: Sequence[str], _: int) -> list[Act]:
    name = dice.choice(replicas)
    return [Act("kill", name), _pause(dice, 0, 20), Act("start", name)]


def _renewed(dice: random.Random, replicas: Sequence[str], _: int) -> list[Act]:
    name = dice.choice(replicas)
    return [Act("kill", name), _pause(dice, 0, 20), Act("renew", name)]


def _stopped(dice: random.Random, replicas: Sequence[str], _: int) -> list[Act]:
    name = dice.choice(replicas)
    return [Act("stop", name), _pause(dice, 1, 30), Act("continue", name)]


def _coordinator(dice: random.Random, replicas: Sequence[str], _: int) -> list[Act]:
    kill, start = Act("kill", "coordinator"), Act("start", "coordinator")
    if dice.random() < 0.5:
        return [kill, _pause(dice, 0, 10), start]
    name = dice.choice(replicas)
    return [kill, Act("kill", name), _pause(dice, 0, 10), start, _pause(dice, 0, 10), Act("start", name)]


def _stage(dice: random.Random, replicas: Sequence[str], _: int) -> list[Act]:
    stage = dice.choice(sorted({name[:-1] for name in replicas}))
    names = [name for name in replicas if name[:-1] == stage]
    back = dice.choice(names)
    kills = [act for name in names for act in (Act("kill", name), _pause(dice, 0, 1))]
    return [*kills, _pause(dice, 0, 15), Act("start", back), *(Act("renew", n) for n in names if n != back)]


def _joined(dice: random.Random, _: Sequence[str], index: int) -> list[Act]:
    return [Act("start", f"new-{index}"), _pause(dice, 10, 25), Act("kill", f"new-{index}")]

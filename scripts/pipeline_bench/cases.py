"""What is compared, and over which links. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from protocol.config import RunConfig
from protocol.errors import UserError

Kind = Literal["isthmus", "hivemind", "torch"]


@dataclass(frozen=True, slots=True)
class Link:
    """Every home's line: Mbit/s each way (None: as fast as the machine), milliseconds from a home to another."""

    name: str
    mbit: float | None
    delay_ms: float

    def __str__(self) -> str:
        return "unlimited" if self.mbit is None else f"{self.mbit:g} Mbit/s + {self.delay_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train.

    Attributes:
        variant: what its kind makes of it: the boundary, the client, the schedule.
    """

    name: str
    kind: Kind
    variant: str
    title: str


LINKS = (Link("unlimited", None, 0.0), Link("200", 200.0, 50.0), Link("80", 80.0, 50.0))
ARMS = (
    Arm("isthmus", "isthmus", "default", "Isthmus, the default codec"),
    Arm("isthmus-dense", "isthmus", "dense", "Isthmus, dense bf16"),
    Arm("torch-1f1b", "torch", "1f1b", "torch pipelining over gloo, 1F1B, bf16"),
    Arm("torch-gpipe", "torch", "gpipe", "torch pipelining over gloo, GPipe, bf16"),
    Arm("hivemind-threads", "hivemind", "threads", "hivemind chain, all microbatches in flight"),
    Arm("hivemind-serial", "hivemind", "serial", "hivemind chain, one microbatch after another"),
)
CHAINS = ("hivemind-serial", "hivemind-threads")  # what the others are compared with


def choose_arms(names: Sequence[str]) -> list[Arm]:
    """The arms of these names, in the order of the table; all for none.

    Raises:
        UserError: there is no such arm.
    """
    _refuse_unknown("arm", names, [arm.name for arm in ARMS])
    return [arm for arm in ARMS if not names or arm.name in names]


def choose_links(names: Sequence[str]) -> list[Link]:
    """The links of these names; all for none.

    Raises:
        UserError: there is no such link.
    """
    _refuse_unknown("link", names, [link.name for link in LINKS])
    return [link for link in LINKS if not names or link.name in names]


def _refuse_unknown(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"expected --{what} of {', '.join(known)}, got {name!r}")


def derive(config: RunConfig, dense: bool, steps: int, microbatches: int | None = None) -> RunConfig:
    """`config` for `steps` steps of a comparison: the same model and microbatches, with no checkpoint under way.

    Args:
        dense: the plain model, whose whole stream crosses in bfloat16: no frozen and no stage embeddings, since what
            hivemind and torch send is the stream and nothing else.
    """
    values = config.model_dump()
    train: dict[str, Any] = values["train"]
    train |= {"steps": steps, "warmup_steps": min(train["warmup_steps"], steps - 1)}
    if microbatches is not None:
        train["microbatches"] = microbatches
    values["checkpoint"] |= {"every": steps + 1, "copies": 0}
    if dense:
        values["boundary"] = {
            "form": "none", "codec": "bfloat16", "fixed_embedding": False, "stage_embeddings": False,
        }  # fmt: skip
    return RunConfig.model_validate(values)

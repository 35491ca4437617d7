"""All hostile acts, by name."""

from __future__ import annotations

from swarm import hostile_members, hostile_strangers
from swarm.hostile_act import HostileAct

HOSTILE_ACTS: dict[str, HostileAct] = {act.name: act for act in (*hostile_members.ACTS, *hostile_strangers.ACTS)}

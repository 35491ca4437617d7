"""A laboratory's TOML file: where the peers live, and what their lines are like.

[home]              the line of every home that says nothing else
up_mbit = 80
down_mbit = 80
delay_ms = 25       one way, to the hub: two such homes are 50 ms apart, 100 ms there and back

[[homes]]           the homes of the peers in their order, in what they differ from [home]
nat = true

[coordinator]       the coordinator's home, in what it differs from [home]

[[changes]]         what becomes of a line while the laboratory runs
after_seconds = 60
home = 1            the second peer's; or "coordinator", or "all"
up_mbit = 40
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from peers.addresses import parts
from peers.config_file import read_toml
from peers.lab.access import BYTES_PER_SECOND, Access
from peers.lab.link_model import LinkModel
from protocol.errors import ConfigError, UserError
from protocol.section import Section, parse_section

Place = int | Literal["coordinator"]

COORDINATOR: Literal["coordinator"] = "coordinator"
NETWORK = "10.77"  # the first half of every address in a laboratory; the third number is the laboratory's
MOST_HOMES = 240
MEMORY_NAME = "peer-"  # and its number: what a peer is called that has no address but a name
_FIRST_HOST = 10  # the last number of the first peer's address; the coordinator's is 1


class Line(Section):
    """What can be changed of a line while it is used."""

    up_mbit: float = Field(0.0, ge=0, description="rate from the home to the hub, IP headers included; 0: no limit")
    down_mbit: float = Field(0.0, ge=0, description="rate from the hub to the home; 0: no limit")
    delay_ms: float = Field(0.0, ge=0, le=10_000, description="one way between home and hub, each way")
    jitter_ms: float = Field(0.0, ge=0, le=10_000, description="up to so much more, ever changing; nothing overtakes")
    loss: float = Field(0.0, ge=0, lt=1, description="the fraction of packets that each way of the line loses")


class Home(Line):
    """Where a peer, or the coordinator, lives."""

    buffer_kib: int = Field(1024, ge=4, description="what can wait at each end of the line before packets are dropped")
    nat: bool = Field(False, description="whether only who was called from here can send to here")

    def access(self, seed: int) -> Access:
        """Its line, with nothing on it yet."""
        both = [LinkModel(buffer_bytes=self.buffer_kib * 1024, seed=2 * seed + way) for way in (0, 1)]
        access = Access(*both)
        access.change({name: getattr(self, name) for name in Line.model_fields})
        return access


class Change(Line):
    """What becomes of a line. What is not said stays."""

    after_seconds: float = Field(ge=0, description="since the laboratory was opened")
    home: int | Literal["coordinator", "all"] = Field(description='a peer\'s number from 0, or "coordinator", or "all"')

    @model_validator(mode="after")
    def _changes_something(self) -> Change:
        if not self.line:
            raise ValueError(f"expected what to change of home {self.home}: one of {', '.join(Line.model_fields)}")
        return self

    @property
    def line(self) -> dict[str, float]:
        """Only what is said of the line."""
        said = self.model_fields_set & set(Line.model_fields)
        return {name: getattr(self, name) for name in Line.model_fields if name in said}


class LabFile(Section):
    """A whole laboratory."""

    home: Home = Field(Home(), description="the home of all who have no other")
    homes: list[Home] = Field([], max_length=MOST_HOMES, description="the peers' homes, in what they differ from it")
    coordinator: Home = Field(Home(), description="the coordinator's home, in what it differs from it")
    changes: list[Change] = Field([], description="what becomes of lines while the laboratory runs")
    seed: int = Field(0, ge=0, description="of losses and jitter")

    def at(self, place: Place) -> Home:
        """The home at `place`: a peer's number, or "coordinator"."""
        own = self.coordinator if place == COORDINATOR else dict(enumerate(self.homes)).get(place, Home())
        return self.home.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})

    def home_of(self, addresses: Iterable[str]) -> Home | None:
        """The home of the peer that announces `addresses`; None if they are not of a laboratory, or there are none."""
        places = [place for address in addresses if (place := place_of(address)) is not None]
        return self.at(places[0]) if places else None

    def one_way_seconds(self, one: Place, other: Place) -> float:
        """How long a packet travels between two homes, without queues and jitter."""
        return (self.at(one).delay_ms + self.at(other).delay_ms) / 1e3

    def bytes_per_second(self, source: Place, destination: Place) -> float | None:
        """The most that gets from one home to another, IP headers included; None: no limit."""
        rates = [mbit * BYTES_PER_SECOND for mbit in (self.at(source).up_mbit, self.at(destination).down_mbit) if mbit]
        return min(rates, default=None)


def places(homes: int) -> Iterator[Place]:
    """The coordinator's place, and those of so many peers."""
    yield COORDINATOR
    yield from range(homes)


def address_at(laboratory: int, place: Place) -> str:
    """The address of `place` in the laboratory of that number."""
    host = 1 if place == COORDINATOR else _FIRST_HOST + place
    return f"{NETWORK}.{laboratory}.{host}"


def place_of(address: str) -> Place | None:
    """Whose multiaddress in a laboratory it is; None: nobody's. In memory: /memory/peer-N/..."""
    words = address.split("/")
    if words[1:2] == ["memory"] and len(words) > 2:
        number = words[2].removeprefix(MEMORY_NAME)
        return COORDINATOR if words[2] == COORDINATOR else int(number) if number.isdecimal() else None
    host = parts(address).get("ip4", "")
    if not host.startswith(f"{NETWORK}."):
        return None
    last = int(host.rsplit(".", 1)[1])
    return COORDINATOR if last == 1 else last - _FIRST_HOST


def parse_place(text: str) -> Place:
    """
    Raises:
        UserError: `text` is neither a peer's number nor "coordinator".
    """
    if text == COORDINATOR:
        return COORDINATOR
    if not text.isdecimal():
        raise UserError(f'expected a home: a peer\'s number from 0, or "coordinator", got {text!r}')
    return int(text)


def read_lab(path: Path) -> LabFile:
    """The laboratory in the file at `path`.

    Raises:
        ConfigError: no such file, not TOML, an unknown key (the nearest known one is suggested), or a wrong value.
    """
    return parse_lab(read_toml(path, "a laboratory's TOML file, such as labs/home-80.toml,"), str(path))


def parse_lab(values: dict[str, Any], origin: str) -> LabFile:
    """The laboratory in `values`; see `read_lab`."""
    lab = parse_section(LabFile, values, origin, "laboratory")
    for change in lab.changes:
        if isinstance(change.home, int) and not 0 <= change.home < MOST_HOMES:
            raise ConfigError(f"{origin}: expected changes.home of 0 to {MOST_HOMES - 1}, got {change.home}")
    return lab

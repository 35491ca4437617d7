"""A laboratory's file: who lives where, and what is said to whom makes a mistake in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.lab.device import HEADER_BYTES, MOST_BYTES, bytes_on_line, largest_bundle
from peers.lab.lab_file import COORDINATOR, LabFile, address_at, parse_lab, parse_place, place_of, read_lab
from peers.lab.meeting import check_meeting
from peers.lab.namespaces import MTU_BYTES
from peers.lab.nat import UDP_SECONDS, Nat
from protocol.errors import ConfigError, UserError

LABS = Path(__file__).resolve().parents[2] / "labs"
PLAIN = {"up_mbit": 80, "down_mbit": 80, "delay_ms": 25}


def lab(**values: Any) -> LabFile:
    return parse_lab(values, "lab.toml")


@pytest.mark.parametrize("path", sorted(LABS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_labs_that_come_along_are_read_and_their_peers_can_meet(path: Path) -> None:
    assert check_meeting(read_lab(path), stages=4, peers=4) is None


def test_home_80_is_what_its_name_says() -> None:
    found = read_lab(LABS / "home-80.toml")
    assert found.bytes_per_second(0, 1) == 10e6 and found.one_way_seconds(0, 1) == 0.05


def test_a_home_differs_from_the_default_in_what_it_says() -> None:
    found = lab(home=PLAIN, homes=[{"up_mbit": 40}, {"nat": True}], coordinator={"delay_ms": 5})
    assert (found.at(0).up_mbit, found.at(0).down_mbit, found.at(0).nat) == (40, 80, False)
    assert (found.at(1).up_mbit, found.at(1).nat) == (80, True)
    assert found.at(7) == found.home and found.at(COORDINATOR).delay_ms == 5
    assert found.bytes_per_second(0, 1) == 5e6 and found.bytes_per_second(1, 0) == 10e6
    assert lab().bytes_per_second(0, 1) is None


def test_peers_are_found_by_their_addresses() -> None:
    found = lab(home=PLAIN, homes=[{}, {"up_mbit": 40}])
    for place in (COORDINATOR, 0, 1, 239):
        assert place_of(f"/ip4/{address_at(3, place)}/tcp/5/p2p/Qm") == place
    assert found.home_of([f"/ip4/{address_at(9, 1)}/tcp/31330/p2p/Qm"]) == found.at(1)
    assert found.home_of(["/memory/peer-1/p2p/peer-1"]) == found.at(1)
    assert found.home_of(["/memory/coordinator/p2p/coordinator"]) == found.at(COORDINATOR)
    assert (
        found.home_of([]) is None and found.home_of(["/ip4/127.0.0.1/tcp/5", "/memory/x/p2p/x", "", "/memory"]) is None
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"home": {"up_mbits": 80}}, r"lab.toml: unknown key 'home.up_mbits': did you mean 'up_mbit'\?"),
        ({"homes": [{}, {"delay": 5}]}, r"unknown key 'homes.1.delay': did you mean 'delay_ms'\?"),
        ({"hom": {}}, r"unknown key 'hom': did you mean 'home'\?"),
        ({"home": {"loss": 1.0}}, r"home.loss: .* less than 1, got 1.0"),
        ({"home": {"up_mbit": -1}}, r"home.up_mbit: .* got -1"),
        ({"home": {"nat": "yes"}}, r"home.nat: .* got 'yes'"),
        ({"changes": [{"after_seconds": 1, "home": 0}]}, r"expected what to change of home 0: one of up_mbit, "),
        ({"changes": [{"after_seconds": 1, "home": 999, "loss": 0.1}]}, r"expected changes.home of 0 to 239, got 999"),
        ({"changes": [{"home": 0, "up_mbit": 5}]}, r"changes.0.after_seconds: field required"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_lab(values, "lab.toml")


def test_a_file_that_is_not_there_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a laboratory's TOML file, such as labs/home-80.toml, at "):
        read_lab(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[home")
    with pytest.raises(ConfigError, match="expected TOML in"):
        read_lab(tmp_path / "bad.toml")


def test_a_change_says_only_what_it_changes() -> None:
    found = lab(home=PLAIN, changes=[{"after_seconds": 5, "home": "all", "up_mbit": 40, "loss": 0.0}])
    assert found.changes[0].line == {"up_mbit": 40, "loss": 0.0}
    access = found.at(0).access(0)
    access.change(found.changes[0].line)
    assert (access.up.bytes_per_second, access.down.bytes_per_second, access.up.delay) == (5e6, 10e6, 0.025)


def test_places() -> None:
    assert parse_place("coordinator") == COORDINATOR and parse_place("12") == 12
    for text in ("", "-1", "first", "1.5"):
        with pytest.raises(UserError, match="expected a home: a peer's number"):
            parse_place(text)


def test_who_can_never_meet_is_told_so() -> None:
    hidden = lab(homes=[{"nat": True}] * 3)
    with pytest.raises(UserError, match=r"at most 2 peers behind a NAT with 4 stages, got 3 \(homes 0, 1, 2\)"):
        check_meeting(hidden, 4, 4)
    assert check_meeting(hidden, 5, 5) is None
    assert "homes 0, 1, 2 are behind a NAT" in (check_meeting(hidden, 5, 10) or "")
    with pytest.raises(UserError, match="expected a coordinator that peers can reach"):
        check_meeting(lab(home={"nat": True}), 1, 1)


def test_bundles_are_short_on_the_slowest_line_and_none_are_where_packets_are_lost() -> None:
    assert largest_bundle(lab(), 4) == MOST_BYTES
    assert largest_bundle(lab(home=PLAIN), 4) == 12_000
    assert largest_bundle(lab(home=PLAIN, coordinator={"up_mbit": 1}), 4) == MTU_BYTES
    assert largest_bundle(lab(home=PLAIN, homes=[{"loss": 0.1}]), 4) == MTU_BYTES
    assert largest_bundle(lab(home=PLAIN, changes=[{"after_seconds": 1, "home": 0, "loss": 0.1}]), 4) == MTU_BYTES


def tcp(
    source: str = "10.0.0.1", target: str = "10.0.0.2", ports: tuple[int, int] = (1000, 2000), kind: int = 6
) -> bytes:
    """A packet without content: 20 bytes of IPv4's header, 32 of TCP's."""
    addresses = b"".join(bytes(map(int, address.split("."))) for address in (source, target))
    ip = bytes([0x45, 0, 0, 0, 0, 0, 0, 0, 64, kind, 0, 0]) + addresses
    return ip + b"".join(port.to_bytes(2, "big") for port in ports) + bytes(8) + bytes([8 << 4]) + bytes(19)


def test_a_bundle_counts_with_the_headers_of_all_its_segments() -> None:
    plain, bundle = bytes(HEADER_BYTES), bytes([0, 1, 0, 0]) + (1448).to_bytes(2, "little") + bytes(4)
    assert bytes_on_line(plain + tcp() + bytes(1448)) == 1500
    assert bytes_on_line(bundle + tcp() + bytes(1448)) == 1500
    assert bytes_on_line(bundle + tcp() + bytes(3 * 1448)) == 4500
    assert bytes_on_line(bundle + tcp() + bytes(3 * 1448 + 1)) == 4500 + 53


def test_a_nat_lets_in_answers_only() -> None:
    nat = Nat()
    call = tcp()
    answer = tcp("10.0.0.2", "10.0.0.1", (2000, 1000))
    assert not nat.lets_in(answer, 0.0)
    nat.sent(call, 1.0)
    assert nat.lets_in(answer, 1.0) and nat.lets_in(answer, 5000.0)
    assert not nat.lets_in(tcp("10.0.0.2", "10.0.0.1", (2001, 1000)), 1.0), "another port"
    assert not nat.lets_in(tcp("10.0.0.3", "10.0.0.1", (2000, 1000)), 1.0), "another machine"
    assert not nat.lets_in(tcp("10.0.0.2", "10.0.0.1", (2000, 1000), kind=17), 1.0), "another protocol"


def test_a_nat_forgets_flows_of_udp() -> None:
    nat, answer = Nat(), tcp("10.0.0.2", "10.0.0.1", (2000, 1000), kind=17)
    nat.sent(tcp(kind=17), 0.0)
    assert nat.lets_in(answer, UDP_SECONDS) and nat.lets_in(answer, 2 * UDP_SECONDS)
    assert not nat.lets_in(answer, 4 * UDP_SECONDS)

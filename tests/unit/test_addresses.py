"""Which addresses are well formed, and which of them another machine could dial."""

import pytest

from peers.addresses import (
    check_announced,
    check_listen,
    every_address,
    for_others,
    has_way_to,
    host_of,
    loopback_of,
    parts,
    reachable_from,
    usable,
)
from protocol.errors import UserError

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
LONGEST_NAME = ".".join(["a" * 63] * 3 + ["a" * 61])


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/1.2.3.4/tcp/5",
        "/ip4/1.2.3.4/udp/65535/quic",
        "/ip6/2001:db8::1/tcp/5",
        "/ip6/::ffff:1.2.3.4/tcp/5",
        "/dns/localhost/tcp/5",
        "/dns4/peer-1.EXAMPLE.org/tcp/31330",
        "/dns6/xn--mller-kva.example/tcp/5/ws",
        f"/dns4/{LONGEST_NAME}/tcp/5",
        f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}",
        f"/ip4/1.2.3.4/udp/5/quic-v1/p2p/{PEER}",
    ],
)
def test_usable(address: str) -> None:
    assert usable([address]) == [address]
    check_announced([address])
    assert parts(address).get("p2p") == (PEER if PEER in address else None)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/",
        "1.2.3.4:5",
        "/ip4/1.2.3.4",
        "/ip4/999.1.1.1/tcp/5",
        "/ip4/1.2.3/tcp/5",
        "/ip4//tcp/5",
        "/ip4/::1/tcp/5",
        "/ip4/example.org/tcp/5",
        "/ip6/1.2.3.4/tcp/5",
        "/ip6/fe80::1%eth0/tcp/5",
        "/ip6/12345::/tcp/5",
        "/ip4/0.0.0.0/tcp/5",
        "/ip6/::ffff:0.0.0.0/tcp/5",
        "/ip4/224.0.0.1/tcp/5",
        "/ip4/255.255.255.255/tcp/5",
        "/ip6/ff02::1/tcp/5",
        "/ip6/::/tcp/5",
        "/ip6/0:0:0:0:0:0:0:0/tcp/5",
        "/ip4/1.2.3.4/tcp/0",
        "/ip4/1.2.3.4/tcp/65536",
        "/ip4/1.2.3.4/tcp/-1",
        "/ip4/1.2.3.4/tcp/٣",
        "/ip4/1.2.3.4/tcp/" + "9" * 5000,
        "/ip4/1.2.3.4/sctp/5",
        "/ip4/1.2.3.4/tcp/5/nonsense",
        "/ip4/1.2.3.4/tcp/5/",
        f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}/p2p-circuit/p2p/{PEER}",
        "/unix/tmp/socket/tcp/5",
        "/dns4//tcp/5",
        "/dns4/a b/tcp/5",
        "/dns4/a_b/tcp/5",
        "/dns4/-a/tcp/5",
        "/dns4/a-/tcp/5",
        "/dns4/a..b/tcp/5",
        "/dns4/ab--c/tcp/5",
        "/dns4/a\n/tcp/5",
        "/dns4/müller.example/tcp/5",
        f"/dns4/{'a' * 64}/tcp/5",
        f"/dns4/{LONGEST_NAME}a/tcp/5",
    ],
)
def test_not_usable(address: str) -> None:
    good = "/ip4/1.2.3.4/tcp/5"
    assert usable([address, good]) == [good]
    with pytest.raises(UserError, match="expected an address to announce"):
        check_announced([address])


def test_loopback_is_told_only_where_there_is_nothing_else() -> None:
    here, there = "/ip4/127.0.0.1/tcp/5", "/dns4/example.org/tcp/5"
    assert for_others([here, there]) == [there]
    assert for_others([here]) == [here]


def test_a_malformed_address_to_listen_on_is_the_users_mistake() -> None:
    for address in ("/ip4/999.1.1.1/tcp/5", "/dns4/localhost/tcp/5", "nonsense"):
        with pytest.raises(UserError, match="expected an address to listen on"):
            check_listen([address])


def at(*hosts: str) -> list[str]:
    return [f"/ip{6 if ':' in host else 4}/{host}/tcp/5" for host in hosts]


GLOBAL4, GLOBAL6, PRIVATE4, PRIVATE6 = "93.184.216.34", "2606:2800::1", "192.168.1.7", "fd00::7"
EVERYWHERE = at(GLOBAL4, GLOBAL6, PRIVATE4, PRIVATE6, "127.0.0.1", "::1", "169.254.3.4", "fe80::1")


@pytest.mark.parametrize(
    ("source", "hosts"),
    [
        ("", None),
        ("127.0.0.1", None),
        ("::1", None),
        ("192.168.1.9", (GLOBAL4, GLOBAL6, PRIVATE4, PRIVATE6)),
        ("fd00::9", (GLOBAL4, GLOBAL6, PRIVATE4, PRIVATE6)),
        ("8.8.8.8", (GLOBAL4, GLOBAL6)),
        ("2001:4860::8888", (GLOBAL4, GLOBAL6)),
    ],
)
def test_which_addresses_can_lead_to_a_peer_from_elsewhere(source: str, hosts: tuple[str, ...] | None) -> None:
    expected = EVERYWHERE if hosts is None else at(*hosts)
    assert reachable_from(EVERYWHERE, source) == expected


def test_a_name_is_believed_and_what_is_no_address_is_not() -> None:
    assert reachable_from(["/dns/example.org/tcp/5", "nonsense", "/ip4/0.0.0.0/tcp/5"], "8.8.8.8") == [
        "/dns/example.org/tcp/5"
    ]


def test_others_are_told_no_address_that_holds_on_one_cable_only() -> None:
    assert for_others(at("fe80::1", "127.0.0.1", PRIVATE6)) == at(PRIVATE6)
    assert for_others(at("127.0.0.1", "::1", "fe80::1")) == at("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("/ip4/1.2.3.4/tcp/5/p2p/x", "1.2.3.4"),
        ("/ip6/fe80::1%eth0/tcp/5", "fe80::1"),
        ("/ip6/::ffff:1.2.3.4/tcp/5", "1.2.3.4"),
        ("/dns/example.org/tcp/5", ""),
        ("/ip4/nonsense", ""),
        ("", ""),
    ],
)
def test_the_host_in_an_address(address: str, host: str) -> None:
    assert host_of(address) == host


def test_a_run_is_local_when_all_its_addresses_are_this_machines_own() -> None:
    assert loopback_of(at("::1", "127.0.0.1")) == "::1"
    assert loopback_of(at("127.0.0.1", PRIVATE4)) == loopback_of(["/dns/localhost/tcp/5"]) == loopback_of([]) == ""


def test_by_default_all_addresses_of_both_families_are_listened_on_at_one_port() -> None:
    found = [parts(address) for address in every_address(0)]
    assert {known.get("ip4") or known.get("ip6") for known in found} >= {"0.0.0.0"}
    assert len({known["tcp"] for known in found}) == 1 and found[0]["tcp"] != "0"
    assert [parts(address)["tcp"] for address in every_address(4711)] == ["4711"] * len(found)
    check_listen(every_address(0))


@pytest.mark.parametrize("spelled", ["/ip6/::ffff:127.0.0.1/tcp/5", "/dns4/localhost/tcp/5", "/dns/A.LocalHost/tcp/5"])
def test_loopback_is_loopback_however_it_is_spelled(spelled: str) -> None:
    """It passed for an address elsewhere, so a peer in the coordinator's network was believed to be there."""
    for source in (PRIVATE4, GLOBAL4):
        assert reachable_from([spelled, *at(GLOBAL4)], source) == at(GLOBAL4)
    assert for_others([spelled, *at(GLOBAL4)]) == at(GLOBAL4)


def test_an_address_within_a_providers_network_leads_nowhere_from_outside_of_it() -> None:
    shared = at("100.64.3.4", "::ffff:100.64.3.4", "::ffff:192.168.1.7")
    assert reachable_from(shared, GLOBAL4) == []
    assert reachable_from(shared, "100.101.1.1") == shared, "from such a network, as some tunnels are"


def test_a_translated_address_is_one() -> None:
    """Much of IPv6 is called reserved; hosts that have nothing else reach IPv4 at 64:ff9b::."""
    assert usable(at("64:ff9b::5db8:d822")) == at("64:ff9b::5db8:d822")


def test_whether_there_is_a_way_is_told_without_sending_anything() -> None:
    assert has_way_to("/ip4/127.0.0.1/tcp/5") and has_way_to("/dns4/example.org/tcp/5")
    assert not has_way_to("/ip4/255.255.255.255/tcp/5")

"""Which addresses are well formed, and which of them another machine could dial."""

import pytest

from peers.addresses import check_announced, check_listen, for_others, parts, usable
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

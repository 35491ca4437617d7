"""What may stand in a libp2p address: checked before p2pd sees it, because p2pd's answers are not for people.

p2pd listens with SO_REUSEPORT: a second one on the same port starts without a word and takes half the connections.
So a port is probed before it is given to p2pd.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from protocol.errors import UserError

EXAMPLE = "/ip4/203.0.113.5/tcp/31330"
_LONGEST_NAME = 253
# A label neither begins nor ends with a hyphen; two of them in the third and fourth place are kept for "xn--".
_LABEL = r"(?:(?=xn--)|(?!..--))[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.IGNORECASE | re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}")
_SHARED = ipaddress.ip_network("100.64.0.0/10")  # between a provider and its customers: of use within that network only
_OVER_IT = {"quic", "quic-v1", "ws", "wss"}  # what libp2p may speak over TCP or UDP


def parts(address: str) -> dict[str, str]:
    """`/ip4/1.2.3.4/tcp/5` as {"ip4": "1.2.3.4", "tcp": "5"}; {} if it is not an address with a host and a port."""
    words = address.split("/")
    if words[0] or len(words) < 5 or not _is_host(words[1], words[2]) or words[3] not in ("tcp", "udp"):
        return {}
    if not _PORT.fullmatch(words[4]) or int(words[4]) > 65535:
        return {}
    known, rest = {words[1]: words[2], words[3]: words[4]}, words[5:]
    if rest[-2:-1] == ["p2p"]:
        known["p2p"] = rest[-1]
        rest = rest[:-2]
    return known if _OVER_IT.issuperset(rest) else {}


def _is_host(kind: str, host: str) -> bool:
    if kind in ("dns", "dns4", "dns6"):
        return len(host) <= _LONGEST_NAME and _NAME.fullmatch(host) is not None
    try:
        return kind in ("ip4", "ip6") and "%" not in host and ipaddress.ip_address(host).version == int(kind[2])
    except ValueError:
        return False


def bare(address: str) -> str:
    """The address without a trailing `/p2p/<id>`."""
    return address.rpartition("/p2p/")[0] or address


def peer_of(address: str) -> str:
    """The peer id at the end of an initial peer's address.

    Raises:
        UserError: there is none.
    """
    peer = parts(address).get("p2p")
    if not peer:
        raise UserError(f"expected a peer's address such as {EXAMPLE}/p2p/Qm..., got {address!r}")
    return peer


def usable(addresses: Sequence[str]) -> list[str]:
    """Those of `addresses` that are well formed and that one could dial: never port 0, 0.0.0.0 or a group's address."""
    return [address for address in addresses if _dialable(parts(address))]


def for_others(addresses: Sequence[str]) -> list[str]:
    """What to tell others: no loopback address where there is any other, since theirs leads to themselves; and none
    that holds on one cable only, since it would need the name of the other one's network card beside it.
    """
    found = [address for address in addresses if not _is_link_local(_host(address))]
    return [address for address in found if not is_loopback(_host(address))] or found


def reachable_from(addresses: Sequence[str], source: str) -> list[str]:
    """Those of `addresses` that can lead to the peer that named them, which came from `source` ("": unknown).

    Whoever came over the internet is not at a loopback, a link-local or a private address of ours: those lead to some
    machine here, or nowhere. From a private network one may name private addresses, since it may be the same network.
    """
    if not source or is_loopback(source):
        return list(addresses)
    from_private = _is_private(source)

    def leads_there(host: str | None) -> bool:
        if host is None:
            return True  # a name: it leads where its owner wants
        here = is_loopback(host) or _is_link_local(host)
        return not here and (from_private or not _is_private(host))

    return [address for address in usable(addresses) if leads_there(_host(address))]


def host_of(address: str) -> str:
    """The IP address in a libp2p address, without a zone; "": there is none."""
    words = address.split("/")
    host = words[2] if len(words) > 2 and words[1] in ("ip4", "ip6") else ""
    try:
        return str(_unmapped(host.partition("%")[0]))
    except ValueError:
        return ""


def loopback_of(addresses: Sequence[str]) -> str:
    """The loopback address that all of `addresses` are at, or the first of several; "": one is elsewhere."""
    hosts = [host_of(address) for address in addresses]
    return hosts[0] if hosts and all(host and is_loopback(host) for host in hosts) else ""


def is_loopback(host: str | None) -> bool:
    """Whether the IP address `host` is one of the machine's own loopback; None: a name, of which nobody knows."""
    return host is not None and ipaddress.ip_address(host).is_loopback


def has_way_to(address: str) -> bool:
    """Whether this machine has any way to the host in `address`: one without IPv6 has none to IPv6. Sends nothing."""
    host = _host(address)
    if host is None:
        return True
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # of UDP, this only looks for a route
        except OSError:
            return False
    return True


def every_address(port: int) -> list[str]:
    """To listen on all addresses of this machine, of both families, at `port` (0: a free one, the same for both)."""
    hosts = [host for host in ("0.0.0.0", "::") if _can_bind(host, 0)]
    if port == 0:
        port = next((free for free in map(_free_port, hosts) if all(_can_bind(h, free) for h in hosts)), 0)
    return [f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}" for host in hosts]


def _free_port(host: str) -> int:
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _can_bind(host: str, port: int) -> bool:
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            if ":" in host:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError:
        return False
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _host(address: str) -> str | None:
    """The IP address in a well-formed address; None: a name of which nobody knows where it leads."""
    known = parts(address)
    name = next((known[kind] for kind in ("dns", "dns4", "dns6") if kind in known), "").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return "127.0.0.1"
    host = known.get("ip4") or known.get("ip6")
    return None if host is None else str(_unmapped(host))


def _unmapped(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address that `host` spells: ::ffff:127.0.0.1 leads where 127.0.0.1 does. ValueError: it spells none."""
    parsed = ipaddress.ip_address(host)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed


def _is_private(host: str) -> bool:
    parsed = ipaddress.ip_address(host)
    return parsed.is_private or (parsed.version == 4 and parsed in _SHARED)


def _is_link_local(host: str | None) -> bool:
    return host is not None and ipaddress.ip_address(host).is_link_local


def _dialable(known: dict[str, str]) -> bool:
    host = known.get("ip4") or known.get("ip6")
    port = known.get("tcp") or known.get("udp") or "0"
    return int(port) != 0 and not (host is not None and _is_nowhere(_unmapped(host)))


def _is_nowhere(host: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether no single machine is at `host`. Of IPv6 much is reserved that is in use, such as 64:ff9b::."""
    return host.is_unspecified or host.is_multicast or (host.version == 4 and host.is_reserved)


def check_announced(addresses: Sequence[str] | None) -> None:
    """
    Raises:
        UserError: one of `addresses` is of no use to others.
    """
    for address in addresses or ():
        if not usable([address]):
            raise UserError(
                f"expected an address to announce that others can reach, such as {EXAMPLE}, got {address!r}"
            )


def check_listen(addresses: Sequence[str]) -> None:
    """
    Raises:
        UserError: an address is malformed, not this machine's, or its port is taken.
    """
    for address in addresses:
        known = parts(address)
        host = known.get("ip4") or known.get("ip6")
        if host is None:
            raise UserError(f"expected an address to listen on such as /ip4/0.0.0.0/tcp/31330, got {address!r}")
        _probe(host, int(known.get("tcp") or known["udp"]), "tcp" in known)


def _probe(host: str, port: int, tcp: bool) -> None:
    with socket.socket(_family(host), socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM) as probe:
        if ":" in host:  # p2pd listens on each family by itself, so the other's port is free
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if tcp:  # a port whose last owner has just left is free for p2pd as well
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"cannot listen on {host} port {port}: {error.strerror or error}: "
                "end the program that uses this port, or choose another address or port"
            ) from error

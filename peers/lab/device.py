"""The hub's end of a home's TUN device, and the bundles of segments that come through it.

As to a network card, the system hands over several segments of a TCP connection in one, and takes them so. A packet
each would cost the hub most of a core. A bundle counts with the headers of all its segments, and is no longer than
`_BUNDLE_SECONDS` on the slowest line. Where packets are to be lost one by one, there are none.

Each packet begins with a header of ten bytes, `struct virtio_net_hdr` of Linux:

    0 flags   1 kind of bundle, 0: none   2-3 length of headers   4-5 bytes of a segment   6-9 where a checksum goes
"""

from __future__ import annotations

import fcntl
import os
import struct

from peers.lab.lab_file import LabFile, places
from peers.lab.namespaces import DEVICE, MTU_BYTES, inside

HEADER_BYTES = 10
MOST_BYTES = 65_536  # in a bundle, by the system's own limit
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_BUNDLE_SECONDS = 0.0012


def open_device(namespace: str, bundle: int) -> int:
    """The handle of a namespace's device. It reads and writes whole packets, without waiting."""
    with inside(namespace):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | (_TUN_F_TSO4 if bundle > MTU_BYTES else 0))
    return device


def largest_bundle(lab: LabFile, homes: int) -> int:
    """The most bytes of a bundle in a laboratory with so many homes."""
    found = [lab.at(place).access(0) for place in places(homes)]
    lines = [line for access in found for line in (access.up, access.down)]
    if any(line.loss for line in lines) or any("loss" in change.line for change in lab.changes):
        return MTU_BYTES
    rates = [line.bytes_per_second for line in lines if line.bytes_per_second]
    fitting = round(min(rates, default=float(MOST_BYTES) / _BUNDLE_SECONDS) * _BUNDLE_SECONDS)
    return min(MOST_BYTES, max(MTU_BYTES, fitting))


def bytes_on_line(packet: bytes) -> int:
    """What the packet, with its ten bytes before it, would be on a line: a bundle as its segments."""
    size = len(packet) - HEADER_BYTES
    if not packet[1]:
        return size
    ip = 4 * (packet[HEADER_BYTES] & 15)
    headers = ip + 4 * (packet[HEADER_BYTES + ip + 12] >> 4)
    segment = packet[4] | packet[5] << 8
    return size + headers * ((size - headers - 1) // segment)

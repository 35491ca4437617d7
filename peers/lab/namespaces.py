"""Network namespaces, each with a TUN device that stands for the home's line; and what a dead laboratory left of them.

Each laboratory has a number; it holds `FOLDER/<number>.lock` with flock, which the kernel lets go of however its
process dies. Its namespaces bear that number in their names. So whoever gets the lock of a number may remove all that
bears it, and nothing else.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from peers.lab.lab_file import Place, address_at
from protocol.errors import RunFailed, UserError

FOLDER = Path("/run/isthmus-laboratories")
DEVICE = "home"
MTU_BYTES = 1500
_PREFIX = "isthmus-lab"
_NAMES = re.compile(rf"{_PREFIX}-(\d+)-\S+")
_NUMBERS = range(1, 255)
_TUN = Path("/dev/net/tun")
_NET = Path("/proc/sys/net/ipv4")
_GRACE_SECONDS = 5.0
_CLONE_NEWNET = 0x40000000

# A home's machine, whatever this one is set to: cubic, and the buffers that systems come with.
_SYSCTLS = {
    "tcp_congestion_control": "cubic",
    "tcp_rmem": "4096 131072 6291456",
    "tcp_wmem": "4096 16384 4194304",
}


def why_not() -> str | None:
    """What this machine lacks for a laboratory; None: nothing."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a laboratory needs root, for network namespaces"
    if shutil.which("ip") is None:
        return "a laboratory needs the program `ip` (package iproute2)"
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"a laboratory needs the device {_TUN} (load the module tun, or give the container that device)"
    try:
        with _unshared():
            return None
    except OSError as error:
        return f"a laboratory needs network namespaces, which this system refuses: {error.strerror}"


def namespace_at(number: int, place: Place) -> str:
    """The name of a home's namespace."""
    return f"{_PREFIX}-{number}-{place}"


class Number:
    """A laboratory's number, held for as long as this process lives or until `free`.

    Raises:
        RunFailed: at the start, when all numbers are held.
    """

    def __init__(self) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for value in _NUMBERS:
            if (file := _try_lock(value)) is not None:
                self.value, self._file = value, file
                _remove(value)
                return
        raise RunFailed(f"expected fewer than {len(_NUMBERS)} laboratories at once on this machine")

    @property
    def folder(self) -> Path:
        """The laboratory's own files."""
        return folder_of(self.value)

    def free(self) -> None:
        """Remove all that bears the number, and let others have it."""
        _remove(self.value)
        _unlock(self.value, self._file)


def folder_of(number: int) -> Path:
    """The files of the laboratory of that number."""
    return FOLDER / str(number)


def clean() -> list[int]:
    """Remove what dead laboratories left; those that live are not touched. Returns the dead ones' numbers."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    known = {int(path.stem) for path in FOLDER.glob("*.lock") if path.stem.isdecimal()}
    cleaned = []
    for number in sorted(known | {number for number, _ in _namespaces()}):
        if (file := _try_lock(number)) is not None:
            _remove(number)
            _unlock(number, file)
            cleaned.append(number)
    return cleaned


def living() -> list[int]:
    """The numbers of the laboratories that run."""
    numbers = []
    for number in sorted(int(path.stem) for path in FOLDER.glob("*.lock") if path.stem.isdecimal()):
        if (file := _try_lock(number)) is None:
            numbers.append(number)
        else:  # dead; the next start removes it
            os.close(file)
    return numbers


def _try_lock(number: int) -> int | None:
    path = FOLDER / f"{number}.lock"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_ino == path.stat().st_ino:  # else its last holder removed it meanwhile
            return file
    os.close(file)
    return None


def _unlock(number: int, file: int) -> None:
    (FOLDER / f"{number}.lock").unlink(missing_ok=True)
    os.close(file)


def _namespaces() -> list[tuple[int, str]]:
    """All that there are, with their laboratories' numbers."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [(int(match[1]), match[0]) for line in listed.splitlines() if (match := _NAMES.match(line))]


def _remove(number: int) -> None:
    names = [name for of, name in _namespaces() if of == number]
    for name in names:
        end_processes(name)
    if names:
        ip("".join(f"netns delete {name}\n" for name in names))
    shutil.rmtree(folder_of(number), ignore_errors=True)


def end_processes(namespace: str) -> None:
    """End what runs in a namespace, kindly first: its network is about to go."""
    for number, seconds in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, _GRACE_SECONDS)):
        deadline = time.monotonic() + seconds
        asked: set[int] = set()
        while (running := _pids(namespace)) and time.monotonic() < deadline:
            for pid in running - asked:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            asked |= running
            time.sleep(0.05)


def _pids(namespace: str) -> set[int]:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False).stdout
    return {int(pid) for pid in listed.split()} - {os.getpid()}


def make(number: int, places: Sequence[Place], bundle: int) -> None:
    """Make a namespace for each place, with its address on a TUN device that waits for the forwarder.

    Args:
        bundle: the most bytes that the device is handed in one; see `peers.lab.device`.

    Raises:
        RunFailed: the system refused.
    """
    _allow_cubic()
    ip("".join(f"netns add {namespace_at(number, place)}\n" for place in places))
    for place in places:
        name = namespace_at(number, place)
        ip(
            f"tuntap add dev {DEVICE} mode tun\n"
            f"addr add {address_at(number, place)}/24 dev {DEVICE}\n"
            f"link set lo up\n"
            f"link set {DEVICE} mtu {MTU_BYTES} txqueuelen 2000 gso_max_size {bundle} up\n",
            name,
        )
        with inside(name):
            for key, value in _SYSCTLS.items():
                (_NET / key).write_text(value)


def ip(commands: str, namespace: str | None = None) -> None:
    """Run `commands` of the program `ip`, one a line.

    Raises:
        RunFailed: one failed.
    """
    where = [] if namespace is None else ["-n", namespace]
    done = subprocess.run(["ip", *where, "-batch", "-"], input=commands, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or f"it ended with exit code {done.returncode}"
        raise RunFailed(f"the laboratory could not be built: ip: {said.splitlines()[0]}")


def _allow_cubic() -> None:
    """A namespace may choose only what the machine allows; most allow it already."""
    allowed = (_NET / "tcp_allowed_congestion_control").read_text().split()
    if "cubic" not in allowed:
        try:
            (_NET / "tcp_allowed_congestion_control").write_text(" ".join([*allowed, "cubic"]))
        except OSError as error:
            raise RunFailed(f"a laboratory needs TCP's cubic, which this kernel does not have: {error}") from error


# Namespaces by system call: Python has them from 3.12 on only.


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Let this thread be in a namespace for a while."""
    with _returning():
        target = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(target)
        finally:
            os.close(target)
        yield


@contextmanager
def _unshared() -> Iterator[None]:
    with _returning():
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            raise _last_error()
        yield


@contextmanager
def _returning() -> Iterator[None]:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _enter(home)
        os.close(home)


def _enter(handle: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def check_possible() -> None:
    """
    Raises:
        UserError: this machine lacks what a laboratory needs.
    """
    if reason := why_not():
        raise UserError(f"{reason}; without it, `isthmus launch` runs in one process over the same model of the lines")

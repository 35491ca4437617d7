"""The files of a folder, in an order that is the same on every machine, and what was passed over, with the reason.

Real folders come first, then linked ones in the order of their paths. Each folder is entered once, however many links
lead there, so a link to a folder above ends there and cannot go round.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import UserError

Choice = Callable[[str], bool]


@dataclass(slots=True)
class FolderFiles:
    """The wanted `files` below a folder, sorted by relative path. `passed_over`: for each reason, how many names.

    `endings`: of the files whose names are not wanted.
    """

    files: list[Path] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)

    def describe(self) -> str:
        """What was passed over in words; empty where nothing was."""
        said = [f"{reason} {count}" for reason, count in self.passed_over.most_common()]
        if self.endings:
            common = ", ".join(f"{ending or 'no ending'} {count}" for ending, count in self.endings.most_common(5))
            said.append(f"other endings {self.endings.total()} ({common})")
        return ", ".join(said)


def find_files(root: Path, wanted: Choice, entered: Choice, follow: bool = True) -> FolderFiles:
    """The files below `root` whose name is `wanted`, in folders whose name may be `entered`. Hidden names are left out.

    `follow`: enter linked folders too.

    Raises:
        UserError: a link leads nowhere, or a folder cannot be read.
    """
    walk = _Walk(wanted, entered, follow)
    walk.enter(root)
    while walk.links:
        walk.links.sort(key=lambda path: path.relative_to(root).as_posix(), reverse=True)
        walk.enter(walk.links.pop())
    walk.found.files.sort(key=lambda path: path.relative_to(root).as_posix())
    return walk.found


def look_at(path: Path) -> os.stat_result | None:
    """What is at `path`, behind links; None when nothing is.

    Raises:
        UserError: a link leads nowhere or round, or it cannot be looked at.
    """
    try:
        return path.stat()
    except ValueError:  # a name that no file can have
        return None
    except OSError as error:
        if os.path.islink(path) and error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise _broken_link(path, f"a link to {os.readlink(path)}, where nothing is") from error
        if error.errno == errno.ELOOP:
            raise _broken_link(path, "a link that leads back to itself") from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> UserError:
    """The error to raise where the system refuses `path`."""
    where, reason = error.filename or path, error.strerror or str(error)
    hints = {
        errno.EACCES: "give yourself the right to read it (chmod u+rX), or run as a user who has it",
        errno.EPERM: "run as a user who may read it",
        errno.EIO: "the disk or the share that it is on fails",
        errno.ENAMETOOLONG: "use a shorter path",
    }
    hint = hints.get(error.errno or 0, "mend that, or take it out of the data")
    return UserError(f"expected to read {where}, but the system refuses: {reason}; {hint}")


def _broken_link(path: Path, what: str) -> UserError:
    return UserError(f"expected data at {path}, but it is {what}; mend the link, or remove it")


class _Walk:
    """The walk of one folder: what was found, and the linked folders that are still to be entered."""

    def __init__(self, wanted: Choice, entered: Choice, follow: bool) -> None:
        self.wanted, self.entered, self.follow = wanted, entered, follow
        self.found = FolderFiles()
        self.links: list[Path] = []
        self._seen: set[tuple[int, int]] = set()

    def enter(self, folder: Path) -> None:
        """Look at all names in `folder`, and in the real folders below it."""
        folders = [folder]
        while folders:
            here = folders.pop()
            try:
                status = here.stat()
                names = sorted(os.listdir(here))
            except OSError as error:
                raise unreadable(here, error) from error
            if (status.st_dev, status.st_ino) in self._seen:
                self._pass_over("folders read under another name")
                continue
            self._seen.add((status.st_dev, status.st_ino))
            folders += [path for name in names if self._is_folder(path := here / name)]

    def _is_folder(self, path: Path) -> bool:
        """Note a file or a linked folder; whether it is a real folder to be entered."""
        name = path.name
        if name.startswith("."):
            self._pass_over("hidden")
            return False
        status = self._status(path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            return self._may_enter(path)
        if not self.wanted(name):
            self.found.endings[path.suffix.lower()] += 1
        elif status is None or not stat.S_ISREG(status.st_mode):
            self._pass_over("no regular file")
        else:
            self.found.files.append(path)
        return False

    def _status(self, path: Path) -> os.stat_result | None:
        """What is at `path`; None for a link that leads nowhere and whose name says that it is not wanted."""
        try:
            return look_at(path)
        except UserError:
            if self.wanted(path.name) or (self.follow and not path.suffix):
                raise
            return None

    def _may_enter(self, path: Path) -> bool:
        if not self.entered(path.name):
            self._pass_over("folders never read")
            return False
        if not path.is_symlink():
            return True
        if self.follow:
            self.links.append(path)
        else:
            self._pass_over("linked folders")
        return False

    def _pass_over(self, reason: str) -> None:
        self.found.passed_over[reason] += 1

"""Where the text of a run comes from: an ordered list of documents.

The order and the bytes must be the same on every peer, so folders are sorted by relative path (by code point, with
"/" on every system), text is read as UTF-8 and line ends become "\\n". What is not text is refused (`text_file`), and
what was passed over is told.
"""

from __future__ import annotations

import difflib
import logging
import stat
import sysconfig
from collections.abc import Callable
from pathlib import Path

from peers.data.folder_files import FolderFiles, find_files, look_at
from peers.data.reading import Reading
from peers.data.sign_of_life import sign_of_life
from protocol.errors import InputError, UserError

KINDS = ("stdlib", "text", "jsonl")
TEXT_SUFFIXES = frozenset(
    {
        ".txt",
        ".md",
        ".rst",
        ".tex",
        ".py",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".rs",
        ".go",
        ".java",
        ".js",
        ".ts",
        ".sh",
    }
)

_SKIPPED_FOLDERS = frozenset({"__pycache__"})
_STDLIB_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# Written by the build or by the distribution: they would make two peers with the same Python disagree.
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")


log = logging.getLogger(__name__)


def load_documents(
    kind: str, path: Path | None, field: str = "text", say: Callable[[str], None] | None = None
) -> list[str]:
    """All documents of a source, in their order, none of them empty.

    `kind` is "stdlib" (sources of the running Python's standard library without its tests; no `path`), "text" (one
    file, or a folder walked for TEXT_SUFFIXES) or "jsonl" (one file, or a folder walked for *.jsonl; the text is at
    `field` of each line). The whole text is held in memory at once: meant for up to a few hundred MB. `say` is told
    what was read, what was passed over, and what is odd about it.

    Raises:
        InputError: the path is missing, or there is no text of the kind at it.
        UserError: the kind is unknown, something cannot be read, or a file is not text.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f'did you mean "{near[0]}"?' if near else "choose one of them"
        raise UserError(f'expected a data source out of {", ".join(KINDS)}, but got "{kind}"; {hint}')
    tell = say or log.info
    with sign_of_life(tell, f"reading {_name(kind, path)}"):
        found = FolderFiles(stdlib_files()) if kind == "stdlib" else _given(kind, path)
        reading = Reading(field if kind == "jsonl" else None)
        documents = [text for file in found.files for text in reading.documents(file)]
    reading.check()
    if kind != "stdlib":
        reading.tell(tell, _name(kind, path), found)
    if not documents:
        raise InputError(
            "data",
            "unfit",
            f"expected text in {_name(kind, path)}, but all of it is empty",
            "point the run at other data",
        )
    return documents


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The .py files of the standard library (or of `root`), sorted, without tests and files made by the build."""

    def wanted(name: str) -> bool:
        return name.endswith(".py") and not name.startswith(_STDLIB_SKIPPED_PREFIXES)

    def entered(name: str) -> bool:
        return name not in _STDLIB_SKIPPED_FOLDERS and not name.startswith(_STDLIB_SKIPPED_PREFIXES)

    folder = root or Path(sysconfig.get_path("stdlib"))
    # Distributions link folders of their own into it: followed, they would make two peers disagree.
    return _some(find_files(folder, wanted, entered, follow=False), "stdlib", None, "*.py").files


def _given(kind: str, path: Path | None) -> FolderFiles:
    """The one file at `path` whatever its suffix, or the files below it that have one of the kind's suffixes."""
    if path is None:
        raise UserError(f'expected a path for the data source "{kind}", but none was given; name a file or a folder')
    status = look_at(path)
    if status is None:
        place = path if path.is_absolute() else f"{path} (from {Path.cwd()})"
        fact = f"expected a file or a folder of {kind} at {place}, but nothing is there"
        raise InputError("data", "missing", fact, "correct the path")
    if stat.S_ISREG(status.st_mode):
        return FolderFiles([path])
    if not stat.S_ISDIR(status.st_mode):
        fact = f"expected a file or a folder of {kind} at {path}, but it is a device, a pipe or a socket"
        raise UserError(f"{fact}; write its text to a file, and name that")
    suffixes = TEXT_SUFFIXES if kind == "text" else frozenset({".jsonl"})
    found = find_files(
        path, lambda name: Path(name).suffix.lower() in suffixes, lambda name: name not in _SKIPPED_FOLDERS
    )
    return _some(found, kind, path, " ".join(f"*{suffix}" for suffix in sorted(suffixes)))


def _some(found: FolderFiles, kind: str, path: Path | None, patterns: str) -> FolderFiles:
    """`found`, or an InputError when it has no file."""
    if not found.files:
        others = f" (passed over: {found.describe()})" if found.describe() else ""
        fact = f"expected files such as {patterns} in {_name(kind, path)}, but found none{others}"
        raise InputError("data", "unfit", fact, "add some there")
    return found


def _name(kind: str, path: Path | None) -> str:
    """What to call a source in a message."""
    return str(path) if path is not None else f'the data source "{kind}"'

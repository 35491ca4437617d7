"""Where the text of a run comes from: an ordered list of documents.

The order and the bytes must be the same on every peer, so folders are sorted by relative path (by code point, with
"/" on every system), text is read as UTF-8 and line ends become "\\n". What cannot be decoded becomes U+FFFD.
"""

from __future__ import annotations

import difflib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from protocol.errors import UserError

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

_STDLIB_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# Written by the build or by the distribution: they would make two peers with the same Python disagree.
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")


def load_documents(kind: str, path: Path | None, field: str = "text") -> list[str]:
    """All documents of a source, in their order, none of them empty.

    `kind` is "stdlib" (sources of the running Python's standard library without its tests; no `path`), "text" (one
    file, or a folder walked for TEXT_SUFFIXES) or "jsonl" (one file, or a folder walked for *.jsonl; the text is at
    `field` of each line). The whole text is held in memory at once: meant for up to a few hundred MB. Raises UserError
    for an unknown kind, a path that is missing or cannot be read, a bad line, and a source without text.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f'did you mean "{near[0]}"?' if near else "choose one of them"
        raise UserError(f'expected a data source out of {", ".join(KINDS)}, but got "{kind}"; {hint}')
    try:
        documents = [text for text in _documents(kind, path, field) if text]
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror}; check its permissions") from error
    if not documents:
        raise UserError(f"expected text in {_name(kind, path)}, but all of it is empty; point the run at other data")
    return documents


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The .py files of the standard library (or of `root`), sorted, without tests and files made by the build."""

    def wanted(name: str) -> bool:
        return name.endswith(".py") and not name.startswith(_STDLIB_SKIPPED_PREFIXES)

    def entered(name: str) -> bool:
        return name not in _STDLIB_SKIPPED_FOLDERS and not name.startswith(_STDLIB_SKIPPED_PREFIXES)

    return _walk(root or Path(sysconfig.get_path("stdlib")), wanted, entered)


def _documents(kind: str, path: Path | None, field: str) -> Iterator[str]:
    """Documents of a known kind, also the empty ones."""
    if kind == "stdlib":
        yield from map(_read, _some(stdlib_files(), kind, None, "*.py"))
    elif kind == "text":
        yield from map(_read, _files(kind, path, TEXT_SUFFIXES))
    else:
        for file in _files(kind, path, frozenset({".jsonl"})):
            yield from _json_lines(file, field)


def _files(kind: str, path: Path | None, suffixes: frozenset[str]) -> list[Path]:
    """The one file at `path` whatever its suffix, or the files below it that have one of `suffixes`."""
    if path is None:
        raise UserError(f'expected a path for the data source "{kind}", but none was given; name a file or a folder')
    if not path.exists():
        raise UserError(f"expected a file or a folder of {kind} at {path}, but nothing is there; correct the path")
    if path.is_file():
        return [path]
    found = _walk(path, lambda name: Path(name).suffix.lower() in suffixes, lambda name: name != "__pycache__")
    return _some(found, kind, path, " ".join(f"*{suffix}" for suffix in sorted(suffixes)))


def _some(files: list[Path], kind: str, path: Path | None, patterns: str) -> list[Path]:
    """`files`, or a UserError when there is none."""
    if not files:
        raise UserError(f"expected files such as {patterns} in {_name(kind, path)}, but found none; add some there")
    return files


def _name(kind: str, path: Path | None) -> str:
    """What to call a source in a message."""
    return str(path) if path is not None else f'the data source "{kind}"'


def _walk(root: Path, wanted: Callable[[str], bool], entered: Callable[[str], bool]) -> list[Path]:
    """Files below `root` with a wanted name, sorted by relative path. Hidden names and linked folders are skipped."""

    def fail(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and entered(name)]
        found += [Path(folder, name) for name in names if not name.startswith(".") and wanted(name)]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _read(file: Path) -> str:
    """The text of one file."""
    return file.read_text(encoding="utf-8-sig", errors="replace")


def _json_lines(file: Path, field: str) -> Iterator[str]:
    """The text at `field` of each line of one file; blank lines are skipped."""
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_text(line, field, f"{file}, line {number}")


def _json_text(line: str, field: str, where: str) -> str:
    """The text at `field` of one line; raises UserError that says `where` and what came instead."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: expected one JSON object, but it does not parse ({error}); mend the line") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object, but got {type(record).__name__}; mend the line")
    if field not in record:
        keys = ", ".join(sorted(record)[:8]) or "none"
        raise UserError(f'{where}: expected a field "{field}", but the fields are: {keys}; set the field of the data')
    if not isinstance(text := record[field], str):
        raise UserError(f'{where}: expected text at "{field}", but got {type(text).__name__}; mend the line')
    # JSON can spell half a surrogate pair, which no UTF-8 encoder takes.
    return text.encode("utf-8", "replace").decode("utf-8")

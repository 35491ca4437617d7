"""The text of one file, and how much of it is no text.

Text is UTF-8. What cannot be decoded becomes U+FFFD; control characters stay. Both are *odd*: a few are told of, more
are taken for another encoding or another kind of file, and refused.

The line is drawn at one odd character in a thousand. Above it lie texts in other encodings (German or French in
Latin-1: 1 to 4 %; English with the quotation marks of Windows-1252: 0.3 to 1 %) and everything compressed or binary
(40 % and more). Below it lie crawled texts with a few mangled lines, and English with a rare accent. FEW odd characters
pass in however small a file: one that was cut in the middle of a character has no more. The same line is drawn for all
files of a run together, so that a folder of many small files in Latin-1 does not slip through file by file.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from peers.data.formats import Format, count_controls, guess_format, marked_format

MOST_ODD_SHARE = 0.001
FEW = 3
_START = 16  # bytes, in which every mark of a format lies
_REPLACED, _REPLACED_UTF8 = "\ufffd", b"\xef\xbf\xbd"


@dataclass(frozen=True, slots=True)
class FileText:
    """A file's `text`, with line ends as "\\n". `odd`: how many are odd; `guess`: what it may be if any are."""

    path: Path
    text: str
    odd: int
    guess: Format | None


class NotText(Exception):
    """A file that is not text, and what it seems to be."""

    def __init__(self, path: Path, found: Format, why: str) -> None:
        super().__init__(f"expected UTF-8 text in {path}, but it seems to be {found.name}: {why}")
        self.remedy = found.remedy.format(file=shlex.quote(str(path)))


def read_text(path: Path) -> FileText:
    """The text of one file.

    Raises:
        NotText: it is something else.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(_START)
        if (marked := marked_format(start)) is not None:  # before all of a large archive is read
            raise NotText(path, marked, f"it begins with the bytes {start[:4].hex(' ')}")
        file.seek(0)
        raw = file.read()
    text = raw.decode("utf-8-sig", "replace")
    # A file may hold U+FFFD as such: somebody replaced it before us.
    odd = text.count(_REPLACED) - raw.count(_REPLACED_UTF8) + count_controls(raw)
    guess = guess_format(raw) if odd else None
    if guess is not None and too_odd(odd, len(text)):
        raise NotText(path, guess, f"{describe_odd(odd, len(text))} are not text")
    return FileText(path, text.replace("\r\n", "\n").replace("\r", "\n"), odd, guess)


def too_odd(odd: int, characters: int) -> bool:
    """Whether `odd` of `characters` are too many to be accidents."""
    return odd > max(FEW, MOST_ODD_SHARE * characters)


def describe_odd(odd: int, characters: int) -> str:
    """`odd` of `characters` in words."""
    return f"{odd:,} of {characters:,} characters ({100 * odd / max(1, characters):.2g} %)"

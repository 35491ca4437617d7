"""Sections of a page that a script writes, between two markers; what is around them is written by hand."""

from __future__ import annotations

from pathlib import Path

from peers.files import write_bytes
from protocol.errors import UserError


def markers(name: str) -> tuple[str, str]:
    """What stands before and after section `name`."""
    return f"<!-- {name}: written by a script, change it there -->", f"<!-- end of {name} -->"


def put(text: str, name: str, section: str) -> str:
    """`text` with `section` in place of what section `name` held.

    Raises:
        UserError: the text has no such section.
    """
    begin, end = markers(name)
    before, first, rest = text.partition(begin)
    _, second, after = rest.partition(end)
    if not first or not second:
        raise UserError(f"expected a section between {begin!r} and {end!r}: add these two lines to the page")
    return f"{before}{begin}\n\n{section}\n\n{end}{after}"


def write_section(page: Path, name: str, section: str) -> None:
    """Write section `name` of `page`.

    Raises:
        UserError: there is no such page or section.
    """
    try:
        text = page.read_text()
    except OSError as error:
        raise UserError(f"expected the page {page}, cannot read it: {error.strerror}") from error
    write_bytes(page, put(text, name, section).encode())

"""Text that others sent, made fit for people: a terminal, a log, a report.

One line, of bounded length, of characters that print. What a terminal would obey (escapes, carriage returns) and what
turns the direction of the text around it (bidirectional overrides) does not print, and becomes a question mark.
"""

from __future__ import annotations

LONGEST_TEXT = 500


def plain(value: object, longest: int = LONGEST_TEXT) -> str:
    """`value` as one line of at most `longest` printable characters."""
    # Cut first: a million characters of others are not worth a look. Runs of white space may take four times the room.
    text = " ".join(str(value)[: 4 * longest].split())[:longest]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def printable(text: str) -> str:
    """`text` of our own making, with its lines and spaces, but nothing that a terminal obeys: it may quote others."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def is_plain(value: object, longest: int = LONGEST_TEXT) -> bool:
    """Whether `value` is a string of at most `longest` characters, all of which print."""
    return isinstance(value, str) and len(value) <= longest and value.isprintable()

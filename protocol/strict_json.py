"""JSON between peers: one spelling to hash and sign, and strict reading.

What Python's parser lets pass but no peer of ours sends is refused here, once: Python reads NaN, Infinity and 1e999
as floats, and integers of thousands of digits. Each would surprise arithmetic further in.

Size and depth are looked at before anything is parsed: a byte of `[],[],...` costs a hundred times the time and memory
of a byte of text, and what is nested deeper than its parser went breaks whoever prints it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MOST_ELEMENTS = 9 << 14  # 25 ms to parse; a question for all microbatches of a step, both ways, is the longest
MOST_DEPTH = 32

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def loads(raw: bytes, elements: int = MOST_ELEMENTS) -> Any:
    """The value in `raw`.

    Raises:
        ValueError: not JSON in UTF-8, of more than `elements` values, nested deeper than `MOST_DEPTH`, or with a number
            that is not finite or needs more than 64 bits.
    """
    _check_shape(raw, elements)
    try:
        return json.loads(raw, parse_constant=_refuse, parse_float=_finite_float, parse_int=_bounded_int)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def canonical(value: Any) -> bytes:
    """The one spelling of `value` that hashes and signatures are made over."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _check_shape(raw: bytes, elements: int) -> None:
    # What stands in strings does not count, and most messages need no second look.
    if _values(raw) <= elements and raw.count(b"[") + raw.count(b"{") <= MOST_DEPTH:
        return
    bare = _STRING.sub(b"", raw) if raw.count(b'"') <= 2 * elements else raw
    if _values(bare) > elements:
        raise ValueError(f"expected at most {elements} values, got more")
    # Each pass takes away the innermost level.
    brackets = bare.translate(None, _NOT_BRACKETS)
    for _ in range(MOST_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if brackets:
        raise ValueError(f"expected brackets in pairs, nested at most {MOST_DEPTH} deep")


def _values(raw: bytes) -> int:
    """At least as many as there are: each but the first has a comma, a colon or a bracket before it."""
    return raw.count(b",") + raw.count(b":") + raw.count(b"[") + raw.count(b"{")


def _refuse(text: str) -> float:
    raise ValueError(f"expected a finite number, got {text[:40]}")


def _finite_float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _bounded_int(text: str) -> int:
    number = int(text) if len(text) <= 20 else 1 << 64
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"expected a 64-bit integer, got {text[:40]}")
    return number

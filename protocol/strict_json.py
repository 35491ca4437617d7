"""JSON between peers: one spelling to hash and sign, and strict reading.

What Python's parser lets pass but no peer of ours sends is refused here, once: Python reads NaN, Infinity and 1e999
as floats, and integers of thousands of digits. Each would surprise arithmetic further in.
"""

from __future__ import annotations

import json
import math
from typing import Any


def loads(raw: bytes) -> Any:
    """The value in `raw`.

    Raises:
        ValueError: not JSON in UTF-8, a number that is not finite or needs more than 64 bits, or nested too deep.
    """
    try:
        return json.loads(raw, parse_constant=_refuse, parse_float=_finite_float, parse_int=_bounded_int)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def canonical(value: Any) -> bytes:
    """The one spelling of `value` that hashes and signatures are made over."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


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

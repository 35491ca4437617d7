"""The texts of a file of JSON lines, and how many of its lines have none.

At most one line in a thousand may be bad, as at most one character in a thousand may be odd: such lines are left out,
counted and told of. With more, the file is another than was meant, and is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

from peers.data.text_file import FileText
from protocol.errors import InputError

MOST_BAD_SHARE = 0.001

NOT_JSON = "not JSON"
NO_OBJECT = "no JSON object"
NO_FIELD = "without the field"
NO_TEXT = "no text in the field"


@dataclass(slots=True)
class JsonTexts:
    """The `texts` of one file, in the order of its lines; `bad`: for each reason, how many lines were left out.

    `first`: says which line was the first of them, and what was wrong with it. `halves`: surrogates that were replaced.
    """

    texts: list[str] = field(default_factory=list)
    bad: Counter[str] = field(default_factory=Counter)
    first: str = ""
    halves: int = 0


class BadLine(ValueError):
    """A line without a text. `reason` is one of a few kinds; `remedy`: what to do where it is the first."""

    def __init__(self, reason: str, message: str, remedy: str = "mend the line") -> None:
        super().__init__(message)
        self.reason, self.remedy = reason, remedy


def read_json_lines(file: FileText, name: str) -> JsonTexts:
    """The text at `name` of each line of `file`; blank lines are passed over.

    Raises:
        InputError: too many lines have none.
    """
    found, remedy = JsonTexts(), ""
    for number, line in enumerate(file.text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json_text(line, name)
        except BadLine as error:
            if not found.bad:
                found.first, remedy = f"{file.path}, line {number}: {error}", error.remedy
            found.bad[error.reason] += 1
            continue
        # JSON can spell half a surrogate pair, which no UTF-8 encoder takes.
        whole = text.encode("utf-8", "replace").decode("utf-8")
        found.halves += whole.count("?") - text.count("?")
        found.texts.append(whole)
    bad = found.bad.total()
    if bad > MOST_BAD_SHARE * (bad + len(found.texts)):
        raise InputError("data", "unfit", _too_many(found), _array_remedy(file.text) or remedy)
    return found


def describe_bad(bad: Counter[str]) -> str:
    """How many lines were bad, by reason, in words."""
    return ", ".join(f"{reason} {count:,}" for reason, count in bad.most_common())


def _too_many(found: JsonTexts) -> str:
    bad = found.bad.total()
    if bad == 1:
        return found.first
    return f"{found.first} ({bad:,} of {bad + len(found.texts):,} lines are bad: {describe_bad(found.bad)})"


def _array_remedy(text: str) -> str | None:
    """What to do with a file that is one JSON array, as many are that are meant to be lines."""
    if not text.lstrip().startswith("["):
        return None
    return "if the file is one JSON array, make lines of it: jq -c '.[]' FILE > NEW.jsonl"


def json_text(line: str, name: str) -> str:
    """The text at `name` of one line.

    Raises:
        BadLine: there is none.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(NOT_JSON, f"expected one JSON object, but it does not parse ({error})") from error
    if not isinstance(record, dict):
        raise BadLine(NO_OBJECT, f"expected a JSON object, but got {type(record).__name__}")
    if name not in record:
        keys = ", ".join(sorted(record)[:8]) or "none"
        raise BadLine(
            NO_FIELD,
            f'expected a field "{name}", but the fields are: {keys}',
            "set data.field to the one with the text",
        )
    if not isinstance(text := record[name], str):
        raise BadLine(NO_TEXT, f'expected text at "{name}", but got {type(text).__name__}')
    return text

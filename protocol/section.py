"""What all sections of a configuration are: frozen, typed, and without a key that is not known."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.errors import ConfigError


class Section(BaseModel):
    """The base of each. Numbers are finite, and no value is of a type that is only nearly right."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


S = TypeVar("S", bound=Section)


def parse_section(root: type[S], values: dict[str, Any], origin: str, whole: str) -> S:
    """The `root` in `values`, the content of the file (or record) named `origin`, which is a `whole` for the message.

    Raises:
        ConfigError: an unknown key (the nearest known one is suggested), a wrong type or a rule broken.
    """
    try:
        return root.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_explain(root, detail, whole) for detail in error.errors())
        raise ConfigError(f"{origin}: {problems}") from error


def _explain(root: type[BaseModel], detail: Any, whole: str) -> str:
    key = ".".join(map(str, detail["loc"])) or whole
    if detail["type"] == "extra_forbidden":
        return f"unknown key '{key}'{_suggest(root, detail['loc'])}"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return message if message.count(".") else f"{key}: {message}"
    return f"{key}: {message[0].lower()}{message[1:]}, got {detail['input']!r}"


def _suggest(root: type[BaseModel], location: tuple[str | int, ...]) -> str:
    known = _fields_at(root, location[:-1])
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    return f": did you mean '{close[0]}'?" if close else f": expected one of {', '.join(known)}"


def _fields_at(root: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    section = root
    for part in location:
        if isinstance(part, str):  # a number is the place in a list of sections
            annotation = section.model_fields[part].annotation
            section = next(
                t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, BaseModel)
            )
    return list(section.model_fields)

"""The run's TOML file: reading it, and printing a configuration as one with every field explained."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from protocol.config import RunConfig, parse_config
from protocol.errors import ConfigError


def read_config(path: Path) -> RunConfig:
    """The configuration in the file at `path`.

    Raises:
        ConfigError: no such file, not TOML, or not a run.
    """
    return parse_config(read_toml(path, "a run's TOML file"), str(path))


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of the TOML file at `path`, which is `what` for the message.

    Raises:
        ConfigError: no such file, or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"expected {what} at {path}, cannot read it: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected TOML in {path}: {error}") from error


def format_config(config: RunConfig) -> str:
    """The whole configuration as TOML that reads back equal, each field with its sentence."""
    return "\n".join(_lines(config)) + "\n"


def _lines(section: BaseModel) -> Iterator[str]:
    tables: list[tuple[str, BaseModel]] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            tables.append((name, value))
        else:
            assignment = f"# {name} =" if value is None else f"{name} = {_literal(value)}"
            yield f"{assignment:32}# {field.description}"
    for name, table in tables:
        yield f"\n[{name}]"
        yield from _lines(table)


def _literal(value: Any) -> str:
    # JSON's strings, numbers and booleans are TOML's too, but for the one control character that JSON lets stand.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

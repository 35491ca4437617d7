"""The run's TOML file: what is printed reads back, what is no run is told."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from peers.config_file import format_config, read_config
from protocol.config import RunConfig, parse_config
from protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


ODD = parse_config(
    {
        "name": "a-0",
        "seed": 2**63 - 1,
        "model": {"rope_base": 5e5, "norm_epsilon": 1e-12, "qk_norm": False, "dtype": "bfloat16"},
        "data": {"source": "text", "path": 'C:\\my "text" # é🏝\n\t', "tokenizer": "ü.json", "vocab_size": 1 << 32},
        "train": {"epsilon": 1e-300, "learning_rate": 1.0, "clip_norm": 0.0},
    },
    "odd",
)


@pytest.mark.parametrize("config", [RunConfig(), ODD], ids=["default", "odd"])
def test_what_is_printed_reads_back_equal(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(format_config(config), encoding="utf-8")
    assert read_config(path) == config and read_config(path).hash() == config.hash()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_a_run(path: Path, tmp_path: Path) -> None:
    config = read_config(path)
    printed = tmp_path / "run.toml"
    printed.write_text(format_config(config), encoding="utf-8")
    assert read_config(printed) == config and config.name == path.stem


def test_every_field_is_printed_with_its_sentence() -> None:
    text = format_config(RunConfig())
    sections = [RunConfig, *(type(getattr(RunConfig(), name)) for name in tomllib.loads(text) if f"[{name}]" in text)]
    assert len(sections) == 7
    for section in sections:
        for name, field in section.model_fields.items():
            if field.description:
                assert any(name in line and field.description in line for line in text.splitlines()), name
    assert "# path =" in text and "\npath =" not in text  # without a value: shown, not set


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"dim = ", "expected TOML in .*run.toml: Invalid value"),
        (b"name = '\xff'", "expected TOML in .*run.toml: "),
        (b"[model]\ndimm = 3", "run.toml: unknown key 'model.dimm': did you mean 'dim'"),
        (b"[model]\ndim = 5", "run.toml: .*expected dim divisible by heads, got dim = 5"),
        (b"seed = 1\nseed = 2", "expected TOML in .*run.toml: Cannot overwrite a value"),
    ],
)
def test_a_file_that_is_no_run(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "run.toml")


@pytest.mark.parametrize(("name", "message"), [("none.toml", "No such file"), (".", "Is a directory")])
def test_no_file(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"expected a run's TOML file at .*, cannot read it: {message}"):
        read_config(tmp_path / name)

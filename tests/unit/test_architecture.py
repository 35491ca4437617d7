"""The arrows between the packages, proved from the imports: compression <- protocol <- peers."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("compression", "protocol", "peers")
FILES = {path.relative_to(ROOT).as_posix(): path for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imported(name: str) -> set[str]:
    """The modules that the file imports, wherever in it; relative ones in full."""
    found: set[str] = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = name.split("/")[: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def importers(package: str) -> set[str]:
    return {name for name in FILES if any(m == package or m.startswith(package + ".") for m in imported(name))}


def test_arrows_point_one_way() -> None:
    assert len(FILES) > 40
    assert not {name for name in importers("peers") if not name.startswith("peers/")}
    assert not {name for name in importers("protocol") if name.startswith("compression/")}
    assert not importers("tests")


def test_the_step_protocol_is_pure() -> None:
    """No torch outside the model, its optimiser and the reference; no socket, clock or disk anywhere in it."""
    arithmetic = {f"protocol/{name}.py" for name in ("optimizer", "confined_adamw", "muon", "reference")}
    torches = {name for name in importers("torch") if name.startswith("protocol/")}
    assert {name for name in torches if not name.startswith("protocol/model/")} == arithmetic
    for outside in ("asyncio", "socket", "time", "datetime", "threading", "random", "pathlib", "os", "subprocess"):
        assert not {name for name in importers(outside) if not name.startswith("peers/")}, outside


def test_only_the_files_named_after_it_know_hivemind() -> None:
    names = ("transport", "node", "records")
    assert importers("hivemind") == {f"peers/hivemind_{name}.py" for name in names}


@pytest.mark.parametrize(
    "module",
    [
        "peers.cli.app",
        "peers.lab.forwarder",
        "peers.lab.laboratory",
        "protocol.stage_machine",
        "protocol.config",
        "protocol.membership",
        "protocol.frame",
    ],
)
def test_a_light_import_loads_neither_torch_nor_hivemind(module: str) -> None:
    program = f"import sys, {module}; print(sorted({{'torch', 'hivemind', 'matplotlib'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {name.rsplit("/", 1)[0] for name in FILES}
    assert sorted(listed) == sorted(folder.replace("/", ".") for folder in folders)
    assert all(f"{folder}/__init__.py" in FILES for folder in folders)


@pytest.mark.parametrize("name", sorted(FILES))
def test_files_are_short_and_do_not_print(name: str) -> None:
    calls = {node.func.id for node in ast.walk(TREES[name]) if isinstance(node, ast.Call) and hasattr(node.func, "id")}
    assert "print" not in calls
    assert len(FILES[name].read_text().splitlines()) <= 330

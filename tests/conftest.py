"""What several kinds of test share: a small run on small text, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No test may depend on a time being short.
settings.register_profile("isthmus", deadline=None)
settings.load_profile("isthmus")

# Before torch is loaded anywhere: waiting threads must not spin on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_MARK = uuid.uuid4().hex
os.environ["ISTHMUS_TEST_SESSION"] = _MARK


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of tokenizers and tokens that lasts for the session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some real text: the source of the standard library's json package."""
    folder = tmp_path_factory.mktemp("text")
    for source in sorted(Path(json.__file__).parent.glob("*.py")):
        (folder / source.name).write_text(source.read_text())
    return folder


@pytest.fixture
def small_values(text: Path) -> dict[str, Any]:
    """A small run as its TOML file would hold it."""
    return {
        "name": "small",
        "seed": 7,
        "model": {"dim": 32, "layers": 3, "heads": 2, "kv_heads": 1, "hidden": 48},
        "boundary": {"rank": 4, "codec": "float32"},
        "data": {"source": "text", "path": str(text), "vocab_size": 300},
        "train": {
            "steps": 12,
            "microbatches": 4,
            "microbatch_size": 2,
            "sequence_length": 16,
            "warmup_steps": 2,
            "learning_rate": 5e-3,
        },
        "pipeline": {"stages": 3, "window": 3},
        "checkpoint": {"every": 4},
    }


@dataclasses.dataclass(frozen=True)
class SmallRun:
    """A configuration and its data: tokens, or images."""

    config: Any
    tokens: Any


@pytest.fixture
def small_run(small_values: dict[str, Any], cache: Path) -> Callable[..., SmallRun]:
    """Makes a small run; keyword arguments replace whole sections' fields, such as `boundary={"form": "none"}`."""
    from peers.data.token_store import prepare
    from protocol.config import parse_config

    def make(**sections: dict[str, Any]) -> SmallRun:
        values = {k: ({**v, **sections.get(k, {})} if isinstance(v, dict) else v) for k, v in small_values.items()}
        config = parse_config(values, "small.toml")
        return SmallRun(config, prepare(config.data, cache))

    return make


@pytest.fixture
def image_values(small_values: dict[str, Any]) -> dict[str, Any]:
    """The small run on images instead of text, as its TOML file would hold it."""
    values = {**small_values, "data": {"source": "digits"}}
    return {**values, "model": {**values["model"], "family": "vit", "patch": 4}}


@pytest.fixture
def image_run(image_values: dict[str, Any]) -> SmallRun:
    """The small run on images."""
    from peers.data.images import load_images
    from protocol.config import parse_config

    return SmallRun(parse_config(image_values, "images.toml"), load_images("digits"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are then always in the same order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def to_toml(values: dict[str, Any]) -> str:
    """A two-level dictionary as TOML."""
    top = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for key, section in values.items():
        if isinstance(section, dict):
            top += [f"[{key}]", *(f"{name} = {json.dumps(value)}" for name, value in section.items())]
    return "\n".join(top) + "\n"


@pytest.fixture
def write_toml(tmp_path: Path) -> Callable[[str, dict[str, Any]], Path]:
    """Writes a dictionary as a TOML file of the given name and returns its path."""

    def write(name: str, values: dict[str, Any]) -> Path:
        path = tmp_path / name
        path.write_text(to_toml(values))
        return path

    return write


@pytest.fixture
def small_toml(small_values: dict[str, Any], write_toml: Callable[[str, dict[str, Any]], Path]) -> Path:
    """The small run's TOML file."""
    return write_toml("small.toml", small_values)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process that the tests started still runs, and no dead socket of hivemind's is new."""
    before = _dead_sockets()
    yield
    left = _our_processes() | (_dead_sockets() - before)
    assert not left, f"left behind: {sorted(left)}"


def _our_processes() -> set[str]:
    """What was started with this session's mark in its environment, p2pd among it."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _MARK.encode() in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                found.add(f"process {process.name}: {(process / 'cmdline').read_bytes()[:80]!r}")
    return found


def _dead_sockets() -> set[str]:
    """Sockets that no process holds any more; those of other programs on this machine are held.

    Each network namespace lists its own, so one process of each is asked.
    """
    asked: dict[str, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            namespace = os.readlink(process / "ns/net")
            if namespace not in asked:
                asked[namespace] = (process / "net/unix").read_text()
    held = "".join(asked.values())
    return {str(path) for path in Path("/tmp").glob("hivemind-*.sock") if str(path) not in held}

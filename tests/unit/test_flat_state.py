"""States as bytes, the sizes of stages that nobody built, and the checksum of weights."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_chain import chain, microbatches, run_config, same, train

from peers.checkpoints import Checkpoints
from protocol.config import RunConfig, parse_config
from protocol.model import checksum as checksums
from protocol.model import flat
from protocol.model.checksum import checksum
from protocol.model.engine import StageEngine
from protocol.model.stage import whole_model_names
from protocol.model.stage_sizes import stage_sizes, state_layout

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("one_thread")]

FORMS = ("bottleneck", "projected", "reparam", "none")
MOVING = {"basis": "moving", "move_every": 2, "move_rate": 0.3}
CASES = [
    (form, optimizer, moving)
    for form, optimizer, moving in product(FORMS, ("adamw", "muon"), (False, True))
    if not moving or form in ("projected", "reparam")
]


def config_of(form: str, optimizer: str, moving: bool, dtype: str = "float32", **boundary: Any) -> RunConfig:
    return run_config(
        form,
        dtype,
        model={"dtype": dtype},
        boundary={**(MOVING if moving else {}), **boundary},
        train={"optimizer": optimizer},
    )


# States


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("form", "optimizer", "moving"), CASES)
def test_a_state_goes_on_to_the_bit(form: str, optimizer: str, moving: bool, dtype: str) -> None:
    config = config_of(form, optimizer, moving, dtype)
    whole, other = chain(config), chain(config)
    for step in (1, 2, 3):
        train(whole, step, microbatches(step))
    train(other, 1, microbatches(8))
    for engine, loaded in zip(whole, other, strict=True):
        data = engine.state_bytes()
        assert len(data) == engine.state_size and bytes(data) != bytes(loaded.state_bytes())
        loaded.load_state_bytes(bytes(data), 3)
        assert bytes(loaded.state_bytes()) == bytes(data)
    for step in (4, 5):
        again, expected = (train(engines, step, microbatches(step)) for engines in (other, whole))
        assert again[0] == expected[0] and same(again[1], expected[1])
    assert all(same(a.state(), b.state()) for a, b in zip(other, whole, strict=True))


@pytest.mark.parametrize("change", [-4, -1, 1, 4])
def test_a_state_of_another_length_is_refused(change: int) -> None:
    engine = chain(run_config())[1]
    before = bytes(engine.state_bytes())
    with pytest.raises(ValueError, match=f"expected {len(before)} bytes, got {len(before) + change}"):
        engine.load_state_bytes(bytes(len(before) + change), 3)
    assert bytes(engine.state_bytes()) == before


def test_a_state_is_a_copy() -> None:
    engines = chain(run_config())
    taken = engines[0].state_bytes()
    before = bytes(taken)
    train(engines, 1, microbatches(1))
    assert bytes(taken) == before != bytes(engines[0].state_bytes())
    assert isinstance(taken, memoryview) and taken.readonly


def test_another_stages_state_is_kept_without_building_it(tmp_path: Path) -> None:
    """What a holder does: bytes to a checkpoint, a checkpoint to bytes."""
    config = config_of("projected", "muon", True)
    engines = chain(config)
    for step in (1, 2, 3):
        train(engines, step, microbatches(step))
    for stage, engine in enumerate(engines):
        sent, layout = bytes(engine.state_bytes()), state_layout(config, stage)
        state = flat.unpack(sent, layout)
        assert same(state, engine.state())
        checkpoints = Checkpoints(tmp_path, "run-1", keep=1)
        checkpoints.save(stage, 3, state)
        assert bytes(flat.pack(checkpoints.load(stage, 3), layout)) == sent


def test_bytes_are_those_of_the_layout() -> None:
    tensors = {"b": torch.tensor([[1.0, -2.0]]), "a": torch.tensor([0.5], dtype=torch.bfloat16)}
    layout = {"b": (1, 2), "a": (1,)}
    data = flat.pack(tensors, layout)
    assert bytes(data).hex() == "0000803f000000c00000003f" and flat.size(layout) == 12
    for odd in ({"b": tensors["b"]}, {**tensors, "c": tensors["a"]}):
        with pytest.raises(ValueError, match="expected the tensors of the layout"):
            flat.pack(odd, layout)
    with pytest.raises(ValueError, match=r"expected b of shape \(1, 2\), got \(2, 1\)"):
        flat.pack({**tensors, "b": tensors["b"].T}, layout)


def test_bytes_from_anywhere_in_a_buffer_are_unpacked() -> None:
    data = flat.pack({"a": torch.arange(5.0)}, {"a": (5,)})
    shifted = memoryview(b"x" + bytes(data))[1:]
    assert torch.equal(flat.unpack(shifted, {"a": (5,)})["a"], torch.arange(5.0))
    assert bytes(flat.add([shifted, data])) == bytes(flat.pack({"a": 2 * torch.arange(5.0)}, {"a": (5,)}))


# Sizes


def assert_sizes_are_the_engines(config: RunConfig) -> None:
    for stage in range(config.pipeline.stages):
        engine, sizes = StageEngine(config, stage), stage_sizes(config, stage)
        assert sizes.parameters == sum(p.numel() for p in whole_model_names(engine.stage).values())
        assert sizes.state_bytes == len(engine.state_bytes()) == engine.state_size
        assert sizes.state_bytes == sum(x.numel() * x.element_size() for x in engine.state().values())
        assert sizes.part_bytes == len(engine.part(1)) == engine.part_bytes(1)
        moving_step = config.boundary.move_every
        assert sizes.moving_part_bytes == len(engine.part(moving_step)) == engine.part_bytes(moving_step)
        assert (sizes.moving_part_bytes > sizes.part_bytes) == config.moves_basis


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("form", "optimizer", "moving"), CASES)
def test_the_sizes_of_a_stage_that_nobody_built(form: str, optimizer: str, moving: bool, dtype: str) -> None:
    assert_sizes_are_the_engines(config_of(form, optimizer, moving, dtype))


@pytest.mark.parametrize(
    "boundary",
    [
        {"stage_embeddings": False},
        {"stage_embedding": "low_rank", "stage_embedding_size": 3},
        {"stage_embedding": "bigram", "stage_embedding_size": 5},
    ],
    ids=str,
)
def test_with_every_kind_of_stage_embedding(boundary: dict[str, Any]) -> None:
    assert_sizes_are_the_engines(config_of("bottleneck", "muon", False, **boundary))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_of_images(form: str, pooling: str) -> None:
    values = {
        "model": {"family": "vit", "pooling": pooling, "dim": 16, "layers": 3, "heads": 2, "kv_heads": 1, "hidden": 24},
        "boundary": {"form": form, "rank": 4},
        "data": {"source": "digits"},
        "pipeline": {"stages": 3},
    }
    assert_sizes_are_the_engines(parse_config(values, "test"))


def test_of_the_only_stage() -> None:
    assert_sizes_are_the_engines(run_config("reparam", stages=1, boundary=MOVING))


def test_sizes_take_no_memory_and_no_basis() -> None:
    """Of a model that this machine could not hold, whose basis is in a file that it does not have."""
    values = {
        "model": {"dim": 16384, "layers": 128, "heads": 128, "kv_heads": 8, "hidden": 53248},
        "boundary": {"basis": "file", "basis_path": "u.npy", "rank": 64},
        "pipeline": {"stages": 64},
    }
    config = parse_config(values, "test")
    sizes = stage_sizes(config, 5)
    assert sizes.parameters > 6e9 and sizes.part_bytes == 4 * sizes.parameters < sizes.state_bytes
    with pytest.raises(ValueError, match=r"expected a stage in 0\.\.63, got 64"):
        stage_sizes(config, 64)


# The checksum


def weights() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(2)
    return {"a": torch.randn(7, 5, generator=drawn), "b": torch.randn(11, generator=drawn)}


def changed(name: str, change: Any) -> dict[str, torch.Tensor]:
    tensors = {key: x.clone() for key, x in weights().items()}
    bits = tensors[name].view(torch.int32).reshape(-1)
    change(bits)
    return tensors


def swap(bits: torch.Tensor, i: int, j: int) -> None:
    bits[[i, j]] = bits[[j, i]]


def flip(bits: torch.Tensor, bit: int, *places: int) -> None:
    for place in places:
        bits[place] ^= -(1 << 31) if bit == 31 else 1 << bit


def test_any_change_of_weights_changes_the_checksum() -> None:
    seen = {checksum(weights())}
    changes = [lambda bits, b=b, i=i: flip(bits, b, i) for b, i in product(range(32), (0, 3, 10))]
    changes += [lambda bits, b=b: flip(bits, b, 2, 7) for b in range(32)]
    changes += [lambda bits: flip(bits, 31, *range(11)), lambda bits: bits.zero_(), lambda bits: bits.add_(1)]
    changes += [lambda bits, i=i, j=j: swap(bits, i, j) for i, j in ((0, 1), (0, 10), (4, 8))]
    changes += [lambda bits: bits.copy_(bits.roll(1)), lambda bits: bits.copy_(bits.flip(0))]
    for name in weights():
        seen |= {checksum(changed(name, change)) for change in changes}
    assert len(seen) == 1 + 2 * len(changes)


def test_the_checksum_is_of_names_in_order_and_the_same_again() -> None:
    tensors = weights()
    found = checksum(tensors)
    assert found == checksum(tensors) == checksum(dict(reversed(tensors.items()))) and len(found) == 16
    assert found != checksum({"a": tensors["b"], "b": tensors["a"]})
    assert checksum({"a": torch.zeros(3)}) != checksum({"a": -torch.zeros(3)})


def test_the_checksum_is_its_formula() -> None:
    """In whole numbers without end, as any other peer's hardware must find it."""
    joined = 0
    for _, x in sorted(weights().items()):
        total = 0
        for i, bits in enumerate(x.reshape(-1).view(torch.int32).tolist(), start=1):
            mixed = (bits % 2**32) * (i * 0x9E3779B97F4A7C15 | 1) % 2**64
            total += mixed ^ (mixed >> 32)
        joined = (joined * 0x100000001B3 + total) % 2**64
        joined ^= joined >> 32
    assert checksum(weights()) == f"{joined:016x}"


def test_the_checksum_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checksum(weights())
    for chunk in (1, 4, 35, 1000):
        monkeypatch.setattr(checksums, "CHUNK", chunk)
        assert checksum(weights()) == found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engines_hash_sees_one_bit_of_its_weights_and_basis(dtype: str) -> None:
    engine = StageEngine(config_of("projected", "muon", True, dtype), 0)
    first = engine.weights_hash()
    assert engine.weights_hash() == first == StageEngine(engine.config, 0).weights_hash()
    state = {name: x.clone() for name, x in engine.state().items()}
    for name in ("weight/layers.0.attention_norm.weight", "basis/U"):
        other = {key: x.clone() for key, x in state.items()}
        other[name].view(torch.int32).reshape(-1)[3] ^= 1
        engine.load(other, 0)
        assert engine.weights_hash() != first
    engine.load(state, 0)
    assert engine.weights_hash() == first


def test_stages_have_other_hashes() -> None:
    assert len({engine.weights_hash() for engine in chain(run_config())}) == 3

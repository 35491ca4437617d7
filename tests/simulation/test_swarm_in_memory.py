"""The real daemons, engine and all, over the in-memory network: exact whatever happens to the frames."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_swarm import Quiet, Swarm, losses
from safetensors.torch import load_file, save_file

from compression.basis import random_basis
from peers import coordinator_daemon, patience, peer_daemon, stage_worker
from peers.cli.remedies import of_volunteer, remedied
from peers.discovery import fetch_manifest
from peers.evaluate import evaluate
from peers.memory_transport import MemoryNetwork
from peers.opening import new_run
from peers.peer_daemon import PeerDaemon
from peers.peer_options import PeerOptions
from peers.run_folder import RunFolder
from peers.verify import verify
from protocol import detector, waiting
from protocol.errors import RunFailed, UserError
from protocol.invite import Invite
from protocol.membership import End
from protocol.reference import Evaluation, ReferenceRun

MOVING = {"basis": "moving", "move_every": 2, "move_rate": 0.3}


@pytest.fixture(autouse=True)
def one_thread_and_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in one order; lost frames are sent again after a moment, not ten seconds."""
    torch.set_num_threads(1)
    monkeypatch.setattr(peer_daemon, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(stage_worker, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(coordinator_daemon, "GOODBYE_SECONDS", 2.0)


@pytest.mark.parametrize("form", ["bottleneck", "projected", "reparam", "none"])
@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int4"])
def test_equals_one_process(form: str, codec: str, small_run: Callable[..., Any], tmp_path: Path) -> None:
    run = small_run(boundary={"form": form, "codec": codec})
    swarm = Swarm(run, tmp_path, MemoryNetwork(1), 5, gradients=tmp_path / "gradients")
    end, observer, results = asyncio.run(swarm.train())
    assert (end.step, end.failed) == (5, False), end
    assert all(isinstance(result, str) for result in results), results
    assert [row["step"] for row in observer.rows] == [1, 2, 3, 4, 5]
    difference = verify(run.config, run.tokens, tmp_path / "gradients", 5, lambda _: None)
    assert difference.within, difference
    assert difference.parameters > 20


EXACT = {"codec": "float32"}
INT4 = {"codec": "int4"}
ZSTD = {"codec": "int3", "gradient_codec": "int4", "lossless": "zstd"}


FIXED = {"window": 2, "credits": "fixed"}
GPIPE = {"schedule": "gpipe"}
UNDISTURBED = [(EXACT, {}, 0), (EXACT, GPIPE, 1), (INT4, FIXED, 2), (INT4, GPIPE, 3), (ZSTD, {}, 4)]


@pytest.mark.parametrize(("boundary", "pipeline", "seed"), UNDISTURBED, ids=str)
def test_exact_over_a_bad_network(
    boundary: dict[str, Any],
    pipeline: dict[str, Any],
    seed: int,
    small_run: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Frames that are lost, doubled, late and out of order change nothing, not even the last bit.

    Nor do the schedule and the credits; nor where gradients are rounded at random: what is rounded is the microbatch,
    not the frame.
    """
    run = small_run(boundary=boundary, pipeline=pipeline)
    network = MemoryNetwork(seed, delay=(0.0, 0.02), loss=0.05, reorder=0.2, duplicate=0.1)
    end, _, results = asyncio.run(Swarm(run, tmp_path / "bad", network, 6, gradients=tmp_path / "gradients").train())
    assert (end.step, end.failed) == (6, False), (end, results)
    difference = verify(run.config, run.tokens, tmp_path / "gradients", 6, lambda _: None)
    assert (difference.loss, difference.gradient) == (0.0, 0.0), f"seed {seed}: {difference}"


@pytest.mark.parametrize("form", ["projected", "reparam"])
@pytest.mark.parametrize("seed", range(2))
def test_a_basis_moves_exactly_over_a_bad_network(
    form: str, seed: int, small_run: Callable[..., Any], tmp_path: Path
) -> None:
    """Several moves; a stage that switched a step early or late, or to other bits, would change gradients."""
    run = small_run(boundary={"form": form, **MOVING}, checkpoint={"every": 3})
    network = MemoryNetwork(seed, delay=(0.0, 0.02), loss=0.05, reorder=0.2, duplicate=0.1)
    end, _, results = asyncio.run(Swarm(run, tmp_path, network, 7, gradients=tmp_path / "gradients").train())
    assert (end.step, end.failed) == (7, False), (end, results)
    difference = verify(run.config, run.tokens, tmp_path / "gradients", 7, lambda _: None)
    assert (difference.loss, difference.gradient) == (0.0, 0.0), f"seed {seed}: {difference}"
    bases = [[kept_basis(tmp_path, peer, step) for peer in range(3)] for step in (6, 7)]
    assert all(torch.equal(basis, of_step[0]) for of_step in bases for basis in of_step)
    assert (bases[0][0] - random_basis(32, 4, 7)).norm() > 0.1
    folders, run_id = [tmp_path / "peers" / str(index) for index in range(3)], RunFolder(tmp_path).open()[0].run_id
    assert evaluate(run.config, run_id, 7, folders, run.tokens) == one_process(run, 7)


def kept_basis(root: Path, peer: int, step: int) -> torch.Tensor:
    """The basis in the peer's checkpoint of `step`."""
    paths = (root / "peers" / str(peer) / "checkpoints").glob(f"stage-*/step-{step:08d}.safetensors")
    own, *copies = [load_file(path)["basis/U"] for path in sorted(paths)]
    assert all(torch.equal(own, copy) for copy in copies)
    return own


def test_a_move_costs_its_bytes_and_no_others(small_run: Callable[..., Any], tmp_path: Path) -> None:
    wires = []
    for name, boundary in {"still": {}, "moving": MOVING}.items():
        run = small_run(boundary={"form": "reparam", **boundary})
        asyncio.run(Swarm(run, tmp_path / name, MemoryNetwork(1), 5).train())
        wires.append(json.loads((tmp_path / name / "report.json").read_text())["wire"])
    still, moving = wires
    moves, boundaries = 2, 2
    assert moving["forward_payload_bytes"] == still["forward_payload_bytes"]
    assert moving["backward_payload_bytes"] - still["backward_payload_bytes"] == moves * boundaries * 32 * 4 * 4
    assert moving["header_bytes"] - still["header_bytes"] == moves * boundaries * 2 * 20


@pytest.mark.parametrize("form", ["projected", "reparam"])
def test_stop_and_resume_across_moves_continue_exactly(
    form: str, small_run: Callable[..., Any], tmp_path: Path
) -> None:
    """Some of what the last stage gathers for a move is gathered before the stop."""
    run = small_run(train={"steps": 400}, boundary={"form": form, **MOVING, "move_every": 5})
    end, _, _ = asyncio.run(Swarm(run, tmp_path / "a", MemoryNetwork(1), 8, stop_after=1).train())
    assert not end.failed and 1 < end.step <= 8
    last = end.step + 8
    end, _, _ = asyncio.run(Swarm(run, tmp_path / "a", MemoryNetwork(2), last, resume=True).train())
    asyncio.run(Swarm(run, tmp_path / "b", MemoryNetwork(1), last).train())
    assert end.step == last and losses(tmp_path / "a") == losses(tmp_path / "b")
    still = small_run(train={"steps": 400}, boundary={"form": form})
    asyncio.run(Swarm(still, tmp_path / "still", MemoryNetwork(1), last).train())
    assert losses(tmp_path / "still")[:5] == losses(tmp_path / "b")[:5]
    assert losses(tmp_path / "still")[5] != losses(tmp_path / "b")[5], "the first move is at the end of step 5"


def test_a_given_basis(small_run: Callable[..., Any], tmp_path: Path) -> None:
    """All train with it; a peer that has another, or none, is told."""
    given = random_basis(32, 4, 99)
    save_file({"U": given}, tmp_path / "u.safetensors")
    run = small_run(boundary={"basis": "file", "basis_path": str(tmp_path / "u.safetensors")})
    swarm = Swarm(run, tmp_path, MemoryNetwork(1), 3, gradients=tmp_path / "gradients", basis_DK=given)
    end, _, results = asyncio.run(swarm.train())
    assert (end.step, end.failed) == (3, False), results
    difference = verify(run.config, run.tokens, tmp_path / "gradients", 3, lambda _: None, basis_DK=given)
    assert (difference.loss, difference.gradient) == (0.0, 0.0)
    other = verify(run.config, run.tokens, tmp_path / "gradients", 3, lambda _: None, basis_DK=random_basis(32, 4, 98))
    assert not other.within
    folders, run_id = [tmp_path / "peers" / str(index) for index in range(3)], RunFolder(tmp_path).open()[0].run_id
    assert evaluate(run.config, run_id, 3, folders, run.tokens, given) == one_process(run, 3, given)
    manifest, key = new_run(run.config, run.tokens, given)
    invite = Invite(manifest.run_id, key.public, ("/memory/x/p2p/x",))

    async def build(basis_DK: torch.Tensor | None) -> None:
        options = PeerOptions(tmp_path, basis_DK=basis_DK)
        said = r"basis differs from the run's: expected fingerprint .*--basis"
        with pytest.raises(UserError, match=said), remedied(of_volunteer(None, None, None)):
            PeerDaemon(MemoryNetwork(1).join("p"), invite, manifest, run.tokens, options)

    asyncio.run(build(random_basis(32, 4, 98)))
    asyncio.run(build(None))


@pytest.mark.parametrize("seed", range(2))
def test_images_over_a_bad_network_equal_one_process(seed: int, image_run: Any, tmp_path: Path) -> None:
    """Nothing in the daemons asks what the integers beside the coordinates stand for."""
    run = image_run
    network = MemoryNetwork(seed, delay=(0.0, 0.02), loss=0.05, reorder=0.2, duplicate=0.1)
    end, _, results = asyncio.run(Swarm(run, tmp_path, network, 6, gradients=tmp_path / "gradients").train())
    assert (end.step, end.failed) == (6, False), (end, results)
    difference = verify(run.config, run.tokens, tmp_path / "gradients", 6, lambda _: None)
    assert (difference.loss, difference.gradient) == (0.0, 0.0), f"seed {seed}: {difference}"
    folders = [tmp_path / "peers" / str(index) for index in range(3)]
    run_id = RunFolder(tmp_path).open()[0].run_id
    assert evaluate(run.config, run_id, 6, folders, run.tokens) == one_process(run, 6)


def one_process(run: Any, steps: int, basis_DK: torch.Tensor | None = None) -> Evaluation:
    """What a process that holds the whole model reaches on the held-out data."""
    reference = ReferenceRun(run.config, basis_DK)
    for step in range(1, steps + 1):
        reference.step(step, [run.tokens.microbatch(run.config, step, m) for m in range(run.config.train.microbatches)])
    return reference.evaluate(run.tokens.held_out_microbatches(run.config))


def test_images_send_a_byte_for_each_label(image_run: Any, tmp_path: Path) -> None:
    asyncio.run(Swarm(image_run, tmp_path, MemoryNetwork(1), 2).train())
    report = json.loads((tmp_path / "report.json").read_text())
    train, rank = image_run.config.train, image_run.config.boundary.rank
    crossings = 2 * train.microbatches * 2  # steps, microbatches, boundaries
    coordinates = train.microbatch_size * 4 * rank * 4  # four patches, float32
    assert report["wire"]["forward_payload_bytes"] == crossings * (coordinates + train.microbatch_size)
    assert report["wire"]["backward_payload_bytes"] == crossings * coordinates
    assert report["tokens"] == 2 * train.microbatches * train.microbatch_size * 4


def test_recompute_changes_no_loss(small_run: Callable[..., Any], tmp_path: Path) -> None:
    for recompute in (False, True):
        run = small_run(pipeline={"recompute": recompute})
        asyncio.run(Swarm(run, tmp_path / str(recompute), MemoryNetwork(1), 3).train())
    assert losses(tmp_path / "False") == losses(tmp_path / "True")


def test_stop_and_resume_continue_exactly(small_run: Callable[..., Any], tmp_path: Path) -> None:
    run = small_run(train={"steps": 400})
    end, _, _ = asyncio.run(Swarm(run, tmp_path / "a", MemoryNetwork(1), 400, stop_after=3).train())
    assert not end.failed and 3 < end.step < 400
    last = end.step + 5
    end, _, _ = asyncio.run(Swarm(run, tmp_path / "a", MemoryNetwork(2), last, resume=True).train())
    assert end.step == last
    asyncio.run(Swarm(run, tmp_path / "b", MemoryNetwork(1), last).train())
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert len(losses(tmp_path / "a")) == last


def test_a_damaged_checkpoint_costs_steps_and_not_the_run(small_run: Callable[..., Any], tmp_path: Path) -> None:
    run = small_run(train={"steps": 400}, checkpoint={"every": 3, "copies": 0})
    asyncio.run(Swarm(run, tmp_path / "a", MemoryNetwork(1), 6).train())
    (newest,) = (tmp_path / "a/peers").glob("*/checkpoints/stage-1/step-00000006.safetensors")
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    end, observer, _ = asyncio.run(Swarm(run, tmp_path / "a", MemoryNetwork(2), 9, resume=True).train())
    assert (end.step, end.failed) == (9, False), end.reason
    assert any("goes on from step 3" in note for note in observer.notes)
    asyncio.run(Swarm(run, tmp_path / "b", MemoryNetwork(1), 9).train())
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.parametrize(("codec", "bytes_of_a_token", "beside"), [("bfloat16", 4 * 2, 0), ("int4", 4 // 2 + 1, 4)])
def test_bytes_are_those_sent(
    codec: str, bytes_of_a_token: int, beside: int, small_run: Callable[..., Any], tmp_path: Path
) -> None:
    """Four coordinates a token; int4 has a scale of one byte for each token, and their unit in each frame."""
    run = small_run(boundary={"codec": codec})
    asyncio.run(Swarm(run, tmp_path, MemoryNetwork(1), 4).train())
    report = json.loads((tmp_path / "report.json").read_text())
    train = run.config.train
    crossings = 4 * train.microbatches * 2  # steps, microbatches, boundaries
    tokens = train.microbatch_size * train.sequence_length
    ids = train.microbatch_size * (train.sequence_length + 1) * 2
    body = tokens * bytes_of_a_token + beside
    assert report["wire"]["forward_payload_bytes"] == crossings * (body + ids)
    assert report["wire"]["backward_payload_bytes"] == crossings * body
    assert report["wire"]["header_bytes"] == 2 * crossings * 20
    assert report["steps"] == 4 and len(report["peers"]) == 3


def test_bytes_of_zstd_are_those_sent(small_run: Callable[..., Any], tmp_path: Path) -> None:
    """Not the bound that zstd declares."""
    sent = {}
    for lossless in ("none", "zstd"):
        run = small_run(boundary={"codec": "float32", "lossless": lossless})
        asyncio.run(Swarm(run, tmp_path / lossless, MemoryNetwork(1), 3).train())
        report = json.loads((tmp_path / lossless / "report.json").read_text())
        sent[lossless] = report["wire"]["forward_payload_bytes"]
    assert losses(tmp_path / "none") == losses(tmp_path / "zstd")
    assert sent["zstd"] < 0.98 * sent["none"]


def test_a_peer_lost_ends_the_run_with_the_reason(
    small_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detector, "BROKEN_FLOOR_SECONDS", 0.5)
    monkeypatch.setattr(detector, "UNKNOWN_SECONDS", 1.0)
    monkeypatch.setattr(detector, "FLOOR_SECONDS", 1.0)
    monkeypatch.setattr(waiting, "CEILING_SECONDS", 2.0)
    run = small_run(train={"steps": 5000})
    network = MemoryNetwork(1)
    swarm = Swarm(run, tmp_path, network, 5000, stop_after=2, newcomers=False)
    swarm._stop_later = lambda coordinator, observer: setattr(  # type: ignore[method-assign]
        observer, "row", lambda row: network.crash("peer-1") if row["step"] == 2 else None
    )

    async def bounded() -> tuple[End, Quiet, list[Any]]:
        task = asyncio.create_task(swarm.train())
        done, _ = await asyncio.wait([task], timeout=120)
        assert done, "the run did not notice the lost peer"
        return task.result()

    monkeypatch.setattr(patience, "ORPHAN_SECONDS", 2.0)
    end, _, results = asyncio.run(bounded())
    assert end.failed and "lost its peer" in end.reason and "nothing was heard from it" in end.reason
    assert any(isinstance(result, RunFailed) for result in results)


def test_other_data_is_refused(small_run: Callable[..., Any], tmp_path: Path) -> None:
    run = small_run()
    manifest, key = new_run(run.config, run.tokens)
    other = dataclasses.replace(run.tokens, fingerprint="0" * 64)
    invite = Invite(manifest.run_id, key.public, ("/memory/x/p2p/x",))

    async def build() -> None:
        with pytest.raises(UserError, match="data differs"):
            PeerDaemon(MemoryNetwork(1).join("p"), invite, manifest, other, PeerOptions(tmp_path))

    asyncio.run(build())


def test_a_forged_manifest_is_refused(small_run: Callable[..., Any]) -> None:
    from protocol.records import record_key, sign_record

    run = small_run()
    manifest, key = new_run(run.config, run.tokens)
    _, forger = new_run(run.config, run.tokens)
    invite = Invite(manifest.run_id, key.public, ("/memory/x/p2p/x",))

    async def look() -> None:
        transport = MemoryNetwork(1).join("p")
        record = sign_record(forger, "manifest", manifest.to_json(), time.time() + 60)
        assert await transport.store(record_key(manifest.run_id, "manifest"), record, 60)
        with pytest.raises(UserError, match="not signed by the inviting coordinator"):
            await fetch_manifest(transport, invite)

    asyncio.run(look())

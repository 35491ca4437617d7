"""What may change when a run is resumed, the chain of manifests that tells of it, which files are of its history."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.checkpoints import Checkpoints
from peers.manifest_chain import ManifestChain
from peers.opening import check_resumed
from peers.run_folder import RunFolder
from protocol.config import RunConfig, parse_config
from protocol.errors import RemoteError, UserError
from protocol.lineage import Lineage
from protocol.manifest import Manifest, check_chain
from protocol.model.stage_sizes import state_layout
from protocol.run_changes import RULES, changes, check_changes, fields
from protocol.signing import SigningKey
from protocol.view import Replica, View

KEY = SigningKey(bytes(range(32)))
CONFIG = RunConfig(name="isle")
FIRST = Manifest(CONFIG, "f" * 64, 5.5, KEY.public, "00ff", None)


def changed(config: RunConfig = CONFIG, **sections: dict[str, Any]) -> RunConfig:
    """The configuration with other values in its sections."""
    values = config.model_dump()
    return parse_config({**values, **{name: {**values[name], **new} for name, new in sections.items()}}, "test")


SLOWER = changed(train={"learning_rate": 1e-3})


class Data:
    """A run's data, by its fingerprint."""

    fingerprint, unigram_loss = "f" * 64, 5.5


def test_each_field_of_the_configuration_has_its_rule() -> None:
    assert list(RULES) == [name for name, _ in fields(CONFIG)]
    assert all(rule.why for rule in RULES.values())


# Where a field may change, a state must fit before and after; what has another layout can be none of these.
OTHER: dict[str, Any] = {
    "boundary.basis_path": None, "boundary.move_every": 7, "boundary.move_rate": 0.2, "boundary.codec": "int8",
    "boundary.gradient_codec": "int6", "boundary.rates": "fixed", "boundary.least_codec": "int3",
    "boundary.least_gradient_codec": "int6", "boundary.block": 32, "boundary.scale": "bfloat16",
    "boundary.levels": "uniform", "boundary.rotation": "hadamard", "boundary.lossless": "zstd", "boundary.keep": 0.5,
    "data.path": None, "data.field": "other", "data.tokenizer": "other.json", "train.steps": 77,
    "train.learning_rate": 0.5, "train.matrix_step": 2.0, "train.momentum": 0.5, "train.warmup_steps": 3,
    "train.final_learning_rate": 0.5, "train.beta1": 0.5, "train.beta2": 0.5, "train.epsilon": 1e-6,
    "train.weight_decay": 0.5, "train.skip_nonfinite": 3, "train.clip_norm": 9.0, "pipeline.schedule": "gpipe",
    "pipeline.window": 2, "pipeline.credits": "fixed", "pipeline.recompute": True, "checkpoint.every": 7,
    "checkpoint.keep": 7, "checkpoint.copies": 0,
}  # fmt: skip


def test_what_may_change_leaves_the_states_as_they_are() -> None:
    assert set(OTHER) == {name for name, rule in RULES.items() if rule.may_change}
    for name, value in OTHER.items():
        section, field = name.split(".")
        other = changed(**{section: {field: value}})
        for stage in range(CONFIG.pipeline.stages):
            assert state_layout(other, stage) == state_layout(CONFIG, stage), name


def test_the_refusal_names_the_fields_with_old_and_new_values(tmp_path: Path) -> None:
    other = changed(
        model={"dim": 256}, boundary={"form": "reparam"}, train={"learning_rate": 1e-3}, data={"vocab_size": 512}
    )
    with pytest.raises(UserError) as caught:
        check_changes(changes(CONFIG, other), "runs/isle")
    text = str(caught.value)
    for part in (
        "runs/isle",
        "model.dim 128 -> 256 (",
        "boundary.form 'bottleneck' -> 'reparam' (",
        "data.vocab_size 4096 -> 512",
    ):
        assert part in text
    assert "learning_rate" not in text
    with pytest.raises(UserError, match="no other value of what a run keeps for good"):
        check_resumed(FIRST, other, tmp_path, Data())  # type: ignore[arg-type]


def test_what_changed_is_the_next_of_the_chain_and_the_run_keeps_its_id(tmp_path: Path) -> None:
    same = check_resumed(FIRST, CONFIG, tmp_path, Data())  # type: ignore[arg-type]
    assert same == FIRST
    second = check_resumed(FIRST, SLOWER, tmp_path, Data())  # type: ignore[arg-type]
    assert (second.run_id, second.previous, second.from_step) == (FIRST.run_id, FIRST.hash, 0)
    assert Manifest.from_json(json.loads(json.dumps(second.to_json()))) == second


def test_data_of_another_fingerprint_is_refused_wherever_it_lies(tmp_path: Path) -> None:
    other = Data()
    other.fingerprint = "e" * 64
    with pytest.raises(UserError, match="this machine's data differs from the run's"):
        check_resumed(FIRST, changed(data={"field": "body"}), tmp_path, other)  # type: ignore[arg-type]


def test_a_chain_of_which_a_link_is_missing_or_another_is_refused() -> None:
    second = FIRST.followed_by(51, SLOWER)
    third = second.followed_by(81, CONFIG)
    check_chain([FIRST, second, third])
    for wrong in ([second, third], [FIRST, third], [FIRST, second, FIRST.followed_by(81, CONFIG)]):
        with pytest.raises(UserError, match=r"expected (manifest \d to follow|a run's first manifest)"):
            check_chain(wrong)
    with pytest.raises(UserError, match="expected manifest 1 to follow"):
        check_chain([FIRST, dataclasses.replace(second, unigram_loss=1.0)])


# The coordinator's folder


class Journal:
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str, dict[str, Any]]] = []

    def note(self, kind: str, text: str, show: bool = True, **more: Any) -> None:
        self.notes.append((kind, text, more))


def view(number: int, restored: int, epoch: int = 0, skipped: tuple[int, ...] = ()) -> View:
    stages = ((Replica("a", start=restored),), (Replica("b", start=restored),))
    return View(number, restored + 1, 300, stages, epoch, restored, skipped=skipped)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path)
    made.create(FIRST, KEY)
    return made


def test_the_first_view_says_from_which_step_a_change_holds(folder: RunFolder) -> None:
    journal = Journal()
    chain = ManifestChain(folder, FIRST.followed_by(0, SLOWER), KEY, journal)  # type: ignore[arg-type]
    assert folder.open()[0] == FIRST, "nobody has gone on with it yet"
    chain.follow(view(4, 50, 1))
    newest = folder.open()[0]
    assert (newest.from_step, newest.previous, newest.run_id) == (51, FIRST.hash, FIRST.run_id)
    assert folder.manifests(KEY.public) == [FIRST, newest] and chain.newest == newest
    [(kind, text, more)] = journal.notes
    assert kind == "changed" and more["from_step"] == 51 and more["manifest"] == newest.hash
    assert more["fields"] == {"train.learning_rate": [0.012, 0.001]} and "train.learning_rate 0.012 -> 0.001" in text
    chain.follow(view(5, 50, 1))
    chain.follow(view(6, 100, 2))
    assert folder.manifests(KEY.public) == [FIRST, newest], "views of the same history change nothing"


def test_going_back_to_before_a_change_is_told_too(folder: RunFolder) -> None:
    chain = ManifestChain(folder, FIRST.followed_by(0, SLOWER), KEY, Journal())  # type: ignore[arg-type]
    chain.follow(view(4, 50, 1))
    chain.follow(view(5, 40, 2))
    assert [manifest.from_step for manifest in folder.manifests(KEY.public)] == [1, 51, 41]
    assert folder.open()[0].config == SLOWER


def test_a_step_that_is_passed_over_is_in_the_chain(folder: RunFolder) -> None:
    journal = Journal()
    chain = ManifestChain(folder, FIRST, KEY, journal)  # type: ignore[arg-type]
    chain.follow(view(1, 0))
    chain.follow(view(2, 50, 1, (57,)))
    newest = folder.open()[0]
    assert (newest.from_step, newest.skipped, newest.previous) == (57, (57,), FIRST.hash)
    assert "step 57 is passed over" in journal.notes[0][1]


def test_a_damaged_chain_is_not_opened(folder: RunFolder) -> None:
    ManifestChain(folder, FIRST.followed_by(0, SLOWER), KEY, Journal()).follow(view(4, 50, 1))  # type: ignore[arg-type]
    (folder.root / "manifests" / "1.json").unlink()
    with pytest.raises(UserError, match="an earlier one is missing"):
        folder.open()


def test_a_coordinator_that_died_while_it_wrote_the_chain_has_lost_nothing(folder: RunFolder) -> None:
    (folder.root / "manifests").mkdir()
    (folder.root / "manifests" / "1.json").write_bytes((folder.root / "manifest.json").read_bytes())
    assert folder.open()[0] == FIRST
    ManifestChain(folder, FIRST.followed_by(0, SLOWER), KEY, Journal()).follow(view(4, 50, 1))  # type: ignore[arg-type]
    assert [manifest.from_step for manifest in folder.manifests(KEY.public)] == [1, 51]


@pytest.mark.parametrize("field", ["first", "previous", "from_step", "history", "skipped"])
def test_a_manifest_without_its_place_in_the_chain_is_refused(field: str) -> None:
    value = FIRST.to_json()
    del value[field]
    with pytest.raises(RemoteError, match="cannot be read"):
        Manifest.from_json(value)


# Which files are of the run's history


@pytest.mark.parametrize(
    ("configs", "written", "step", "accepted"),
    [
        ([(1, "a")], "a", 99, True),
        ([(1, "a"), (51, "b")], "a", 50, True),
        ([(1, "a"), (51, "b")], "a", 51, False),  # of a future that was given up
        ([(1, "a"), (51, "b")], "b", 51, True),
        ([(1, "a"), (51, "b"), (41, "b")], "a", 45, False),
        ([(1, "a"), (51, "b"), (41, "c")], "b", 55, False),
        ([(1, "a"), (51, "b"), (81, "a")], "b", 80, True),
        ([(1, "a"), (0, "b")], "a", 99, True),  # not gone on with yet
    ],
)
def test_a_file_of_another_history_is_none(
    configs: list[tuple[int, str]], written: str, step: int, accepted: bool
) -> None:
    lineage = Lineage(tuple(configs))
    assert lineage.accepts({"config": written, "skipped": ""}, step) is accepted


def test_a_file_from_before_a_step_was_passed_over_is_none_from_that_step_on() -> None:
    before, now = Lineage(((1, "a"),)), Lineage(((1, "a"),), (57,))
    assert now.accepts(before.labels(56), 56) and not now.accepts(before.labels(57), 57)
    assert now.accepts(now.labels(60), 60) and not before.accepts(now.labels(60), 60)
    assert not now.accepts({"config": "a", "skipped": "junk"}, 60)


def test_a_peer_finds_no_file_of_another_history(tmp_path: Path) -> None:
    old = Checkpoints(tmp_path, "isle-0123", keep=9, lineage=FIRST.lineage)
    for step in (50, 60):
        old.save(0, step, {"weight/a": torch.zeros(2)})
    resumed = Checkpoints(tmp_path, "isle-0123", keep=9, lineage=FIRST.followed_by(0, SLOWER).lineage)
    assert resumed.held() == {0: [50, 60]}, "from where it goes on is not known yet"
    assert resumed.follow((), 51) and resumed.held() == {0: [50]}
    assert not resumed.follow((), 51)
    resumed.save(0, 60, {"weight/a": torch.ones(2)})
    assert resumed.held() == {0: [50, 60]} and float(resumed.load(0, 60)["weight/a"][0]) == 1.0
    assert resumed.follow((55,), None) and resumed.held() == {0: [50]}
    assert resumed.follow((55,), 41) and resumed.held() == {}, "the run went back to before the change"

"""The images of a run: which are held out, and that every peer gets the same ones."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from peers.cli.remedies import of_volunteer, remedied
from peers.data.images import load_images, split
from peers.opening import load_data
from protocol.config import RunConfig, parse_config
from protocol.errors import UserError
from protocol.manifest import Manifest, check_data

FINGERPRINT = "9743d4b548f646fb5b42ecf85832137287b0ad1724958d387a2ddf58f9543208"


def run_config(**train: int) -> RunConfig:
    return parse_config({"model": {"family": "vit"}, "data": {"source": "digits"}, "train": train}, "test")


def test_the_digits_are_those_that_were_measured() -> None:
    """Another scikit-learn may bring others; then every figure in docs/vision.md is of another set."""
    data = load_images("digits")
    assert data.train.shape == (1409, 65) and data.held_out.shape == (388, 65)
    assert data.train[:, :-1].min() == 0 and data.train[:, :-1].max() == 16
    assert set(data.held_out[:, -1]) == set(range(10))
    assert np.log(10) - 0.01 < data.unigram_loss < np.log(10)
    assert data.fingerprint == FINGERPRINT


def test_equal_images_are_on_one_side_and_every_image_is_on_one() -> None:
    rows = np.random.default_rng(1).integers(0, 17, (300, 65))
    twice = split(np.concatenate([rows, rows]))
    once = split(rows)
    assert len(twice.train) == 2 * len(once.train) and len(twice.held_out) == 2 * len(once.held_out)
    assert len(once.train) + len(once.held_out) == 300 and 30 < len(once.held_out) < 90
    assert split(rows[::-1]).held_out.tolist() == once.held_out[::-1].tolist()


def test_a_changed_pixel_or_label_changes_the_fingerprint() -> None:
    rows = np.random.default_rng(1).integers(0, 10, (20, 65))
    found = {split(rows).fingerprint}
    for column in (0, 64):
        changed = rows.copy()
        changed[7, column] += 1
        found.add(split(changed).fingerprint)
    assert len(found) == 3


def test_microbatches_cover_the_training_images() -> None:
    data, config = load_images("digits"), run_config(microbatches=2, microbatch_size=100)
    drawn = [data.microbatch(config, step, m) for step in range(1, 8) for m in range(2)]
    assert all(rows.shape == (100, 65) and rows.dtype == np.int64 for rows in drawn)
    seen = np.unique(np.concatenate(drawn), axis=0)
    assert len(seen) == len(np.unique(data.train, axis=0)) - 9  # 1,400 of 1,409 so far, all different
    assert np.array_equal(drawn[3], load_images("digits").microbatch(config, 2, 1))


def test_held_out_microbatches_hold_each_image_once() -> None:
    data = load_images("digits")
    held_out = data.held_out_microbatches(run_config(microbatch_size=100))
    assert [len(rows) for rows in held_out] == [100, 100, 100, 88]
    assert np.array_equal(np.concatenate(held_out), data.held_out)


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"expected scikit-learn, .* pip install 'isthmus\[vision\]'"):
        load_images("digits")


def test_paths_for_images_that_need_none_are_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with (
        pytest.raises(UserError, match=r"expected no data .*: the run's images are digits; leave --data out"),
        remedied(of_volunteer(None, None, None)),
    ):
        load_data(run_config(), data=tmp_path)
    with (
        pytest.raises(UserError, match=r"expected no tokenizer .*: the run's images are digits; leave --tokenizer out"),
        remedied(of_volunteer(None, None, None)),
    ):
        load_data(run_config(), tokenizer=tmp_path)


def test_other_images_are_told_with_a_way_out() -> None:
    manifest = Manifest(run_config(), "a" * 64, 2.3, "k", "n", None)
    with pytest.raises(
        UserError, match=r"expected scikit-learn's digits with fingerprint aaaa.*version of scikit-learn"
    ):
        check_data(manifest, "b" * 64)
    check_data(manifest, "a" * 64)

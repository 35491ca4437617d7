"""The comparison with other pipelines: what is pure in it, and one arm that really runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline_bench.cases import ARMS, LINKS, choose_arms, choose_links, derive
from pipeline_bench.job import Deadline
from pipeline_bench.lab_homes import lab_of
from pipeline_bench.measure import Trained, measure
from pipeline_bench.page import markers, put
from pipeline_bench.processes import MARK, Marked, parse_loopback, parse_stat
from pipeline_bench.results import Results
from pipeline_bench.sampler import Sample, between
from pipeline_bench.table import comparison, floor_seconds

from protocol.config import RunConfig, parse_config
from protocol.errors import RunFailed, UserError

TINY = {
    "model": {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "hidden": 64},
    "data": {"vocab_size": 260},
    "train": {"steps": 50, "microbatches": 2, "microbatch_size": 2, "sequence_length": 16, "warmup_steps": 20},
    "pipeline": {"stages": 2},
}


def tiny() -> RunConfig:
    return parse_config(TINY, "tiny")


def row(arm: str, link: str = "80", speed: float = 100.0, **more: object) -> dict[str, object]:
    numbers = {
        "tokens": 1000,
        "seconds": 1000 / speed,
        "tokens_per_second": speed,
        "step_seconds": 2.0,
        "wire": "bfloat16",
        "sent_bytes_per_token": 512.0,
        "busiest_sent_bytes_per_token": 256.0,
        "busiest_received_bytes_per_token": 128.0,
        "cpu_seconds_per_megabyte": 0.25,
        "cpu_seconds_per_1000_tokens": 1.5,
    }
    return {"arm": arm, "link": link, "key": "k", **numbers, **more}


def test_arms_and_links_are_chosen_in_the_order_of_the_table() -> None:
    assert choose_arms([]) == list(ARMS) and choose_links([]) == list(LINKS)
    assert [arm.name for arm in choose_arms(["torch-1f1b", "isthmus"])] == ["isthmus", "torch-1f1b"]
    with pytest.raises(UserError, match=r"expected --arm of isthmus, .* got 'gloo'"):
        choose_arms(["gloo"])


def test_dense_is_the_plain_model_and_keeps_all_else() -> None:
    narrow, dense = derive(tiny(), False, 8, 4), derive(tiny(), True, 8, 4)
    assert narrow.boundary == tiny().boundary
    assert (dense.boundary.form, dense.boundary.codec, dense.boundary_width) == ("none", "bfloat16", 32)
    assert not dense.boundary.fixed_embedding and not dense.boundary.stage_embeddings
    assert (dense.train.steps, dense.train.microbatches, dense.train.warmup_steps) == (8, 4, 7)
    assert dense.checkpoint.every > 8 and dense.checkpoint.copies == 0
    assert dense.model == tiny().model


def test_the_delay_of_a_link_lies_on_both_sides_of_the_hub() -> None:
    lab = lab_of(LINKS[2])
    assert lab.one_way_seconds(0, 1) == pytest.approx(0.05)
    assert lab.bytes_per_second(0, "coordinator") == pytest.approx(10e6)
    assert lab_of(LINKS[0]).bytes_per_second(0, 1) is None


def test_use_is_linear_between_samples() -> None:
    middle, last = ((200, 20), (40, 4)), ((400, 20), (40, 4))
    samples = [Sample(0.0, 1.0, ((0, 0), (0, 0))), Sample(2.0, 3.0, middle), Sample(4.0, 3.0, last)]
    use = between(samples, 1.0, 3.0)
    assert (use.cpu, use.sent, use.received) == (1.0, (200.0, 20.0), (10.0, 2.0))
    with pytest.raises(ValueError, match="from before the start"):
        between(samples, 1.0, 5.0)


def test_a_row_counts_bytes_and_processors_by_token() -> None:
    samples = [Sample(0.0, 0.0, ((0, 0), (0, 0))), Sample(10.0, 5.0, ((3_000_000, 100_000), (1_000_000, 200_000)))]
    found = measure(Trained(0.0, 10.0, 1000, [2.0, 3.0, 9.0], [1.0], {"wire": "x"}), samples, 500, 2)
    assert found["tokens_per_second"] == 100 and found["step_seconds"] == 3.0
    assert found["sent_bytes_per_token"] == 4000 and found["sent_bytes_per_token_and_boundary"] == 2000
    assert found["busiest_sent_bytes_per_token"] == 3000 and found["busiest_received_bytes_per_token"] == 200
    assert found["cpu_seconds_per_megabyte"] == 1.25 and found["wire"] == "x"
    # Without whole steps, a step is what its tokens take.
    assert measure(Trained(0.0, 10.0, 1000), samples, 500, 2)["step_seconds"] == 5.0


def test_lines_of_proc() -> None:
    numbers = "1 7 7 0 -1 4194560 1 2 3 4 30 12 5 6 20 0 1 0 98765 1 2"
    assert parse_stat(f"42 (p2pd (x) y) S {numbers}") == ("S", "98765", 42)
    text = "a\nb\n    lo: 11 1 0 0 0 0 0 0 22 1 0\n  eth0: 99 1 0 0 0 0 0 0 88 1 0\n"
    assert parse_loopback(text) == (22, 11)


def test_marked_processes_are_found_with_their_children_and_ended() -> None:
    marked = Marked()
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7)); input()'])"
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, env={**os.environ, MARK: marked.mark}
    )
    try:
        deadline = Deadline(60)
        while len(marked.pids()) < 2:
            deadline.check("a child")
        while marked.cpu_seconds() == 0:  # it is counted in hundredths of a second
            deadline.check("the child to compute")
    finally:
        marked.end()
        parent.wait()
    assert marked.pids() == []
    assert marked.cpu_seconds() > 0  # those that are gone still count


def test_the_table_compares_with_the_chain_and_shows_the_floor() -> None:
    floor = {"compute_seconds": 1.0, "wire_seconds": 0.5, "fill_seconds": 0.6, "seconds": 1.6}
    rows = [
        row(
            "isthmus",
            speed=100.0,
            step_over_floor=1.25,
            floor=floor,
            declared_bytes_per_token=12.0,
            frame_bytes_per_token=12.5,
        ),
        row("hivemind-serial", speed=5.0),
        row("torch-1f1b", error="worker-1 ended"),
        row("isthmus", link="200", speed=50.0),
    ]
    assert floor_seconds(rows[0]) == pytest.approx(1.6)
    text = comparison(rows)
    on_80 = text.partition("**80 Mbit/s")[2].splitlines()
    ours = next(line for line in on_80 if "the default codec" in line)
    assert [cell.strip() for cell in ours.split("|")[3:9]] == ["100", "20.00", "-", "2.00", "1.25", "512"]
    assert "bfloat16: 12.00 B/token, framed 12.50" in ours
    assert any("its floor: compute 1.00 s, wire 0.50 s, fill 0.60 s" in line and "| 125 |" in line for line in on_80)
    assert "- torch pipelining over gloo, 1F1B, bf16: worker-1 ended" in on_80
    assert text.index("**200 Mbit/s") < text.index("**80 Mbit/s")
    assert comparison([]) == "Not measured yet."


def test_results_are_kept_and_failures_are_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    Results(path).put(row("isthmus"))
    Results(path).put(row("hivemind-serial", error="gone"))
    results = Results(path)
    assert results.is_done("isthmus", "80", "k")
    assert not results.is_done("isthmus", "80", "other") and not results.is_done("isthmus", "200", "k")
    assert not results.is_done("hivemind-serial", "80", "k")
    results.put(row("isthmus", speed=7.0))
    assert [r["tokens_per_second"] for r in Results(path).rows if r["arm"] == "isthmus"] == [7.0]
    path.write_text("{")
    with pytest.raises(UserError, match="it is damaged"):
        Results(path)


def test_a_section_is_replaced_and_the_rest_stays() -> None:
    begin, end = markers("pipeline")
    once = put(f"above\n{begin}\nold\n{end}\nbelow\n", "pipeline", "new")
    assert once == f"above\n{begin}\n\nnew\n\n{end}\nbelow\n" == put(once, "pipeline", "new")
    with pytest.raises(UserError, match="expected a section"):
        put("above\n", "pipeline", "new")


def test_a_page_has_the_sections_that_the_scripts_write() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()
    assert put(put(text, "pipeline", "x"), "speedrun", "y") != text


def test_a_deadline_says_what_was_waited_for() -> None:
    with pytest.raises(RunFailed, match="timed out waiting for the trainer"):
        Deadline(0).check("the trainer")


def test_an_arm_runs_and_its_training_is_the_runs(
    tmp_path: Path, text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own pipeline over our stages, two processes; its losses are those of one process, also when traced."""
    from pipeline_bench.bench import Terms, run_arm

    from peers.opening import load_data
    from protocol.reference import ReferenceRun

    monkeypatch.setenv("ISTHMUS_CACHE", str(cache))
    run = parse_config({**TINY, "data": {"source": "text", "path": str(text), "vocab_size": 260}}, "tiny")
    (arm,) = choose_arms(["torch-gpipe"])
    terms = Terms(
        steps=1, warmup=1, microbatches=None, window=60, timeout=240, loopback=True, keep=tmp_path, traces=tmp_path
    )
    config = derive(run, True, 2)
    reference, data = ReferenceRun(config), load_data(config)
    found = run_arm(run, arm, LINKS[0], terms)
    losses = [reference.step(step, [data.microbatch(config, step, index) for index in (0, 1)])[0] for step in (1, 2)]
    # Coordinates are rounded to bfloat16, and a last bit decides where to: the update is the same to a thousandth of
    # what it does to the loss.
    untrained = [float(ReferenceRun(config).loss(data.microbatch(config, 2, index)).detach()) for index in (0, 1)]
    effects = [before - after for before, after in zip(untrained, losses[1], strict=True)]
    assert min(effects) > 0.01
    for loss, expected, effect in zip(found["losses"], losses[1], effects, strict=True):
        assert loss == pytest.approx(expected, abs=1e-3 * effect)
    assert found["tokens"] == config.tokens_per_step and found["cpu_seconds"] >= 0
    assert {file.name for file in (tmp_path / "torch-gpipe-unlimited").iterdir()} >= {"job.json", "result.json"}
    trace = json.loads((tmp_path / "torch-gpipe-unlimited.json").read_text())
    stages = [sorted(e["name"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid) for pid in (1, 2)]
    assert set(stages[0]) >= {"F0", "F1", "B0", "B1", "APPLY", "step 2"}
    assert stages[0].count("F1") == 2, "stage 0: each forward, and its message"
    assert stages[1].count("B1") == 2, "stage 1: each backward, and its message"

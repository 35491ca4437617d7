"""What `scripts/chaos` and `scripts/soak` do without a process: scripts, plans, comparison, traces, the soak's page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from swarm.cases import matrix
from swarm.compare import compare
from swarm.sampling import newest_step, sample
from swarm.script import Act, format_script, parse_script, plan
from swarm.soak_report import Samples, draw, report, slope
from swarm.traces import traces

from peers.faults import Fault, Phase
from peers.run_folder import RunFolder, append_lines
from protocol.errors import UserError

REPLICAS = ["0a", "0b", "1a", "1b", "2a", "2b"]


def test_a_script_reads_back_equal() -> None:
    text = "step 20; kill 0a; wait 1.5; start 0a; renew 1b newcomer@2:stop; gone coordinator"
    acts = parse_script(text)
    assert acts[0] == Act("step", "20") and acts[4] == Act("renew", "1b", "newcomer@2:stop")
    assert format_script(acts) == text


@pytest.mark.parametrize("text", ["dance", "step", "step x", "kill", "kill ../x", "kill 0a fault@1", "wait 1 2"])
def test_an_act_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected an act"):
        parse_script(text)


def test_a_plan_follows_from_its_seed_and_makes_good_what_it_does() -> None:
    assert plan(3, REPLICAS, 11, 200, 20) == plan(3, REPLICAS, 11, 200, 20) != plan(4, REPLICAS, 11, 200, 20)
    for seed in range(50):
        acts = plan(seed, REPLICAS, 11, 200, 20)
        down: set[str] = set()
        for act in [*acts, Act("step", "200")]:
            if act.subject.startswith("new-"):
                continue  # nobody needs those
            if act.verb in ("kill", "stop"):
                assert act.subject not in down
                down.add(act.subject)
            elif act.verb in ("start", "renew", "continue"):
                down.remove(act.subject)
            assert act.verb != "step" or not down
        assert parse_script(format_script(acts)) == acts


def test_the_matrix_has_each_phase_at_each_place_and_good_scripts() -> None:
    cases = matrix(3)
    names = {case.name for case in cases}
    assert len(names) == len(cases)
    assert {f"{phase} stage {stage}" for phase in list(Phase)[:7] for stage in range(3)} <= names
    for case in cases:
        assert all("{" not in act.subject for act in case.acts(11))
        assert all(Fault.parse(fault).phase for fault in case.faults_at(11).values())


Make = Any


@pytest.fixture
def runs(tmp_path: Path) -> Make:
    """Makes a run's folder with these losses, and states of stage 0 after step 2."""

    def make(name: str, losses: list[float], *states: torch.Tensor) -> tuple[RunFolder, Path]:
        folder = RunFolder(tmp_path / name)
        folder.root.mkdir()
        append_lines(folder.metrics, [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)])
        for index, state in enumerate(states):
            file = folder.root / f"peers/{index}/checkpoints/stage-0/step-00000002.safetensors"
            file.parent.mkdir(parents=True)
            save_file({"weight/x": state}, file)
        return folder, folder.root / "peers"

    return make


def test_the_same_losses_and_states_are_the_same_run(runs: Make) -> None:
    undisturbed, _ = runs("undisturbed", [5.0, 4.0], torch.ones(4))
    run, peers = runs("run", [5.0, 4.0001], torch.ones(4) * 1.00001, torch.ones(4) * 1.00001)
    found = compare(run, peers, undisturbed, 1, 2)
    assert not found.wrong and found.replicas == [2]
    assert found.loss == pytest.approx(2.5e-5) and found.parameters == pytest.approx(1e-5, rel=0.05)


@pytest.mark.parametrize(
    ("losses", "states", "wrong"),
    [
        ([5.0], [torch.ones(4)], "no rows of steps 2"),
        ([5.0, 4.0, 3.0], [torch.ones(4)], "rows of steps 3, which are none of the run"),
        ([5.0, 4.01], [torch.ones(4)], "a loss differs by 2.5e-03"),
        ([5.0, 4.0], [], "nobody has the state of stage 0 after step 2"),
        ([5.0, 4.0], [torch.ones(4) * 1.01], "parameters differ by 1.0e-02"),
        ([5.0, 4.0], [torch.ones(4), torch.ones(4) * 1.00001], "stage 0 ends with other bits at 1 than at 0"),
    ],
)
def test_any_other_is_not(runs: Make, losses: list[float], states: list[torch.Tensor], wrong: str) -> None:
    undisturbed, _ = runs("undisturbed", [5.0, 4.0], torch.ones(4))
    run, peers = runs("run", losses, *states)
    assert wrong in " ".join(compare(run, peers, undisturbed, 1, 2).wrong)


def test_a_row_that_is_there_twice_is_wrong(runs: Make) -> None:
    undisturbed, _ = runs("undisturbed", [5.0, 4.0], torch.ones(4))
    run, peers = runs("run", [5.0, 4.0], torch.ones(4))
    append_lines(run.metrics, [{"step": 2, "loss": 4.0}])
    assert compare(run, peers, undisturbed, 1, 2).wrong == ["several rows of steps 2"]


def test_processes_sockets_and_temporary_files_are_found(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    assert traces(mark, [tmp_path / "socket"], tmp_path) == []
    (tmp_path / "socket").touch()
    (tmp_path / ".state.abc.tmp").touch()
    command = [sys.executable, "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "MARK": mark}
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        found = traces(mark, [tmp_path / "socket"], tmp_path)
        process.communicate(b"\n")
    assert any(text.startswith(f"process {process.pid}") for text in found)
    assert f"socket {tmp_path / 'socket'} is left" in found
    assert "temporary file .state.abc.tmp is left" in found


def test_a_process_is_sampled(tmp_path: Path) -> None:
    (tmp_path / "daemon.json").write_text(json.dumps({"p2pd": os.getpid()}))
    (tmp_path / "load.json").write_text(json.dumps({"frames": 3, "blobs": 1}))
    found = sample(os.getpid(), tmp_path)
    assert found["rss"] > 1 and found["p2pd"] > 1 and found["threads"] >= 1 and found["files"] >= found["sockets"]
    assert found["frames"] == 3 and found["blobs"] == 1
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert newest_step(tmp_path / "metrics.jsonl") == 2
    assert newest_step(tmp_path / "absent") == 0


def test_a_slope_is_by_the_hour_and_leaves_the_beginning_out() -> None:
    points = [(float(t), 1000.0 if t < 300 else 10 + t / 3600) for t in range(0, 1000, 10)]
    assert slope(points) == pytest.approx(1.0)
    assert slope(points[:20]) is None


def test_the_soaks_page_shows_what_grew(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for t in range(0, 1200, 10):
        lines += [
            {"seconds": t, "kind": "sample", "name": name, "rss": 300 + rate * t / 3600, "files": 20}
            for name, rate in (("coordinator", 0), ("stays-0", 60), ("p1", 900))
        ]
        lines.append({"seconds": t, "kind": "step", "step": t})
    lines.append({"seconds": 60, "kind": "churn", "kill": "p1", "start": "p2"})
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"torn')
    samples = Samples.load(tmp_path / "samples.jsonl")
    page = report(samples, "python scripts/soak x", "soak.png", "")
    assert "20 minutes, 1190 steps; 1 times a peer went (1 killed, 0 by Ctrl-C)" in page
    assert "| stays-0 | MiB resident | 305 | 312.5 | 319.8 | +60.0 |" in page
    assert "| coordinator | open files | 20 | 20 | 20 | +0.0 |" in page
    assert "| p1 |" not in page
    draw(samples, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")

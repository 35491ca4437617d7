"""`isthmus launch`."""

from __future__ import annotations

import json
import logging
import os
import shutil
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import Progress

from peers.cli.coordinator import asked, choose
from peers.cli.coordinator_network import StartOptions
from peers.cli.output import console, say
from peers.cli.remedies import of_launched, of_run, remedied
from peers.config_file import format_config
from peers.files import write_bytes, write_json
from peers.lab.lab_file import LabFile, read_lab
from peers.lab.laboratory import Laboratory
from peers.lab.meeting import check_meeting
from peers.lab.namespaces import why_not
from peers.launch import Swarm
from peers.run_folder import RunFolder
from protocol.config import RunConfig
from protocol.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options of `isthmus launch`, as `peers.cli.app` explains them."""

    peers: int | None
    steps: int | None
    directory: Path | None
    resume: Path | None
    verify: bool
    evaluate: bool
    device: str
    print_config: bool
    lab: Path | None = None
    lab_in_memory: bool = False
    trace: bool = False


def launch(run: Path | None, options: LaunchOptions) -> int:
    """Run coordinator and peers on this machine; the exit code."""
    given, folder = choose(run, options.directory, options.resume)
    resumed = options.resume is not None
    config = asked(given, folder, resumed, one_machine=options.lab is None)
    if options.print_config:
        console.write(format_config(config))
        return 0
    peers = config.pipeline.stages if options.peers is None else options.peers
    _check(config, peers, options.verify, resumed)
    lab = _lab(options, config.pipeline.stages, peers)
    if not resumed:
        folder.refuse_existing()
    gradients = folder.root / "gradients"
    for old in _traces(folder):
        old.unlink()
    try:
        kept = gradients if options.verify else None
        code = _run(run, config, folder, options, peers, lab, kept)
        if options.trace:
            _merge_traces(folder)
        if code == 0 and options.evaluate:
            _evaluate(folder)
        return _verify(folder, gradients) if code == 0 and options.verify else code
    finally:
        if options.verify:
            shutil.rmtree(gradients, ignore_errors=True)


def _lab(options: LaunchOptions, stages: int, peers: int) -> LabFile | None:
    if options.lab is None:
        if options.lab_in_memory:
            raise UserError("expected --lab LAB.toml with --lab-in-memory: for example labs/home-80.toml")
        return None
    lab = read_lab(options.lab)
    if (warning := check_meeting(lab, stages, peers)) is not None:
        say(f"warning: {warning}")
    return lab


def _run(
    run: Path | None,
    config: RunConfig,
    folder: RunFolder,
    options: LaunchOptions,
    peers: int,
    lab: LabFile | None,
    gradients: Path | None,
) -> int:
    """Train: on loopback, in a laboratory, or where there can be none, in this process over its model."""
    reason = "as asked" if options.lab_in_memory else why_not() if lab is not None else None
    if lab is not None and reason is not None:
        say(f"no laboratory ({reason}): the peers run in one process, over the same model of the lines")
        with remedied(of_run(run, options.resume is not None)):
            return _in_memory(config, folder, options, peers, lab, gradients)
    with nullcontext() if lab is None else Laboratory(lab, peers) as opened:
        if opened is not None:
            say(f"laboratory {opened.number}: change a line with scripts/wan_lab set {opened.number} HOME --up MBIT")
        swarm = Swarm(folder, say, spare=peers > config.pipeline.stages, lab=opened)
        resumed = options.resume is not None
        of_coordinator = _coordinator_arguments(run, folder, options.steps, resumed, peers, options.lab)
        return swarm.run(of_coordinator, peers, _peer_arguments(peers, options.device, gradients, options.trace))


def _in_memory(
    config: RunConfig,
    folder: RunFolder,
    options: LaunchOptions,
    peers: int,
    lab: LabFile,
    gradients: Path | None,
) -> int:
    from peers.cli.launch_in_memory import InMemory, launch_in_memory

    start = StartOptions(
        options.steps,
        folder.root,
        options.resume,
        wait_for=peers,
        no_newcomers=True,
        host=None,
        port=None,
        announce=None,
        print_config=False,
        verbose=False,
        with_parent=None,
        shared_cores=os.cpu_count() or 1,
        lab=options.lab,
    )
    what = InMemory(lab, peers, _threads(peers), options.device, gradients, options.trace)
    return launch_in_memory(config, folder, start, what)


def _check(config: RunConfig, peers: int, verify: bool, resumed: bool) -> None:
    stages = config.pipeline.stages
    if peers < stages:
        raise UserError(
            f"expected --peers {stages} or more, at least one for each of the run's {stages} stages, got {peers}: "
            "set pipeline.stages to change their number"
        )
    if verify and peers != stages:
        raise UserError(
            f"expected --peers {stages} for --verify, one for each stage, got {peers}: replicas add their gradients up "
            "in another order than one process, so that only their losses can be compared"
        )
    if verify and config.boundary.rates == "adaptive":
        raise UserError(
            'expected --verify on a run with rates = "fixed", got "adaptive": how a link rounds then follows from its '
            "speed, and one process cannot round alike; leave --verify out, or set boundary.rates"
        )
    if verify and resumed:
        raise UserError("expected --verify on a new run: the reference starts from the initial weights")


def _coordinator_arguments(
    run: Path | None, folder: RunFolder, steps: int | None, resumed: bool, peers: int, lab: Path | None = None
) -> list[str]:
    arguments = ["coordinator", "start", *([str(run)] if run else [])]
    arguments += ["--resume" if resumed else "--dir", str(folder.root)]
    arguments += ["--lab", str(lab)] if lab else []
    # All peers there will ever be are started here, so nobody would come to a stage that has lost its last one.
    arguments += ["--wait-for", str(peers), "--no-newcomers", "--shared-cores", str(os.cpu_count() or 1)]
    return arguments + (["--steps", str(steps)] if steps else [])


def _peer_arguments(peers: int, device: str, gradients: Path | None, trace: bool) -> list[str]:
    arguments = ["--verbose", "--device", device, "--threads", str(_threads(peers))]
    if gradients is not None:
        arguments += ["--keep-gradients", str(gradients)]
    return [*arguments, "--trace"] if trace else arguments


def _merge_traces(folder: RunFolder) -> None:
    """One trace of all peers, in the run's folder."""
    from peers.trace import merge, read_trace

    files = _traces(folder)
    if not files:
        say("  trace     none: no peer wrote one")
        return
    write_bytes(folder.trace, json.dumps(merge(map(read_trace, files))).encode())
    say(f"  trace     {folder.trace} (open it at ui.perfetto.dev, or draw it with scripts/draw_trace)")


def _traces(folder: RunFolder) -> list[Path]:
    return [path for peer in folder.peers() if (path := peer / "trace.json").exists()]


def _threads(peers: int) -> int:
    """Each peer's share of this machine's cores."""
    return max(1, (os.cpu_count() or 1) // peers)


def _evaluate(folder: RunFolder) -> None:
    """Say how the model does on held-out data and add it to the report, or say why not: the run is done either way."""
    try:
        say(f"  held-out  {_held_out(folder)}")
    except KeyboardInterrupt:
        say("  held-out  not evaluated: interrupted")
    except Exception as error:  # whatever it is, it must not cost the run its result
        logger.debug("the evaluation failed", exc_info=True)
        say(f"  held-out  not evaluated: {str(error) or repr(error)}")


def _held_out(folder: RunFolder) -> str:
    from peers.basis_file import load_basis
    from peers.evaluate import evaluate
    from peers.opening import load_data

    manifest = folder.open()[0]
    report, config = json.loads(folder.report.read_text()), manifest.config
    with remedied(of_launched):
        data, basis_DK, steps = load_data(config), load_basis(config), report["steps"]
    found = evaluate(config, manifest.run_id, steps, folder.peers(), data, basis_DK, manifest.lineage)
    write_json(folder.report, report | {"held_out": asdict(found)})
    return f"{found.loss:.4f} nats, {100 * found.accuracy:.2f} % of {found.targets:,} {config.task.unit} right"


def _verify(folder: RunFolder, gradients: Path) -> int:
    from peers.basis_file import load_basis
    from peers.opening import load_data
    from peers.verify import TOLERANCE, verify

    config = folder.open()[0].config
    with remedied(of_launched):
        data, basis_DK = load_data(config), load_basis(config)
    report = json.loads(folder.report.read_text())
    say(f"verifying: one process trains the whole model on the same {report['steps']} steps")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("reference", total=report["steps"])
        difference = verify(
            config,
            data,
            gradients,
            report["steps"],
            lambda step: bar.update(task, completed=step),
            _threads(config.pipeline.stages),
            basis_DK,
            report["skipped_steps"],
        )
    report["verify"] = {
        "max_loss_diff": difference.loss,
        "max_grad_diff": difference.gradient,
        "worst_gradient": difference.worst,
        "steps": difference.steps,
        "parameters": difference.parameters,
        "tolerance": TOLERANCE,
        "within": difference.within,
    }
    write_json(folder.report, report)
    verdict = "equal" if difference.within else "NOT equal"
    say(
        f"  verify    {verdict} within {TOLERANCE:g}: losses differ by at most {difference.loss:.1e}, "
        f"gradients by {difference.gradient:.1e} ({difference.worst or 'bit for bit'}; "
        f"{difference.parameters} tensors, {difference.steps} steps)"
    )
    return 0 if difference.within else 1

"""`isthmus launch`."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import Progress

from peers.cli.common import console, say
from peers.cli.coordinator import choose
from peers.config_file import format_config
from peers.files import write_json
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


def launch(run: Path | None, options: LaunchOptions) -> int:
    """Run coordinator and peers on this machine; the exit code."""
    given, folder = choose(run, options.directory, options.resume)
    resumed = options.resume is not None
    config = folder.open()[0].config if resumed or given is None else given
    if options.print_config:
        console.file.write(format_config(config))
        return 0
    peers = config.pipeline.stages if options.peers is None else options.peers
    _check(config, peers, options.verify, resumed)
    if not resumed:
        folder.refuse_existing()
    gradients = folder.root / "gradients"
    try:
        code = Swarm(folder, say, spare=peers > config.pipeline.stages).run(
            _coordinator_arguments(run, folder, options.steps, resumed, peers),
            peers,
            _peer_arguments(peers, options.device, gradients if options.verify else None),
        )
        if code == 0 and options.evaluate:
            _evaluate(folder)
        return _verify(folder, gradients) if code == 0 and options.verify else code
    finally:
        if options.verify:
            shutil.rmtree(gradients, ignore_errors=True)


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
    run: Path | None, folder: RunFolder, steps: int | None, resumed: bool, peers: int
) -> list[str]:
    arguments = ["coordinator", "start", *([str(run)] if run else []), "--host", "127.0.0.1"]
    arguments += ["--resume" if resumed else "--dir", str(folder.root)]
    # All peers there will ever be are started here, so nobody would come to a stage that has lost its last one.
    arguments += ["--wait-for", str(peers), "--no-newcomers"]
    return arguments + (["--steps", str(steps)] if steps else [])


def _peer_arguments(peers: int, device: str, gradients: Path | None) -> list[str]:
    arguments = ["--verbose", "--device", device, "--threads", str(_threads(peers))]
    if gradients is not None:
        arguments += ["--keep-gradients", str(gradients)]
    return arguments


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
    found = evaluate(config, manifest.run_id, report["steps"], folder.peers(), load_data(config), load_basis(config))
    write_json(folder.report, report | {"held_out": asdict(found)})
    return f"{found.loss:.4f} nats, {100 * found.accuracy:.2f} % of {found.targets:,} {config.task.unit} right"


def _verify(folder: RunFolder, gradients: Path) -> int:
    from peers.basis_file import load_basis
    from peers.opening import load_data
    from peers.verify import TOLERANCE, verify

    config = folder.open()[0].config
    report = json.loads(folder.report.read_text())
    say(f"verifying: one process trains the whole model on the same {report['steps']} steps")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("reference", total=report["steps"])
        difference = verify(
            config,
            load_data(config),
            gradients,
            report["steps"],
            lambda step: bar.update(task, completed=step),
            _threads(config.pipeline.stages),
            load_basis(config),
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

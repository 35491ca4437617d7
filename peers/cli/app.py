"""The command line: its verbs, their options, and how errors become one line and an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peers.cli.common import run_command

app = typer.Typer(
    help="Train transformers over the open internet: each peer holds one stage, a narrow strip of numbers crosses.",
    epilog="Exit codes: 0 done, 1 the run failed, 2 the user's mistake, 3 the network's, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
coordinator_app = typer.Typer(help="Open a run and keep its membership.", no_args_is_help=True)
peer_app = typer.Typer(help="Give this machine to a run.", no_args_is_help=True)
app.add_typer(coordinator_app, name="coordinator")
app.add_typer(peer_app, name="peer")

RunFile = Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="The run's configuration.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Stop after this step (default: the configured steps).")]
Dir = Annotated[Path | None, typer.Option(help="The run's folder (default: runs/NAME-TIME).")]
Resume = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Go on with the run in this folder; with a RUN.toml, by that.")
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the whole configuration and exit.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens to the standard error.")]
Parent = Annotated[int | None, typer.Option("--with-parent", hidden=True)]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")]
Announce = Annotated[
    str | None, typer.Option(metavar="MULTIADDR", help="The address others reach, e.g. /ip4/203.0.113.5/tcp/31337.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="Cores to compute on (default: all).")]
Trace = Annotated[bool, typer.Option("--trace", help="Write what the last steps did, when, to trace.json (Perfetto).")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto: cuda where there is one.")]


@app.command()
def launch(
    run: RunFile = None,
    peers: Annotated[
        int | None, typer.Option(min=1, help="How many peers, at least one for each stage (default: just that).")
    ] = None,
    steps: Steps = None,
    dir: Dir = None,
    resume: Resume = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Compare losses and gradients with one process that holds the model (one peer a stage)."
        ),
    ] = False,
    evaluate: Annotated[
        bool, typer.Option(help="At the end, evaluate the whole model on held-out data, in one process.")
    ] = True,
    device: Device = "auto",
    lab: Annotated[
        Path | None,
        typer.Option(metavar="LAB.toml", help="Let each live behind a line of its own, e.g. labs/home-80.toml (root)."),
    ] = None,
    lab_in_memory: Annotated[bool, typer.Option("--lab-in-memory", hidden=True)] = False,
    print_config: PrintConfig = False,
    trace: Trace = False,
) -> None:
    """Run a coordinator and its peers on this machine, each its own process, over the real transport."""
    from peers.cli import launch as command

    options = command.LaunchOptions(
        peers, steps, dir, resume, verify, evaluate, device, print_config, lab, lab_in_memory, trace
    )
    raise typer.Exit(command.launch(run, options))


@coordinator_app.command("start")
def coordinator_start(
    run: RunFile = None,
    steps: Steps = None,
    dir: Dir = None,
    resume: Resume = None,
    wait_for: Annotated[
        int | None,
        typer.Option(min=1, help="Peers to wait for before the first step (default: one for each stage)."),
    ] = None,
    no_newcomers: Annotated[
        bool,
        typer.Option("--no-newcomers", help="End the run when a stage has lost its last peer, instead of waiting."),
    ] = False,
    host: Annotated[
        str | None, typer.Option(help="The local address to listen on (default: all, or as before with --resume).")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The port to listen on (default: a free one, or as before with --resume)."),
    ] = None,
    announce: Announce = None,
    print_config: PrintConfig = False,
    verbose: Verbose = False,
    with_parent: Parent = None,
    shared_cores: Annotated[int | None, typer.Option("--shared-cores", min=1, hidden=True)] = None,
    lab: Annotated[Path | None, typer.Option("--lab", hidden=True)] = None,
) -> None:
    """Open a run, print its invite, wait for peers, and show the training."""
    from peers.cli import coordinator as command
    from peers.cli.coordinator_network import StartOptions

    options = StartOptions(
        steps,
        dir,
        resume,
        wait_for,
        no_newcomers,
        host,
        port,
        announce,
        print_config,
        verbose,
        with_parent,
        shared_cores,
        lab,
    )
    raise typer.Exit(command.start(run, options))


@peer_app.command("join")
def peer_join(
    invite: Annotated[str, typer.Argument(help="The line that `isthmus coordinator start` printed.")],
    dir: Annotated[Path | None, typer.Option(help="This peer's folder (default: runs/RUN-ID/peer-N).")] = None,
    data: Annotated[Path | None, typer.Option(help="Where this machine has the run's text.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Where this machine has the run's tokenizer.json, if it uses a given one.")
    ] = None,
    basis: Annotated[
        Path | None, typer.Option(help="Where this machine has the run's basis, if it uses a given one.")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    host: Annotated[
        str | None, typer.Option(help="The local address to listen on (default: all, or loopback for a local run).")
    ] = None,
    port: Port = 0,
    announce: Announce = None,
    no_listen: Annotated[
        bool, typer.Option("--no-listen", help="Accept no connections; peers call back over those opened from here.")
    ] = False,
    keep_gradients: Annotated[Path | None, typer.Option("--keep-gradients", hidden=True)] = None,
    verbose: Verbose = False,
    with_parent: Parent = None,
    fault: Annotated[str | None, typer.Option("--fault", hidden=True)] = None,
    load_file: Annotated[Path | None, typer.Option("--load-file", hidden=True)] = None,
    trace: Trace = False,
) -> None:
    """Join a run, get a stage, and train until the run ends or Ctrl-C."""
    from peers.cli import peer as command

    options = command.JoinOptions(
        dir,
        data,
        tokenizer,
        basis,
        device,
        threads,
        host,
        port,
        announce,
        no_listen,
        keep_gradients,
        verbose,
        with_parent,
        fault,
        load_file,
        trace,
    )
    raise typer.Exit(command.join(invite, options))


@app.command()
def status(invite: Annotated[str, typer.Argument(help="The run's invite.")]) -> None:
    """Show where a run stands, from its signed records in the DHT."""
    from peers.cli import status as command

    raise typer.Exit(command.status(invite))


def main() -> None:
    """Run the command; an error that is meant for a person becomes one line and its exit code."""
    run_command(app)

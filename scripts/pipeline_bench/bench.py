"""The comparison: each arm on each link that is not measured yet, one at a time."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from peers.opening import load_data
from pipeline_bench.arms import Crew, free_port, hivemind_chain, torch_pipeline
from pipeline_bench.cases import Arm, Link, derive
from pipeline_bench.homes import Homes, open_homes
from pipeline_bench.isthmus_arm import AFTER, isthmus
from pipeline_bench.job import Deadline, Job
from pipeline_bench.measure import Row, Trained, measure
from pipeline_bench.processes import Marked
from pipeline_bench.results import Results
from pipeline_bench.sampler import PERIOD_SECONDS, Sampler
from pipeline_bench.traces import write_arm_trace
from protocol.config import RunConfig
from protocol.errors import IsthmusError, UserError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Terms:
    """How each arm is measured.

    Attributes:
        steps: in the window.
        warmup: steps before it.
        microbatches: of a step; None: the configuration's.
        window: seconds after which a chain of hivemind's begins no new round; the others do all steps.
        timeout: seconds for all of an arm, its start included.
        loopback: no laboratory.
        keep: the folder that holds what the processes wrote, kept; None: a temporary one.
        traces: the folder for the trace of a step of each arm; None: not traced.
    """

    steps: int
    warmup: int
    microbatches: int | None
    window: float
    timeout: float
    loopback: bool
    keep: Path | None = None
    traces: Path | None = None

    def trace(self, arm: Arm, link: Link) -> Path | None:
        """Where the arm's trace goes; None: it is not traced."""
        return None if self.traces is None else self.traces / f"{arm.name}-{link.name}.json"

    def key(self, config: RunConfig, arm: Arm) -> str:
        """Stands for all that a row depends on, but for the machine."""
        told = [config.hash(), arm.kind, arm.variant, self.steps, self.warmup, self.microbatches, self.window]
        return hashlib.sha256(json.dumps([*told, self.loopback]).encode()).hexdigest()[:16]


def compare(
    config: RunConfig, arms: Sequence[Arm], links: Sequence[Link], terms: Terms, results: Results, commit: str, say: Say
) -> int:
    """Measure what is missing; how many arms failed. A failure is a row, and the next arm goes on.

    An arm of which only the trace is missing runs again for that, and its row stays.
    """
    load_data(config)  # made once, here, and not by all processes of the first arm at once
    failed = 0
    for link in links:
        for arm in arms:
            key, trace = terms.key(config, arm), terms.trace(arm, link)
            measured = results.is_done(arm.name, link.name, key)
            if measured and (trace is None or trace.exists()):
                say(f"{link!s:24} {arm.name:18} is there")
                continue
            say(f"{link!s:24} {arm.name:18} ...")
            row = attempt(config, arm, link, terms)
            if not measured:
                results.put({"arm": arm.name, "link": link.name, "key": key, "commit": commit, **row})
            failed += "error" in row
            say(f"{link!s:24} {arm.name:18} {describe(row)}")
    return failed


def attempt(config: RunConfig, arm: Arm, link: Link, terms: Terms) -> Row:
    """The row's numbers, or its error."""
    began = time.monotonic()
    try:
        row = run_arm(config, arm, link, terms)
    except IsthmusError as error:
        row = {"error": str(error)}
    except Exception as error:  # whatever it is, the other arms must not be lost with it
        row = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return row | {"wall_seconds": round(time.monotonic() - began, 1)}


def run_arm(config: RunConfig, arm: Arm, link: Link, terms: Terms) -> Row:
    """Run `arm` with all its processes behind `link`, and measure it.

    Raises:
        IsthmusError: it failed, or took too long.
    """
    steps = terms.warmup + terms.steps + (AFTER if arm.kind == "isthmus" else 0)
    own = derive(config, arm.variant != "default", steps, terms.microbatches)
    with ExitStack() as stack:
        folder = _folder(stack, terms.keep, f"{arm.name}-{link.name}")
        row = _run_in(folder, own, arm, link, terms)
        return row | _traced(folder, arm, link, terms, row)


def _run_in(folder: Path, own: RunConfig, arm: Arm, link: Link, terms: Terms) -> Row:
    stages, marked, deadline = own.pipeline.stages, Marked(), Deadline(terms.timeout)
    with ExitStack() as stack:
        homes = open_homes(stack, link, stages + 1, terms.loopback)
        crew = stack.enter_context(Crew(homes, folder, marked))
        sampler = stack.enter_context(Sampler(marked, homes))
        trained = _train(crew, homes, own, arm, terms, deadline)
        time.sleep(2 * PERIOD_SECONDS)  # a sample from after the window
    return measure(trained, sampler.samples, own.tokens_per_step, stages - 1)


def _traced(folder: Path, arm: Arm, link: Link, terms: Terms, row: Row) -> Row:
    """Write the arm's trace, where one is wanted; without one the row says why, and is worth no less."""
    path = terms.trace(arm, link)
    if path is None:
        return {}
    place = "loopback" if terms.loopback else str(link)
    about = {"arm": arm.name, "title": arm.title, "link": place, "step_seconds": row["step_seconds"]}
    try:
        write_arm_trace(folder, path, terms.warmup + terms.steps, about)
    except (UserError, OSError) as error:
        return {"trace_error": str(error)}
    return {}


def _train(crew: Crew, homes: Homes, config: RunConfig, arm: Arm, terms: Terms, deadline: Deadline) -> Trained:
    addresses = [homes.address(index) for index in range(config.pipeline.stages + 1)]
    if arm.kind == "isthmus":
        return isthmus(crew, config, addresses, terms.warmup, deadline, terms.traces is not None)
    job = Job(
        crew.folder,
        config,
        arm.variant,
        addresses,
        terms.warmup,
        terms.steps,
        terms.window,
        free_port(),
        trace=terms.traces is not None,
    )
    job.write()
    return (hivemind_chain if arm.kind == "hivemind" else torch_pipeline)(crew, job, deadline)


def _folder(stack: ExitStack, keep: Path | None, name: str) -> Path:
    if keep is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-bench-")))
    shutil.rmtree(keep / name, ignore_errors=True)
    (keep / name).mkdir(parents=True)
    return keep / name


def describe(row: Row) -> str:
    """The row in a few words."""
    if "error" in row:
        return f"failed after {row['wall_seconds']:.0f} s: {row['error']}"
    untraced = f"; no trace: {row['trace_error']}" if "trace_error" in row else ""
    return (
        f"{row['tokens_per_second']:,.0f} tokens/s, step {row['step_seconds']:.2f} s, "
        f"{row['sent_bytes_per_token_and_boundary']:,.1f} B/token and boundary, "
        f"{row['wall_seconds']:.0f} s in all{untraced}"
    )

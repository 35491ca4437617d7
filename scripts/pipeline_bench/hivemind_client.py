"""The trainer of the hivemind chain: `python -m pipeline_bench.hivemind_client FOLDER`.

It calls one `RemoteExpert` after the other, as hivemind's documentation does: every activation comes back to the
trainer and goes out again, and a backward call sends the input once more. Its home holds no stage.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hivemind.moe.client.expert as client
import torch
from hivemind import DHT
from hivemind.moe.client.expert import RemoteExpert, create_remote_experts
from hivemind.moe.expert_uid import ExpertInfo
from hivemind.p2p import PeerID

from peers.data.run_data import RunData
from peers.opening import load_data
from peers.trace import StepTracer
from pipeline_bench.hivemind_server import P2P, uid
from pipeline_bench.hivemind_trace import Calls, Round, step_spans
from pipeline_bench.job import Job
from pipeline_bench.measure import Trained
from pipeline_bench.traces import process_file
from protocol.config import RunConfig

# hivemind streams a call whose inputs are long. It hangs for ever when a call with short inputs has an answer that does
# not fit into one message of 4 MiB, as the first stage's may: ids in, the stream out. Then all calls are streamed.
LONGEST_ANSWER = 4_000_000  # bytes, at one a number

Microbatch = tuple[int, int]  # step, index


class Chain:
    """The experts in a row, the data, and who is told which microbatch a thread is at."""

    def __init__(self, experts: Sequence[RemoteExpert], config: RunConfig, data: RunData, calls: Calls) -> None:
        self._experts, self._config, self._data, self._calls = experts, config, data, calls

    def train(self, microbatch: Microbatch) -> float:
        """Forward and backward through all of them; the loss in nats."""
        self._calls.begin(microbatch[1])
        ids = torch.from_numpy(self._data.microbatch(self._config, *microbatch))
        first, *middle, last = self._experts
        x = first(ids[:, :-1].contiguous())
        for expert in middle:
            x = expert(x)
        loss: torch.Tensor = last(x, ids[:, 1:].contiguous()).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


def rounds(variant: str, microbatches: int) -> Iterator[list[Microbatch]]:
    """What is in flight at a time: one microbatch, or a whole step's, since its optimiser step needs them all."""
    step = 1
    while True:
        all_of_it = [(step, index) for index in range(microbatches)]
        yield from ([one] for one in all_of_it) if variant == "serial" else [all_of_it]
        step += 1


def connect(job: Job) -> list[RemoteExpert]:
    """The experts of all stages."""
    places = [json.loads(job.place(stage).read_text()) for stage in range(job.config.pipeline.stages)]
    known = [address for place in places for address in place["addresses"]]
    dht = DHT(known, host_maddrs=[f"/ip4/{job.addresses[len(places)]}/tcp/0"], start=True, **P2P)
    infos = [ExpertInfo(uid(stage), PeerID.from_base58(place["peer"])) for stage, place in enumerate(places)]
    experts = create_remote_experts(infos, dht)
    for expert in experts:
        _ = expert.info  # fetched once, outside the window
    return list(experts)


def main(folder: Path) -> None:
    """Train, and tell what was reached."""
    torch.set_num_threads(1)
    job = Job.read(folder)
    if job.config.tokens_per_microbatch * job.config.model.dim > LONGEST_ANSWER:
        client.MAX_UNARY_PAYLOAD_SIZE = 0
    tracer = StepTracer()
    calls = Calls(tracer)
    if job.trace:
        calls.watch(client)
    job_rounds = rounds(job.variant, job.config.train.microbatches)
    chain = Chain(connect(job), job.config, load_data(job.config), calls)
    with ThreadPoolExecutor(job.config.train.microbatches) as pool:
        for _ in range(2 if job.variant == "serial" else job.warmup):
            list(pool.map(chain.train, next(job_rounds)))
        start, ends = time.monotonic(), list[float]()
        losses: list[float] = []
        done: list[Round] = []
        while len(losses) < job.steps * job.config.train.microbatches:
            now, began = next(job_rounds), time.monotonic()
            losses += pool.map(chain.train, now)
            ends.append(time.monotonic())
            done.append((now[0][0], len(now), began, ends[-1]))
            if ends[-1] - start > job.window:
                break
    if job.trace:
        for name, began, end in step_spans(done, job.config.train.microbatches):
            tracer.span("step", name, began, end)
        tracer.write(process_file(job.folder, "trainer"), "trainer")
    tokens = len(losses) * job.config.tokens_per_microbatch
    whole = job.variant != "serial"
    durations = [b - a for a, b in zip([start, *ends], ends, strict=False)] if whole else []
    job.tell(Trained(start, ends[-1], tokens, durations, losses, {"microbatches": len(losses), "wire": "UNIFORM_8BIT"}))
    signal.pause()  # it is ended from outside, which removes the sockets that hivemind would leave


if __name__ == "__main__":
    main(Path(sys.argv[1]))

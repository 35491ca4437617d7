"""One server of the hivemind chain: `python -m pipeline_bench.hivemind_server FOLDER STAGE`.

hivemind's own moe server over our stage, with two departures, both in its favour. Its `Server.create` compresses what
it receives and sends what it answers in float32: here both are compressed. And it would update the weights after every
backward call: here a step's gradients are summed, and the run's optimiser applies them once, like all other arms.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from hivemind import DHT
from hivemind.moe.server.module_backend import ModuleBackend
from hivemind.moe.server.server import Server
from hivemind.proto.runtime_pb2 import CompressionType
from hivemind.utils.tensor_descr import BatchTensorDescriptor

from peers.files import write_json
from peers.trace import NO_TRACE, StepTracer, Tracer
from pipeline_bench.dense_stage import DenseStage, ScoredStage
from pipeline_bench.job import Job
from pipeline_bench.traces import process_file
from protocol.config import RunConfig
from protocol.optimizer import StageOptimizer

# 8 bits a number, hivemind's fewest. Of its three such codecs one needs a package for CUDA, and the one by quantiles
# takes the same bytes and far longer.
COMPRESSION = CompressionType.UNIFORM_8BIT
HANDLERS = 4  # processes that take calls; what its documentation recommends
P2P = {"nat_port_map": False, "auto_nat": False, "use_relay": False}


def uid(stage: int) -> str:
    """The expert's name in hivemind."""
    return f"stage.{stage}"


class SteppingBackend(ModuleBackend):  # type: ignore[misc]
    """Sums the gradients of a step's backward calls, then applies them."""

    tracer: Tracer = NO_TRACE

    def __init__(self, name: str, module: DenseStage, optimizer: StageOptimizer, config: RunConfig, **kw: Any) -> None:
        super().__init__(name, module, **kw)
        self._stage_optimizer, self._microbatches, self._calls = optimizer, config.train.microbatches, 0

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """hivemind's own, timed. Whose microbatch it is, a server does not know."""
        start = time.monotonic()
        outputs: tuple[torch.Tensor, ...] = super().forward(*inputs)
        self.tracer.span("compute", "F", start, time.monotonic())
        return outputs

    def backward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """hivemind's own, timed: a second forward, the backward, and after the last one of a step the update."""
        start = time.monotonic()
        gradients: tuple[torch.Tensor, ...] = super().backward(*inputs)
        self.tracer.span("compute", "B", start, time.monotonic())
        return gradients

    def on_backward(self, batch_size: int) -> None:
        """Called by hivemind's runtime after each backward call."""
        self._calls += 1
        if self._calls % self._microbatches == 0:
            self._stage_optimizer.average(self._microbatches)
            self._stage_optimizer.apply(self._calls // self._microbatches)


def backend(config: RunConfig, stage: int) -> SteppingBackend:
    """The stage as hivemind serves it."""
    size, length = config.train.microbatch_size, config.train.sequence_length
    stream = BatchTensorDescriptor.from_tensor(torch.empty(size, length, config.model.dim), COMPRESSION)
    ids = BatchTensorDescriptor.from_tensor(torch.empty(size, length, dtype=torch.int64))
    loss = BatchTensorDescriptor.from_tensor(torch.empty(size, 1))
    is_last = stage == config.pipeline.stages - 1
    module = ScoredStage(config, stage) if is_last else DenseStage(config, stage)
    return SteppingBackend(
        uid(stage),
        module,
        module.optimizer(config),
        config,
        args_schema=(ids,) if stage == 0 else (stream, ids) if is_last else (stream,),
        outputs_schema=loss if is_last else stream,
        max_batch_size=size,  # a call is a microbatch
    )


def main(folder: Path, stage: int) -> None:
    """Serve until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    torch.set_num_threads(1)
    job = Job.read(folder)
    # Before torch has computed anything: it forks.
    dht = DHT(host_maddrs=[f"/ip4/{job.addresses[stage]}/tcp/0"], start=True, **P2P)
    expert, tracer = backend(job.config, stage), StepTracer()
    if job.trace:
        expert.tracer = tracer
    server = Server(dht, {uid(stage): expert}, HANDLERS, device=torch.device("cpu"), start=True)
    places = [str(address) for address in dht.get_visible_maddrs()]
    write_json(job.place(stage), {"peer": str(dht.peer_id), "addresses": places})
    stop.wait()
    if job.trace:
        tracer.write(process_file(job.folder, f"stage-{stage}"), f"stage {stage}")
    server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

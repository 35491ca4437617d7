"""One stage of torch's own pipeline over gloo: `python -m pipeline_bench.torch_worker FOLDER STAGE`.

Numbers cross in bfloat16, which gloo sends as bytes like any other.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from peers.data.run_data import RunData
from peers.opening import load_data
from peers.trace import NO_TRACE, StepTracer
from pipeline_bench.dense_stage import DenseStage, token_loss
from pipeline_bench.job import Job
from pipeline_bench.measure import Trained
from pipeline_bench.torch_trace import TracedStage, Transfers, in_transit
from pipeline_bench.traces import process_file
from protocol.config import RunConfig

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
WIRE = torch.bfloat16
SIOCGIFADDR = 0x8915  # Linux: the address of a device


class Worker:
    """A stage with its schedule and its optimiser, and, where it is traced, what it did when."""

    def __init__(self, job: Job, index: int) -> None:
        self.tracer, self.transfers = StepTracer() if job.trace else None, Transfers()
        self._config, self._last = job.config, index == job.config.pipeline.stages - 1
        module = DenseStage(job.config, index, WIRE)
        self._optimizer, self._index = module.optimizer(job.config), index
        stage = self._stage(module, index, job.config.pipeline.stages, torch.device("cpu"))
        self._schedule = SCHEDULES[job.variant](
            stage, job.config.train.microbatches, loss_fn=token_loss, scale_grads=False
        )
        self._data: RunData = load_data(job.config)

    def _stage(self, *arguments: Any) -> PipelineStage:
        if self.tracer is None:
            return PipelineStage(*arguments)
        self.transfers.watch()
        return TracedStage(*arguments, tracer=self.tracer)

    def step(self, step: int) -> list[float]:
        """Train a step; at the last stage its losses."""
        self.transfers.clear()
        losses: list[torch.Tensor] = []
        if self._index == 0:
            self._schedule.step(self._ids(step)[:, :-1].contiguous())
        elif self._last:
            self._schedule.step(target=self._ids(step)[:, 1:].contiguous(), losses=losses)
        else:
            self._schedule.step()
        start = time.monotonic()
        self._optimizer.average(self._config.train.microbatches)
        self._optimizer.apply(step)
        (self.tracer or NO_TRACE).span("compute", "APPLY", start, time.monotonic())
        return [float(loss.detach()) for loss in losses]

    def _ids(self, step: int) -> torch.Tensor:
        return step_ids(self._data, self._config, step)


def step_ids(data: RunData, config: RunConfig, step: int) -> torch.Tensor:
    """All of the step's microbatches, one below the other: `[M B, T + 1]`."""
    parts = [data.microbatch(config, step, index) for index in range(config.train.microbatches)]
    return torch.from_numpy(np.concatenate(parts))


def device_of(address: str) -> str:
    """The network device that has the IPv4 address.

    Raises:
        OSError: none has it.
    """
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise OSError(f"expected a network device with the address {address}, there is none")


def main(folder: Path, index: int) -> None:
    """Train. The first stage, whose step ends last, tells the times, the last one the losses, by way of the first."""
    torch.set_num_threads(1)
    job = Job.read(folder)
    stages = job.config.pipeline.stages
    os.environ["GLOO_SOCKET_IFNAME"] = device_of(job.addresses[index])
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{job.addresses[0]}:{job.port}",
        rank=index,
        world_size=stages,
        timeout=timedelta(seconds=600),
    )
    worker = Worker(job, index)
    start, ends, losses = time.monotonic(), [], []
    for step in range(1, job.warmup + job.steps + 1):
        began = time.monotonic()
        found = worker.step(step)
        losses += found if step > job.warmup else []
        ends.append(time.monotonic())
        (worker.tracer or NO_TRACE).step(step, began, ends[-1])
        if step == job.warmup:
            start = ends[-1]
    told: list[list[float]] = [[] for _ in range(stages)]
    dist.all_gather_object(told, losses)
    if index == 0:
        durations = [b - a for a, b in zip([start, *ends[job.warmup :]], ends[job.warmup :], strict=False)]
        tokens = job.steps * job.config.tokens_per_step
        job.tell(Trained(start, ends[-1], tokens, durations, told[-1], {"wire": "bfloat16"}))
    if worker.tracer is not None:
        write_trace(job, index, worker.tracer, worker.transfers)
    dist.destroy_process_group()


def write_trace(job: Job, index: int, tracer: StepTracer, transfers: Transfers) -> None:
    """Write it, with the messages of the last step. Called by all stages at once."""
    came: list[dict[str, tuple[float, float]]] = [{} for _ in job.addresses[:-1]]
    dist.all_gather_object(came, transfers.came)
    for receiver, name, start, end in in_transit(index, transfers.sent, came):
        tracer.span(f"to stage {receiver}", name, start, end)
    tracer.write(process_file(job.folder, f"stage-{index}"), f"stage {index}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

# SPDX-License-Identifier: BSD-3-Clause
"""Section pipeline-sleep: pipelines without delays of gradients, on four real processes whose tasks
sleep for their planned time, so that a few cores are enough: optfuse.pipeline.Pipeline, and the
schedules of torch.distributed.pipelining, beside what the simulator says of both. Messages are real
ones, over gloo, which leave later by the delay of a simulated network."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from argparse import Namespace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from figures import columns, progress, title
from pipeline_flush import of_stages, on
from pipeline_orders import IN_A_V, LOOPED, TURNS, process_of
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage, schedules
from two_processes import given, join, leave, several

import optfuse
from optfuse_tools.ab.result import median_interval

STAGES = 4
MICRO = 2 * STAGES
FORWARD = 0.1  # seconds of F, of dX and of dW of a stage
LATENCIES = (0.0, 0.1, 0.25, 0.5)  # one way, in FORWARD
ROUNDS = 5
WIDTH = 4  # elements of a message
OURS = {  # strategy and in_flight, by the names of pipeline_flush
    "optfuse gpipe": ("gpipe", None),
    "optfuse 1f1b_flush": ("1f1b_flush", None),
    "optfuse fast_forward 1 P": ("fast_forward", STAGES),
    "optfuse fast_forward 1.5 P": ("fast_forward", 3 * STAGES // 2),
    "optfuse fast_forward 2 P": ("fast_forward", 2 * STAGES),
    "optfuse modulo 2 P": ("modulo", 2 * STAGES),
}
THEIRS = {"gpipe": "GPipe", "1f1b": "1F1B"} | {name: name for name in (*LOOPED, *IN_A_V)}


# Layers whose tasks sleep


class Sleeps(torch.autograd.Function):
    """The tensor as it is; its gradient takes so many seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return g, None


class Layer(nn.Module):
    """F, dX and dW take equally long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return x + self.weight
        time.sleep(self.seconds)
        y: Tensor = Sleeps.apply(x, self.seconds) + Sleeps.apply(self.weight, self.seconds)
        return y


def loss_of(y: Tensor, _: Any) -> Tensor:
    return (y * 1.0).sum()  # whose gradient has memory for each element


# The network


class Late(dist.Work):
    """The work of a message that has memory of its own: nobody has to wait for it."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Wire:
    """Sends messages between stages so many seconds later. Those by which optfuse's processes agree
    before and after a run go at once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._send = dist.isend
        self._queue: queue.SimpleQueue[tuple[float, Tensor, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._play, daemon=True).start()
        dist.isend = distributed_c10d.isend = self.isend

    def isend(self, tensor: Tensor, *args: Any, **options: Any) -> dist.Work | None:
        if not tensor.is_floating_point():
            return self._send(tensor, *args, **options)
        due = time.perf_counter() + self.seconds
        self._queue.put((due, tensor.detach().clone(), (args, options)))
        return Late()

    def _play(self) -> None:
        while True:
            due, tensor, (args, options) = self._queue.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            self._send(tensor, *args, **options).wait()


# Steps


class Ours:
    def __init__(self, name: str, latency: float, forward: float) -> None:
        strategy, in_flight = OURS[name]
        turns = TURNS if strategy == "modulo" else 1
        layers, seconds = turns * STAGES, forward / turns
        self.model = nn.Sequential(Layer(0.0), *(Layer(seconds) for _ in range(layers)))
        self.x = torch.ones(1, WIDTH)
        plan = optfuse.pipeline.plan(
            self.model,
            self.x,
            STAGES,
            strategy,
            network=(latency * forward, 0.0),
            costs=[(0.0,) * 4, *[(seconds, seconds, seconds, 0.0)] * layers],
            micro_batches=MICRO,
            in_flight=in_flight,
        )
        plan = on(plan, [i % STAGES for i in range(layers)])
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.pipeline = optfuse.pipeline.Pipeline(plan, self.model, loss_of, optimizer)
        self.mine = [n for n, p in enumerate(plan.places) if p.forward == dist.get_rank()]

    def step(self) -> None:
        self.pipeline.run([self.x] * MICRO, [None] * MICRO)

    def gradient(self) -> float:
        """The gradient that the last step has had, of any element: all are equal."""
        found = {float(e) for n in self.mine for e in self.model[n].weight.detach()}
        with torch.no_grad():
            for n in self.mine:
                self.model[n].weight.zero_()
        return -found.pop() if len(found) == 1 else float("nan")


class Theirs:
    def __init__(self, name: str, _: float, forward: float) -> None:
        several_stages = name in (*LOOPED, *IN_A_V)
        turns = TURNS if several_stages else 1
        mine = [s for s in range(turns * STAGES) if self._process(name, s) == dist.get_rank()]
        self.layers = {s: Layer(forward / turns) for s in mine}
        cpu = torch.device("cpu")
        stages = [PipelineStage(self._module(s), s, turns * STAGES, cpu) for s in self.layers]
        of = getattr(schedules, f"Schedule{THEIRS[name]}")
        given_stages = stages if several_stages else stages[0]
        self.schedule = of(given_stages, MICRO, loss_fn=loss_of, scale_grads=False)
        self.x = torch.ones(MICRO, WIDTH)
        self.target = torch.zeros(MICRO)
        self.first, self.last = 0 in mine, turns * STAGES - 1 in mine

    @staticmethod
    def _process(name: str, stage: int) -> int:
        return process_of(name, stage, STAGES) if name in (*LOOPED, *IN_A_V) else stage

    def _module(self, stage: int) -> nn.Module:
        """The first one has a dX, too."""
        layer = self.layers[stage]
        return nn.Sequential(Layer(0.0), layer) if stage == 0 else layer

    def step(self) -> None:
        arguments = (self.x,) if self.first else ()
        options: dict[str, Any] = {"target": self.target, "losses": []} if self.last else {}
        self.schedule.step(*arguments, **options)

    def gradient(self) -> float:
        found = set()
        for layer in self.layers.values():
            assert layer.weight.grad is not None
            found |= set(map(float, layer.weight.grad))
            layer.weight.grad = None
        return found.pop() if len(found) == 1 else float("nan")


def measure(latencies: list[float], forward: float, rounds: int) -> dict[str, Any]:
    """Seconds of each step of the slowest process, by delays and schedules."""
    wire = Wire()
    found: dict[str, Any] = {}
    for latency in latencies:
        of = {name: Theirs(name, latency, forward) for name in THEIRS}
        of |= {name: Ours(name, latency, forward) for name in OURS}
        wire.seconds = latency * forward
        seconds: dict[str, list[float]] = {name: [] for name in of}
        shuffled = random.Random(0)
        for turn in range(rounds + 1):  # the first warms up
            for name in shuffled.sample(list(of), len(of)):
                took = step(of[name], name)
                seconds[name] += [took] if turn else []
        found[str(latency)] = seconds
    return found


def step(of: Ours | Theirs, name: str) -> float:
    dist.barrier()
    began = time.perf_counter()
    of.step()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    if of.gradient() != MICRO:
        raise RuntimeError(f"{name} has not computed all gradients once")
    return took.item()


def work(rank: int, folder: str, *spec: Any) -> None:
    join(rank, folder, world=STAGES)
    leave(rank, measure(*spec))


# All ranks together


def line(name: str, seconds: list[float], gpipe: list[float], makespan: float, base: float,
         held: float, forward: float) -> dict[str, Any]:  # fmt: skip
    took = median_interval([s / forward for s in seconds])
    gain = median_interval([g / s for g, s in zip(gpipe, seconds, strict=True)])
    return {
        "schedule": name,
        "simulated_F": makespan,
        "measured_F": [took.median, took.low, took.high],
        "simulated_gain": base / makespan,
        "gain": [gain.median, gain.low, gain.high],
        "held": held,
    }


def section(chosen: Namespace) -> dict[str, Any]:
    latencies = list(LATENCIES[1:2] if chosen.smoke else LATENCIES)
    forward, rounds = (0.005, 2) if chosen.smoke else (FORWARD, chosen.rounds or ROUNDS)
    progress("pipeline-sleep")
    found = several(STAGES, __file__, "pipeline-sleep", latencies, forward, rounds)
    rows = []
    for latency in latencies:
        seconds, simulated = found[str(latency)], of_stages(STAGES, latency)
        base = simulated["gpipe"].makespan
        lines = [
            line(name, seconds[name], seconds["gpipe"], one.makespan, base,
                 one.held_bytes / 2520, forward)
            for name, one in simulated.items()
        ]  # fmt: skip
        off = median(one["measured_F"][0] / one["simulated_F"] - 1 for one in lines)
        title(f"delay {latency} F: medians are {100 * off:+.1f} % off the simulation")
        cells: list[tuple[str, ...]] = [("", "F", "simulated", "x GPipe", "simulated")]
        for one in lines:
            took, gain = one["measured_F"], one["gain"]
            cells.append(
                (one["schedule"], f"{took[0]:.2f} [{took[1]:.2f}, {took[2]:.2f}]",
                 f"{one['simulated_F']:.2f}", f"{gain[0]:.3f} [{gain[1]:.3f}, {gain[2]:.3f}]",
                 f"{one['simulated_gain']:.3f}")
            )  # fmt: skip
        print(columns(cells), flush=True)
        rows.append({"latency": latency, "lines": lines})
    return {
        "processes": STAGES,
        "micro_batches": MICRO,
        "forward_s": forward,
        "rounds": rounds,
        "load_average": os.getloadavg()[1],  # of 5 minutes, with what ran beside
        "delays": rows,
    }


if __name__ == "__main__":
    work(*given())

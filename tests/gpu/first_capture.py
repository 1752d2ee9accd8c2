# SPDX-License-Identifier: BSD-3-Clause
"""A process whose first step() is in a CUDA graph's capture, as after a resume: state is
loaded, no kernel of an optimizer was ever launched. See graphs.py.

    first_capture.py forward"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from graphs import Iteration
from harness import On, common
from scenarios import repeatable

STEPS = 4


def saved() -> tuple[Any, Any]:
    """Weights and state after one step, taken on the CPU."""
    model = common.net()
    optimizer = common.adamw(model.parameters(), foreach=False)
    common.train(model, optimizer, 0)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["capturable"] = True  # then load_state_dict() puts step counters on the GPU
    return model.state_dict(), state


def main() -> None:
    on = On(torch.device("cuda"), sys.argv[1])
    repeatable("cuda")
    weights, state = saved()
    Iteration(on, common.Stock()).warm_up(step=False)

    def script(wrap: Any) -> Any:
        one = Iteration(on, wrap)
        one.model.load_state_dict(weights)
        one.optimizer.load_state_dict(copy.deepcopy(state))
        graph = one.capture()
        for i in range(STEPS):
            one.load(10 + i)
            graph.replay()
            yield "loss", one.loss
        yield from common.everything(one.model, one.optimizer)

    ours = common.run(script, common.Fused(on.mode))  # first, so that ours are new to the process
    for (name, a), (_, b) in zip(ours, common.run(script, common.Stock()), strict=True):
        common.assert_same(name, a, b)


if __name__ == "__main__":
    main()

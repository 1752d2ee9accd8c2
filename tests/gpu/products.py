# SPDX-License-Identifier: BSD-3-Clause
"""Muon's matrix products: for how many shapes cuBLAS makes them on this GPU, and what
an update costs the host then. The bits are those of the class in any case; so only a
difference from these fails, and the rest is printed."""

from __future__ import annotations

import time
from typing import Any

import torch
from bits import assert_same_optimizers, deliver, numbers
from harness import On, scenario
from own_rules import MATRICES, parameters, played, recorded
from torch.optim import Muon

import optfuse

SHAPES = (*MATRICES, (768, 768), (768, 3072), (3072, 768), (1000, 999))
QUICK = SHAPES[:-3]
REPEATS = 5
NOT_TRIED = (3.4446, -4.775, 2.0315)  # beside the usual ones, so that the operators multiply


def products() -> int:
    made: int = torch.ops.optfuse.products_by_cublas()
    return made


@scenario(devices=("cuda",))
def products_of_matrices(on: On) -> None:
    shapes = played(QUICK if on.quick else SHAPES, on)
    twins = [parameters(shapes, on, torch.float32) for _ in range(2)]
    gradients = recorded(shapes, on, torch.float32)
    stock, ours = Muon(twins[0]), optfuse.fuse(Muon(twins[1]), mode=on.mode)
    before = 0
    for step in range(6):
        if step == 1:
            optfuse.flush()
            before = products()  # the first update is the class's own, and makes the state
        deliver(stock, gradients(step), "forward")
        deliver(ours, gradients(step), on.mode)
        stock.step()
        ours.step()
        assert_same_optimizers(f"Muon, step {step + 1}", ours, stock, gradients=False)
    optfuse.flush()
    made, each = products() - before, 5 * 3 * 5  # steps, products of an iteration, iterations
    print(f"cuBLAS makes the products of {made / each:g} of {len(shapes)} shapes", flush=True)
    for why in optfuse.summary(ours).products_because:
        print(f"  the operators make others: {why}", flush=True)


def host_time(on: On, coefficients: tuple[float, ...], stock: bool = False) -> tuple[float, int]:
    """Microseconds of an update until everything is launched, the least of some; and how
    many products cuBLAS made in one."""
    values = numbers((512 * 384,), on, torch.float32, 3)[0].view(512, 384)
    param = torch.nn.Parameter(values.clone())
    ours: Any = Muon([param]) if stock else optfuse.fuse(Muon([param]))
    ours.param_groups[0]["ns_coefficients"] = coefficients
    spent, made = [], 0
    for _ in range(2 + REPEATS):
        param.grad = torch.ones_like(param)
        on.api.synchronize()
        made, began = products(), time.perf_counter()
        ours.step()
        optfuse.flush()
        spent.append(time.perf_counter() - began)
        made = products() - made
    return min(spent[2:]) * 1e6, made


@scenario(devices=("cuda",), modes=("forward",))
def host_time_of_products(on: On) -> None:
    usual = Muon([torch.nn.Parameter(torch.ones(2, 2))]).defaults["ns_coefficients"]
    for what, coefficients in ("tried", usual), ("not tried", NOT_TRIED):
        microseconds, made = host_time(on, coefficients)
        print(f"{what}: {made} of 15 products by cuBLAS, {microseconds:.0f} us", flush=True)
        assert coefficients == usual or made == 0, "the operators make what was not tried"
    print(f"stock: {host_time(on, usual, stock=True)[0]:.0f} us", flush=True)

# SPDX-License-Identifier: BSD-3-Clause
"""The parts of torch that optfuse replaces or relies on, looked at and tried."""

from __future__ import annotations

import ctypes
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import SGD

from optfuse import _process
from optfuse._fused.classes import become_fused
from optfuse._library.bindings import Counts, check, lib
from optfuse._link import link_of
from optfuse._options import Options
from optfuse._patches import listed, replacing
from optfuse._rules import RULES
from optfuse_tools.doctor.finding import Finding, in_words

SIZE = 20_000  # elements, above what small updates wait for
_KEEP = "use one of the releases above, or don't fuse"


def findings() -> Iterator[Finding]:
    """The library is connected with torch here."""
    lists = [listed.EVERYWHERE, listed.FINAL_UPDATES, listed.MASTERS, listed.WATCHED]
    if torch.distributed.is_available():
        lists += [listed.AWAITED, listed.DISTRIBUTED, listed.PIPELINES]
    changed = [change for each in lists for change in replacing.changes(each)]
    for change in changed:
        yield Finding("torch differs", f"{change}: {_KEEP}", is_problem=True)
    if not changed:
        replaced = sum(len(each.patches) for each in lists)
        used = sum(len(each.places) for each in lists)
        text = "all that optfuse replaces or relies on is as expected"
        yield Finding("torch's parts", text, details=f"{replaced} replaced, {used} used")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what has just been said
        _process.start()
    missed = list(_missed())
    yield from missed
    if not missed:
        text = "whoever reads a parameter gets its new value: tried by "
        yield Finding("first use", text + ", ".join(USES))


def _address(param: Tensor) -> float:
    return ctypes.c_float.from_address(param.data_ptr()).value


#: Ways to the first number of a parameter.
USES: dict[str, Callable[[Tensor], Any]] = {
    "operators": lambda p: (p * 1)[0].item(),
    "NumPy": lambda p: p.detach().numpy()[0].item(),
    "DLPack": lambda p: torch.utils.dlpack.from_dlpack(p.detach())[0].item(),
    "data_ptr()": _address,
    "untyped_storage()": lambda p: _first_bytes(p.untyped_storage()),
    "torch.save()": lambda p: _saved(p)[0].item(),
}
if importlib.util.find_spec("numpy") is None:  # torch works without
    del USES["NumPy"]


def _first_bytes(storage: Any) -> float:
    return ctypes.c_float.from_address(storage.data_ptr()).value


def _saved(param: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(param.detach(), file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


def _missed() -> Iterator[Finding]:
    for name, use in USES.items():
        try:
            pending, seen = _use_pending(use)
        except Exception as error:
            yield Finding("first use", f"by {name} raised {in_words(error)}", is_problem=True)
            continue
        if not pending:
            text = f"{name}: the update was not left pending, so nothing was seen"
            yield Finding("first use", text)
        elif seen != 0.5:
            text = f"{name} gave {seen}, the parameter before its update: {_KEEP}"
            yield Finding("first use", text, is_problem=True)


def _use_pending(use: Callable[[Tensor], Any]) -> tuple[int, float]:
    """Updates that were pending, and what the use saw of a parameter of 1 that an update makes
    0.5."""
    param = torch.nn.Parameter(torch.ones(SIZE, device="cpu", dtype=torch.float32))
    optimizer = become_fused(SGD([param], lr=0.5), Options(), RULES[SGD])
    param.grad = torch.ones_like(param)
    optimizer.step()
    counts = Counts()
    check(lib.of_shim_counts(link_of(optimizer).plan, ctypes.byref(counts)))
    return int(counts.pending), float(use(param))

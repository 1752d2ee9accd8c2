# SPDX-License-Identifier: BSD-3-Clause
"""The parameters of an optimizer in the order of the library's slots."""

from __future__ import annotations

import ctypes
from collections.abc import Container, Iterable
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from optfuse import _gpu
from optfuse._arguments.check import label
from optfuse._dtensor.local_tensors import Sharded, is_dtensor, local_of
from optfuse._library.bindings import lib

Groups = list[dict[str, Any]]
Tensors = tuple[Tensor | None, ...]
params_of = itemgetter("params")


class Slots:
    """The parameters of one plan, as param_groups had them when the library was told."""

    def __init__(self, plan: int, groups: Groups) -> None:
        self.plan = plan
        self.params: list[Tensor] = list(chain.from_iterable(map(params_of, groups)))
        self.locals: list[Tensor] = list(map(local_of, self.params))  # what the library sees
        self.group_of = [i for i, group in enumerate(groups) for _ in group["params"]]
        self.place_of = [i for group in groups for i in range(len(group["params"]))]
        self.labels = [
            label(g, i, j) for i, g in enumerate(groups) for j in range(len(g["params"]))
        ]
        self.states: list[Tensors | None] = [None] * len(self)  # tensors and counters, as told
        self.sharded: Sharded | None = None  # the DTensors among the parameters
        self.are_plain = {Tensor, Parameter}.issuperset(map(type, self.params))
        self.numbers = {id(p): i for i, p in enumerate(self.params)}
        # Where the update of each parameter was tried, by its id.
        self._places = {id(p): _gpu.ANYWHERE for p in self.params}

    def __len__(self) -> int:
        return len(self.params)

    def number_of(self, param: Tensor) -> int | None:
        return self.numbers.get(id(param))

    def used(self) -> dict[int, int]:
        """The numbers of the gradients that backward fusion has updated with since step(), by the
        ids of their parameters; 0: with none."""
        return {id(p): lib.of_shim_used(self.plan, i) for i, p in enumerate(self.params)}

    def find_places(self, before: Slots, tried: Iterable[Tensor]) -> None:
        """The places where updates were tried. tried: parameters that fuse() or add_param_group()
        has looked at since `before`."""
        places = _gpu.places_of(self.params, before._places, set(map(id, tried)))
        self._places = dict(zip(map(id, self.params), places, strict=True))

    def tell(self, alone: Container[int], used: dict[int, int], tried_on_cpu: int) -> None:
        """Tells the library. alone: ids of parameters whose updates are never left pending. used:
        see used()."""
        torch.ops.optfuse.set_slots(
            self.plan,
            self.locals,
            self.group_of,
            [int(id(p) in alone) for p in self.params],
            [used.get(id(p), 0) for p in self.params],
            [self._places[id(p)] for p in self.params],
            tried_on_cpu,
            self.labels,
        )
        if any(map(is_dtensor, self.params)):
            self.sharded = Sharded(self.plan, self.params, self.labels)

    def attach(self) -> None:
        """Chains our gradient hook with whatever each parameter has. The
        first Python hook that a user registers later takes the place of ours;
        step() then updates that parameter itself and attaches again."""
        torch.ops.optfuse.attach(self.plan, self.locals)
        if self.sharded is not None:
            self.sharded.attach()

    def detach(self, kept: Container[int] = ()) -> None:
        """kept: ids of parameters that stay attached."""
        pairs = zip(self.params, self.locals, strict=True)
        torch.ops.optfuse.detach(self.plan, [local for p, local in pairs if id(p) not in kept])
        if self.sharded is not None:
            self.sharded.detach()

    def sharing(self) -> list[int]:
        """The slots whose state others hold, too. The library leaves their updates to step()."""
        slots = (ctypes.c_size_t * len(self))()
        n = lib.of_shim_sharing_state(self.plan, slots, len(slots))
        return slots[:n]

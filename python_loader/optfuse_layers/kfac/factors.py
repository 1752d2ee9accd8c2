# SPDX-License-Identifier: BSD-3-Clause
"""The factors of a model's layers: what the passes between two steps contribute, on all processes,
and the running averages that it is merged into."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from optfuse._library.bindings import Error
from optfuse_layers import communication, tap
from optfuse_layers.kfac import groups, messages
from optfuse_layers.kfac.layers import Preconditioned

#: The collections of which messages are planned. The first is slower than those that follow.
_TIMED = range(2, 5)
_THRESHOLD = 25 << 20  # bytes of a message, as of DistributedDataParallel's buckets
#: How many of the costs of a message a fusion asks for: seconds a message, a byte, and of the
#: processor a message.
_COSTS = {"paper": 2, "planned": 3}


class Factors:
    """Slot 2 l is A of layer l, slot 2 l + 1 is G. All processes call the methods together."""

    def __init__(
        self,
        layers: Sequence[Preconditioned],
        group: dist.ProcessGroup | None,
        fusion: str | int,
        network: tuple[float, ...] | None,
    ) -> None:
        self.layers = layers
        self.sizes = [d for layer in layers for d in layer.sizes]
        like = _like(layers)
        self.running = [_packed_identity(d, like) for d in self.sizes]
        self.group = groups.own(group)
        self.processes = self.group.size() if self.group else 1
        self.rows: list[float] | None = None  # samples of each process; None: all alike
        self.scale = 1.0  # of the loss
        self.collections = 0
        self.messages = 0  # to other processes, in the last collection
        self._complete: Tensor | None = None  # the shortest seconds until each slot was
        self.arrangement = messages.first(len(layers))
        self._fusion, self._network = fusion, network
        self.handle: int = torch.ops.optfuse.collect_factors(
            [layer.weight for layer in layers],
            [layer.name for layer in layers],
            [layer.bias is not None for layer in layers],
            like,
            self.group.group_name if self.group else "",
        )
        self._finalizer = weakref.finalize(
            self, tap.leave, torch.ops.optfuse.stop_collecting, self.handle, False
        )
        self.arrange(self.arrangement)

    @property
    def is_alive(self) -> bool:
        return self._finalizer.alive

    def stop(self) -> None:
        if self._finalizer.detach():
            tap.leave(torch.ops.optfuse.stop_collecting, self.handle, True)
            if self.group is not None:
                groups.give_back(self.group)

    def unpacked(self, slot: int) -> Tensor:
        found: Tensor = torch.ops.optfuse.unpack_factor(self.running[slot], self.sizes[slot], 0.0)
        return found

    def begin(self) -> None:
        """Before the passes of a step of which the factors are to be collected."""
        weight = 1.0
        if self.rows is not None:
            mine = self.rows[self.group.rank() if self.group else 0]
            weight = mine * self.processes / sum(self.rows)
        torch.ops.optfuse.begin_factors(self.handle, weight)

    def end(self) -> Tensor:
        """Ends a collection, if one runs. Of each slot: uses, rows, when it was complete,
        whether a part came late."""
        told: Tensor = torch.ops.optfuse.end_factors(self.handle)
        torch.ops.optfuse.wait_for_factors(self.handle)
        return told

    def commit(self, decay: float, may_miss: bool) -> set[int]:
        """Merges the collection into the running factors. Returns the layers that have contributed
        nothing. Raises optfuse.Error, on all processes and with nothing changed, if factors would
        be wrong, or, unless they may, layers are missing."""
        told = self.end()
        rows, late, missing = self._exchange(told, may_miss)
        if late and self.group is not None:
            dist.all_reduce(torch.ops.optfuse.late_factors(self.handle), group=self.group)
        self._check_finite(late)
        for n in range(len(self.layers)):
            if n in missing:
                continue
            to_g = rows[n] / (self.processes * self.scale) ** 2
            for slot, by in ((2 * n, 1 / rows[n]), (2 * n + 1, to_g)):
                torch.ops.optfuse.merge_factor(
                    self.handle, slot, self.running[slot], decay, (1 - decay) * by, late
                )
        self.collections += 1
        if self.group is not None:
            self.messages = torch.ops.optfuse.sent_factors(self.handle)
            self._take_times(self.group, told[:, 0] > 0, told[:, 2])
        return missing

    def _take_times(self, group: dist.ProcessGroup, used: Tensor, complete: Tensor) -> None:
        """Plans messages after some collections, by the shortest times: what comes from outside
        only adds, and a plan for passes that are longer than they are sends too many messages."""
        if self.collections not in _TIMED:
            return
        began = complete.where(used, torch.inf).min()
        since = (complete - began).where(used, torch.inf)
        self._complete = since if self._complete is None else self._complete.minimum(since)
        if self.collections == _TIMED[-1]:
            never_used = self._complete.isinf()
            self._plan_messages(group, self._complete.masked_fill(never_used, 0.0).tolist())

    def _exchange(self, told: Tensor, may_miss: bool) -> tuple[list[float], bool, set[int]]:
        """The rows of each layer on all processes; whether anything came late; the layers without
        a contribution. What one process finds wrong, all raise."""
        uses, rows, late = told[:, 0].view(-1, 2), told[::2, 1], told[:, 3].any()
        mine = torch.stack(
            [
                rows,
                (uses[:, 0] == 0).double(),
                (uses[:, 0] != uses[:, 1]).double(),
                late.expand_as(rows).double(),
            ]
        ).to(self.running[0].device)
        said = [mine]
        if self.group is not None:
            said = [torch.empty_like(mine) for _ in range(self.processes)]
            dist.all_gather(said, mine, group=self.group)
        # One value for each process and layer.
        all_rows, none, torn, any_late = torch.stack(said, 1).cpu()
        missing = set(none.any(0).nonzero().flatten().tolist())
        self._check_uses(uses, missing, torn.any(0), may_miss)
        self._check_rows(all_rows, missing)
        return all_rows.sum(0).tolist(), bool(any_late.any()), missing

    def _check_rows(self, rows: Tensor, missing: set[int]) -> None:
        """rows: one number for each process and layer."""
        seen = [n for n in range(len(self.layers)) if n not in missing]
        unequal = [n for n in seen if (rows[:, n] != rows[0, n]).any().item()]
        if self.rows is None:
            differing, way = unequal[:1], "give kfac(rows=[...]) or set KFAC.rows"
        else:
            # A layer may have as many rows on each process all the same.
            given = torch.tensor(self.rows, dtype=torch.float64)
            told = given * rows.sum(0)[:, None] == rows.T * given.sum()
            is_equal = bool((given == given[0]).all())
            asked = unequal if unequal or is_equal else seen
            differing, way = [n for n in asked if not told[n].all()][:1], "correct rows="
        for n in differing:
            raise Error(
                f"optfuse: the rows of layer {self.layers[n].name!r} on the processes are "
                f"{rows[:, n].int().tolist()}, and not in the ratio of their batches, "
                f"{self.rows or 'which are taken for equal'}; {way} to the samples of each "
                "process before the forward pass. Nothing has changed"
            )

    def _check_uses(self, uses: Tensor, missing: set[int], differ: Tensor, may_miss: bool) -> None:
        if missing and not may_miss:
            names = ", ".join(repr(self.layers[n].name) for n in sorted(missing))
            raise Error(
                f"optfuse: no use of layer {names} was seen since the last step(), on one process "
                "at least. Leave it to the optimizer with kfac(skip=[...]), or this step's "
                'gradient as it is with missing="skip". Code of torch.compile or torch.export, '
                "and MultiheadAttention with different queries and keys, compute layers in ways "
                "that can't be seen. Nothing has changed"
            )
        torn = [n for n in differ.nonzero().flatten().tolist() if n not in missing]
        if torn:
            forward, backward = (int(times) for times in uses[torn[0]])
            raise Error(
                f"optfuse: layer {self.layers[torn[0]].name!r} was used {forward} times in "
                f"forward passes since the last step(), and {backward} times in backward passes "
                "(on this process), so its factors would be of different batches. Evaluate under "
                "torch.no_grad(); give a batch up with KFAC.discard(); call backward() once for "
                "each forward pass; or skip the layer with kfac(skip=[...]). Nothing has changed"
            )

    def _check_finite(self, late: bool) -> None:
        sums = torch.ops.optfuse.sums_of_factors(self.handle)
        finite = sums.isfinite().all()
        if late:
            finite = finite & torch.ops.optfuse.late_factors(self.handle).isfinite().all()
        if not finite.item():
            raise Error(
                "optfuse: the inputs of a layer, or the gradients of its outputs, have infinities "
                "or NaN, and the weights' gradients with them. The factors and the weights are as "
                "they were; leave out this step()"
            )

    def _plan_messages(self, group: dist.ProcessGroup, complete: list[float]) -> None:
        device = self.running[0].device
        fusion, threshold = self._fusion, _THRESHOLD
        if isinstance(fusion, int):
            fusion, threshold = "threshold", fusion
        arrangement = messages.arrange(
            fusion,
            threshold,
            self.layers,
            self.running[0].element_size(),
            complete,
            self._costs(group, device),
        )
        self.arrange(communication.agreed(arrangement, group, device))

    def _costs(self, group: dist.ProcessGroup, device: torch.device) -> tuple[float, ...]:
        """The costs that are given, then those that are asked for and measured, then 0."""
        costs = self._network or ()
        if len(costs) < _COSTS.get(self._fusion, 0):
            costs = (*costs, *communication.measured(group, device)[len(costs) :])
        return (*costs, 0.0, 0.0, 0.0)[:3]

    def arrange(self, arrangement: messages.Arrangement) -> None:
        """Between collections."""
        torch.ops.optfuse.arrange_factors(self.handle, arrangement.order, arrangement.group)
        self.arrangement = arrangement


def _packed_identity(d: int, like: Tensor) -> Tensor:
    identity = torch.eye(d, dtype=like.dtype, device=like.device)
    packed: Tensor = torch.ops.optfuse.pack_factor(identity)
    return packed


def _like(layers: Sequence[Preconditioned]) -> Tensor:
    wide = any(layer.weight.dtype == torch.float64 for layer in layers)
    dtype = torch.float64 if wide else torch.float32
    return torch.empty(0, dtype=dtype, device=layers[0].weight.device)

# SPDX-License-Identifier: BSD-3-Clause
"""Process groups for factors: of their own, so that messages never wait behind those of
gradients, nor two models' behind each other's."""

from __future__ import annotations

import torch.distributed as dist

from optfuse._library.bindings import Error

#: By their ranks, those that nobody uses. A group that is made of the same processes again after
#: one was destroyed would have its name, and find the addresses of the old one.
_spare: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except Exception:  # all of them were destroyed
        return False
    return True


def own(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Another one of the same processes, which all call it; None: there is one process."""
    if group is None or group.size() == 1:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    spare = [found for found in _spare.pop(ranks, []) if _is_alive(found)]
    if spare:
        found = spare.pop()
        _spare[ranks] = spare
        return found
    backend = dist.get_backend_config(group)
    of_all = len(ranks) == dist.get_world_size()
    if not of_all:
        _refuse_other_names(group)
    return dist.new_group(list(ranks), backend=backend, use_local_synchronization=not of_all)


def _refuse_other_names(group: dist.ProcessGroup) -> None:
    """Local synchronization names a group by how many groups a process knows, and
    processes that use different names wait for each other for ever. Where a group has all
    processes, PyTorch counts the groups that were made by all."""
    known = len(dist.distributed_c10d._world.pg_names)
    of_each: list[int] = [0] * group.size()
    dist.all_gather_object(of_each, known, group=group)
    if len(set(of_each)) > 1:
        raise Error(
            "optfuse: kfac() can't make a process group for its messages: the processes of "
            f"process_group know {', '.join(map(str, of_each))} process groups, and PyTorch names "
            "a new one by that number. Have each process make as many groups as the others, or "
            "call kfac() before that. Nothing was changed"
        )


def give_back(group: dist.ProcessGroup) -> None:
    """All its processes call it."""
    if _is_alive(group):
        _spare.setdefault(tuple(dist.get_process_group_ranks(group)), []).append(group)

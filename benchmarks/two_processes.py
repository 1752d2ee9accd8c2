# SPDX-License-Identifier: BSD-3-Clause
"""Measurements of a section between processes of one thread each, mostly two. The section starts
a file of its own once for each rank, with pair() or several(), which joins the other ranks and
leaves again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

WORLD = 2
TIMEOUT = timedelta(seconds=60)  # for what another rank sends


def pair(file: str, name: str, *spec: Any) -> dict[str, Any]:
    """The result of rank 0 of two."""
    return several(WORLD, file, name, *spec)


def several(world: int, file: str, name: str, *spec: Any) -> dict[str, Any]:
    """The result of rank 0. All ranks run the file with this spec, which is anything that JSON
    has. Raises RuntimeError, with the name, if one fails; what it said is on stderr."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, file, str(rank), json.dumps([folder, *spec])],
                env=environment,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(world)
        ]
        said = started[0].communicate()[0]
        failed = [rank for rank, process in enumerate(started) if process.wait() != 0]
    if failed:
        raise RuntimeError(f"{name}: rank {failed[0]} failed; what it said is above")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


# In one of them


def given() -> tuple[Any, ...]:
    """The rank, the folder of all, then the spec."""
    return int(sys.argv[1]), *json.loads(sys.argv[2])


def join(rank: int, folder: str, backend: str = "gloo", world: int = WORLD) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)


def leave(rank: int, found: dict[str, Any]) -> None:
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()

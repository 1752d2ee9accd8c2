# SPDX-License-Identifier: BSD-3-Clause
"""Measurements of a section between two processes of one thread each. The section starts a
file of its own once for each rank, with pair(), which joins the other rank and leaves again."""

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
TIMEOUT = timedelta(seconds=60)  # for what the other rank sends


def pair(file: str, name: str, *spec: Any) -> dict[str, Any]:
    """The result of rank 0. Both ranks run the file with this spec, which is anything that JSON
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
            for rank in range(WORLD)
        ]
        said = started[0].communicate()[0]
        failed = [rank for rank, process in enumerate(started) if process.wait() != 0]
    if failed:
        raise RuntimeError(f"{name}: rank {failed[0]} failed; what it said is above")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


# In one of them


def given() -> tuple[Any, ...]:
    """The rank, the folder of both, then the spec."""
    return int(sys.argv[1]), *json.loads(sys.argv[2])


def join(rank: int, folder: str, backend: str = "gloo") -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)


def leave(rank: int, found: dict[str, Any]) -> None:
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()

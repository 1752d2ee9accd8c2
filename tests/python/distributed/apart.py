# SPDX-License-Identifier: BSD-3-Clause
"""Cases that several ranks play and in which one of them goes wrong. On each rank a forked child
plays each case, with a process group of its own, and writes down what came of it.

python MODULE.py FOLDER RANK, by main(). The module's CASES are by names; their `world` ranks call
its play(name, case, here), which returns what is written down."""

import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from several import started

PATIENCE = 300.0  # seconds that a rank lives on


class Here:
    """A rank that plays a case."""

    def __init__(self, folder, rank, number, world):
        self.folder, self.rank, self.number, self.world = folder, rank, number, world

    def place(self, rank):
        return Path(f"{self.folder}/{rank}-{self.number}")

    def write(self, told):
        path = self.place(self.rank)
        path.with_suffix(".new").write_text(json.dumps(told), "utf-8")
        path.with_suffix(".new").rename(path)

    def begin(self, timeout, store="file"):
        """The process group of this case."""
        dist.init_process_group(
            "gloo",
            store=self._tcp() if store == "tcp" else self._file(),
            rank=self.rank,
            world_size=self.world,
            timeout=datetime.timedelta(seconds=timeout),
        )

    def _file(self):
        return dist.FileStore(f"{self.folder}/store-{self.number}", self.world)

    def _tcp(self):
        port = Path(f"{self.folder}/port-{self.number}")
        if self.rank == 0:
            store = dist.TCPStore("localhost", 0, self.world, True, wait_for_workers=False)
            port.with_suffix(".new").write_text(str(store.port))
            port.with_suffix(".new").rename(port)
            return store
        wait_for([port])
        return dist.TCPStore("localhost", int(port.read_text()), self.world, False)

    def wait_for_others(self):
        """Until they have said what came of it."""
        wait_for([self.place(rank) for rank in range(self.world) if rank != self.rank])


def wait_for(paths):
    ends = time.monotonic() + PATIENCE
    while not all(path.exists() for path in paths) and time.monotonic() < ends:
        time.sleep(0.02)


def attempt(function):
    """The exception of a call, as module, type and text."""
    try:
        function()
    except Exception as error:
        return [type(error).__module__, type(error).__name__, str(error)]
    return None


def main(cases, play):
    folder, rank = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    for number, (name, case) in enumerate(cases.items()):
        here = Here(folder, rank, number, case.world)
        if rank >= case.world:
            continue
        if os.fork() == 0:
            play(name, case, here)
            os._exit(0)
        _, status = os.wait()
        if status != 0:
            here.write({"status": os.waitstatus_to_exitcode(status)})


def told(folder, module):
    """The notes of each rank, by case."""
    most = max(case.world for case in module.CASES.values())
    ranks = [started(folder / f"output-{r}", module.__file__, folder, r) for r in range(most)]
    for rank, process in enumerate(ranks):
        assert process.wait(timeout=900) == 0, (folder / f"output-{rank}.errors").read_text("utf-8")
    return {
        name: [
            json.loads(Here(folder, rank, number, case.world).place(rank).read_text("utf-8"))
            for rank in range(case.world)
        ]
        for number, (name, case) in enumerate(module.CASES.items())
    }

# SPDX-License-Identifier: BSD-3-Clause
"""One rank: plays scenarios one after the other, and writes what came of each.

python worker.py FOLDER RANK WORLD MODULE:NAME ..."""

import datetime
import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import folders  # noqa: F401 - scenarios import modules of other folders
import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=30)


def scenario_of(name):
    module, _, scenario = name.partition(":")
    return importlib.import_module(module).SCENARIOS[scenario]


def collect(name, before):
    """Modules that the first scenario of a file has loaded, such as compilers, stay as well."""
    gc.collect()
    if name.partition(":")[0] != before.partition(":")[0]:
        gc.freeze()


def main(folder, rank, world, names):
    torch.set_num_threads(1)
    for name in names:
        scenario_of(name)
    gc.collect()
    gc.freeze()  # what is imported stays; collecting after each scenario needn't look at it
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    with open(f"{folder}/outcomes-{rank}", "w", encoding="utf-8") as out:
        for before, name in zip(["", *names], names, strict=False):
            error = None
            try:
                scenario_of(name)()
                collect(name, before)
                dist.barrier()
            except BaseException:
                error = traceback.format_exc()
            print(json.dumps([name, error]), file=out, flush=True)
            if error:  # the others may wait for this rank for ever
                os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, rank, world, *names = sys.argv[1:]
    main(folder, int(rank), int(world), names)

# SPDX-License-Identifier: BSD-3-Clause
"""Section start: milliseconds that a script waits before it trains: for imports, an optimizer and
fuse(), in fresh processes that take turns with those of stock PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from figures import columns, progress, title

from optfuse_tools.ab.interval import Interval, median_interval

ROUNDS = 15
IMPORT, OPTIMIZER, FUSE = "import optfuse", "AdamW()", "fuse()"
STOCK = {
    "import torch": "import torch",
    OPTIMIZER: "made = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])",
}
OURS = {
    "import torch": STOCK["import torch"],
    IMPORT: IMPORT,
    OPTIMIZER: STOCK[OPTIMIZER],
    FUSE: "optfuse.fuse(made)",
}
PROGRAM = """
import json, sys, time
found = {}
for name, code in json.loads(sys.argv[1]).items():
    begin = time.perf_counter()
    exec(code)
    found[name] = (time.perf_counter() - begin) * 1e3
print(json.dumps(found))
"""


def waited(parts: dict[str, str]) -> dict[str, float]:
    """The milliseconds of each part, in a process of their own."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(parts)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def section(chosen: Any) -> dict[str, Any]:
    title("Milliseconds until a script trains: median and its 95 % interval")
    rounds = []
    for n in range(2 if chosen.smoke else ROUNDS):
        progress(f"start: round {n + 1}")
        rounds.append((waited(STOCK), waited(OURS)))
    ms: dict[str, Interval] = {
        f"{name}, {who}": median_interval([pair[i][name] for pair in rounds])
        for i, (who, parts) in enumerate((("stock", STOCK), ("fused", OURS)))
        for name in parts
    }
    totals = [(sum(stock.values()), sum(ours.values())) for stock, ours in rounds]
    more = median_interval([ours / stock for stock, ours in totals])
    print(columns([("", "ms"), *((name, str(found)) for name, found in ms.items())]))
    print(f"in all, of stock's: {more}")
    return {"ms": ms, "of_stock": more}

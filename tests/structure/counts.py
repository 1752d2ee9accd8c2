# SPDX-License-Identifier: BSD-3-Clause
"""The size of the house: `python tests/structure/counts.py` prints it as JSON. Lines are those of
all tracked files, blank ones and comments too."""

from __future__ import annotations

import json
import re

from test_layers import arrows
from test_modules import edges, floors, folders
from tree import PACKAGES, ROOT, files, modules, sources

#: By the beginning of a file's path; the first that fits counts.
FLOORS = {
    "kernels": "kernels/",
    "planners": "plugin/planners/",
    "plugin": "plugin/",
    "shim": "shim/",
    "optfuse_layers": "python_loader/optfuse_layers/",
    "optfuse_tools": "python_loader/optfuse_tools/",
    "optfuse": "python_loader/",
    "tests": "tests/",
    "benchmarks": "benchmarks/",
    "docs": "docs/",
}
LIBRARY = ("kernels", "planners", "plugin", "shim", "optfuse", "optfuse_layers", "optfuse_tools")
_GUARDS = re.compile(r'OF_GUARD\((\w+)\)|\bguard\("(\w+)"\)')


def lines() -> dict[str, int]:
    found = dict.fromkeys(FLOORS, 0)
    for path in files():
        place = path.relative_to(ROOT).as_posix()
        floor = next((floor for floor, begin in FLOORS.items() if place.startswith(begin)), None)
        if floor is not None and "benchmarks/results/" not in place:
            found[floor] += path.read_bytes().count(b"\n")
    return found


def guards() -> set[str]:
    texts = [path.read_text("utf-8") for path in sources("kernels", "plugin", "shim")]
    texts += [path.read_text("utf-8") for path in modules()]
    return {"".join(found) for text in texts for found in _GUARDS.findall(text)} - {"name"}


def counts() -> dict[str, object]:
    from optfuse._patches import listed

    lists = [value for value in vars(listed).values() if isinstance(value, listed.Lists)]
    by_floor, between = lines(), arrows(ROOT / "shim")
    return {
        "lines": by_floor,
        "lines of the library": sum(by_floor[floor] for floor in LIBRARY),
        "replaced functions of PyTorch": len({p.target for each in lists for p in each.patches}),
        "watched places of PyTorch": sum(len(each.places) for each in lists),
        "private names of PyTorch in C++": len(listed.PRIVATE),
        "named guards": len(guards()),
        "floors of the loader": floors(folders(edges(PACKAGES, only_running=True))),
        "pairs of shim folders that include each other": sum((b, a) in between for a, b in between)
        // 2,
    }


if __name__ == "__main__":
    print(json.dumps(counts(), indent=4))

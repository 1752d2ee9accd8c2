# SPDX-License-Identifier: BSD-3-Clause
"""The table of docs/works-with.md, from rows.py and benchmarks/results/works-with.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rows import ROOT, ROWS, Row
from script_variants import SCRIPTS

PAGE = ROOT / "docs" / "works-with.md"
FOLDER = Path(__file__).resolve().parent
HEAD = (
    "| | package | optimizer | steps | forward mode | backward mode | script | date |",
    "|---" * 8 + "|",
)
# The page's words for an error, by words of its message.
CAUSES = {
    "a second backward\\(\\)": "raises at accumulation",
    "[Cc]lipping": "raises at clipping",
    "backward\\(\\) without zero_grad": "raises: another loss leaves gradients",
    "the Trainer reads the norm": "raises: the Trainer reads all gradients",
    "is changed after it is complete": "raises: a hook reduces gradients",
    "was discarded, zeroed or replaced between": "raises: gradients are replaced",
    "DeepSpeed's engines and optimizers": "refused: its engine steps by itself",
}
Found = dict[str, Any]


def cause(message: str) -> str | None:
    """None: there are no words for it yet."""
    return next((short for words, short in CAUSES.items() if re.search(words, message)), None)


def outcome(found: Found) -> str:
    if "raises" in found:
        return cause(found["raises"]) or found["raises"]
    late = f", {found['in step()']} of {found['updates']} updates in `step()`"
    return f"{found['bits']} bits" + late * (found["in step()"] > 0)


def backward(row: Row, modes: Found) -> str:
    if modes["backward"].get("bits", "equal") != "equal":
        return f"other bits: {row.differs}: forward mode"
    said = outcome(modes["backward"])
    if "raises" not in modes["backward"] or "raises" in modes["forward"]:
        return said
    if row.remedy is None:
        return f"{said}: forward mode"
    return f"{said}; {row.remedy.says}: {outcome(modes['remedied'])}"


def link(row: Row) -> str:
    if row.script in SCRIPTS:
        return f"[recipes.md](recipes.md#{row.recipe})"
    return f"[{row.script}](../tests/works_with/{row.script})"


def line(row: Row, found: Found | None) -> str:
    if found is None:
        return f"| {row.title} | not run yet | | | | | | |"
    cells = [row.title, found["package"] or "-", ", ".join(found["optimizers"])]
    cells += [min(found["steps"], found["losses"])]  # a wrapper's step() was counted, too
    cells += [outcome(found["modes"]["forward"]), backward(row, found["modes"])]
    return "| " + " | ".join(map(str, [*cells, link(row), found["date"]])) + " |"


def table(results: Found) -> str:
    return "\n".join([*HEAD, *(line(row, results.get(row.title)) for row in ROWS)])


def write_page(results: Found) -> None:
    """Between the comments of the page."""
    before, _, after = split(PAGE.read_text("utf-8"))
    PAGE.write_text(f"{before}{table(results)}{after}", "utf-8")


def split(page: str) -> tuple[str, str, str]:
    before, rest = page.split("<!-- rows -->\n")
    rows, after = rest.split("\n<!-- end -->")
    return f"{before}<!-- rows -->\n", rows, f"\n<!-- end -->{after}"

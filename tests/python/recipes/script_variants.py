# SPDX-License-Identifier: BSD-3-Clause
"""The scripts of docs/recipes.md, and what becomes of a script whose lines that say optfuse are
left out or ask for another mode."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text("utf-8")
BLOCK = r"^```python\n(?=# (\w+\.py)\n)(.*?)^```$"
SCRIPTS: dict[str, str] = dict(re.findall(BLOCK, DOCS, re.MULTILINE | re.DOTALL))
CALL = re.compile(r"(optfuse\.fuse\(optimizer|OptfuseCallback\()\)")


def variant(code: str, mode: str, **options: Any) -> str:
    """The script as stock, or fused in this mode."""
    if mode == "stock":
        return "".join(line for line in code.splitlines(True) if "optfuse" not in line.lower())
    if mode == "forward" and not options:
        return code
    words = f"mode={mode!r}"
    if options:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        words = f"mode=optfuse.{mode.title()}({given})"
    changed, count = CALL.subn(lambda m: f"{m[1]}{', ' * m[1].endswith('r')}{words})", code)
    assert count == 1
    return changed

# SPDX-License-Identifier: BSD-3-Clause
"""The age of the figures in benchmarks/results: which commit of the library each file is of, when
that was, and how many commits have changed the library since. benchmarks/run --stale prints it.

.venv/bin/python benchmarks/stale.py docs/performance.md writes the files' commits into the page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from figures import columns

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LIBRARY = ("kernels", "plugin", "shim", "python_loader")
BEGIN, END = "<!-- figures -->\n", "<!-- end -->"


def git(*words: str) -> str:
    """Its answer; nothing where it knows none."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def commits() -> dict[str, list[str]]:
    """The commits that each file names, with + where not all that was measured was committed."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        named = re.findall(r'"commit": "([0-9a-f]{7,}\+?)', path.read_text("utf-8"))
        if named:
            found[path.name] = list(dict.fromkeys(named))
    return found


def age(named: list[str]) -> tuple[str, str]:
    """Day and number of commits of the library since, of the oldest one that git knows."""
    known = [(git("log", "-1", "--format=%cs", c), c) for c in (c.rstrip("+") for c in named)]
    day, oldest = min((pair for pair in known if pair[0]), default=("", ""))
    return day, git("rev-list", "--count", f"{oldest}..HEAD", "--", *LIBRARY) if oldest else ""


def table() -> str:
    rows = [(name, ", ".join(named), *age(named)) for name, named in commits().items()]
    head = ("", "commit", "of", "commits of the library since")
    return columns([head, *sorted(rows, key=lambda row: row[2])])


def page_table() -> str:
    rows = [
        f"| [{name}](../benchmarks/results/{name}) | {', '.join(named)} |"
        for name, named in commits().items()
    ]
    return "\n".join(["| file | commit |", "|---|---|", *rows, ""])


def write(page: Path) -> None:
    head, rest = page.read_text("utf-8").split(BEGIN)
    page.write_text(head + BEGIN + page_table() + rest[rest.index(END) :], "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/hazards.md: each row names deeds that show it, or tests. `python
tests/python/run_programs.py --hazards` prints the outcomes of the deeds into the rows."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from programs.cases import cases
from programs.deed import ANYWHERE, DEEDS, EITHER
from programs.play import MODES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "hazards.md"
WORDS = re.compile(r"equal|launches first|left to step\(\)|raises|differs")
LATE = "## Between backward() and step()"


@dataclass(frozen=True)
class Row:
    is_late: bool  # between backward() and step()
    you: str
    stock: str
    forward: str
    backward: str
    names: str

    def deeds(self):
        return [name for name in re.findall(r"`(\w+)`", self.names) if name in DEEDS]

    def cases(self, name):
        """Those that the row is about."""
        late = self.is_late and DEEDS[name].where == ANYWHERE
        return [case for case in cases(name) if case.is_late == late]

    def said(self, name, mode):
        """The outcomes of a deed. One that looks for errors itself has any."""
        if "refused" in DEEDS[name].function.__code__.co_names:
            return {EITHER}
        found = self.cases(name)
        return {c.deed.outcome(mode, c.kind, c.arguments, c.is_late) for c in found}

    def cell(self, mode):
        """Begins with the word of the first deed, unless its outcomes depend on arguments."""
        said, cell = self.said(self.deeds()[0], mode), getattr(self, mode)
        words = {outcome.what for outcome in said}
        if len(words) > 1 or EITHER in said:
            return cell
        begin = WORDS.match(cell)
        return words.pop() + (cell[begin.end() :] if begin else f": {cell}" * bool(cell))

    def printed(self):
        row = replace(self, **{mode: self.cell(mode) for mode in MODES}) if self.deeds() else self
        return f"| {row.you} | {row.stock} | {row.forward} | {row.backward} | {row.names} |"


def lines():
    """Those of the page, of which rows are Rows."""
    is_late = False
    for line in PAGE.read_text("utf-8").splitlines():
        is_late = line == LATE if line.startswith("## ") else is_late
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        yield Row(is_late, *cells) if len(cells) == 5 and cells[0] != "you" else line


def rows():
    """Those that deeds show."""
    return [line for line in lines() if isinstance(line, Row) and line.deeds()]


def print_page():
    text = [line.printed() if isinstance(line, Row) else line for line in lines()]
    PAGE.write_text("\n".join(text) + "\n", "utf-8")

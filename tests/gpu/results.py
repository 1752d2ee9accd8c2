# SPDX-License-Identifier: BSD-3-Clause
"""The files that tests/gpu/run leaves behind: a few of limited size, written anew
after each part, so that a run that is ended early leaves what it found."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from part import FAILED, Part, Ran, Verdict

LARGEST = 15 << 20  # bytes of one file
MOST_FILES = 8
OURS = ("summary.txt", "results.json", "build.log", "checks.log", "measurements.log")
OURS += ("benchmark/*.json", "now-*.log")  # the last: of a run that was ended


@dataclass
class Row:
    part: str
    verdict: str
    why: str
    seconds: float
    share: float  # seconds that it could have taken


class Results:
    """The files: summary.txt, results.json and the logs that the parts name;
    parts may put their own beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began = time.monotonic()
        self.machine: dict[str, str] = {}
        self.rows: list[Row] = []
        folder.mkdir(parents=True, exist_ok=True)
        for old in self.files():
            old.unlink()

    def files(self) -> list[Path]:
        """Ours; whatever else is in the folder is left alone."""
        return sorted(path for pattern in OURS for path in self.folder.glob(pattern))

    def log(self, name: str, title: str, ran: list[Ran]) -> None:
        path = self.folder / name
        room = LARGEST - (path.stat().st_size if path.exists() else 0)
        text = f"==== {title} ====\n"
        for one in ran:
            end = "ended at its time limit" if one.status is None else f"status {one.status}"
            text += f"$ {' '.join(one.command.arguments)}\n{one.output}\n({end})\n\n"
        data = text.encode("utf-8", errors="replace")
        if len(data) > room:
            data = data[: room // 2] + b"\n[... cut ...]\n" + data[len(data) - room // 2 + 32 :]
        with path.open("ab") as file:
            file.write(data[: max(0, room)])

    def add(self, part: Part, verdict: Verdict, seconds: float, share: float) -> Row:
        row = Row(part.name, verdict.word, verdict.why, seconds, share)
        self.rows.append(row)
        self.write()
        return row

    @property
    def failed(self) -> bool:
        return any(row.verdict == FAILED for row in self.rows)

    def text(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.machine.items()] + [""]
        for row in self.rows:
            share = f"of {row.share:4.0f} s"
            lines.append(f"{row.verdict:<8} {row.seconds:6.1f} {share}  {row.part}")
            lines += [f"{'':27}{line}" for line in row.why.splitlines()]
        end = "SOME PARTS FAILED" if self.failed else "no part failed"
        return "\n".join([*lines, "", f"{end}, {time.monotonic() - self.began:.0f} s"]) + "\n"

    def write(self) -> None:
        (self.folder / "summary.txt").write_text(self.text(), encoding="utf-8")
        whole = {"machine": self.machine, "parts": [asdict(row) for row in self.rows]}
        data = json.dumps(whole, indent=1)
        (self.folder / "results.json").write_text(data + "\n", encoding="utf-8")

    def check_limits(self) -> None:
        """The promise about the files is kept, or it is said."""
        files = self.files()
        large = [path.name for path in files if path.stat().st_size > 16 << 20]
        assert len(files) <= MOST_FILES, f"too many files: {sorted(p.name for p in files)}"
        assert not large, f"over 16 MiB: {large}"

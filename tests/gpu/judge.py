# SPDX-License-Identifier: BSD-3-Clause
"""From what the parts of tests/gpu/run printed to their verdicts."""

from __future__ import annotations

import json
import re
from pathlib import Path

from part import FAILED, MISSED, NOT_RUN, OK, Ran, Verdict, judge_by_status

SHARE, FROM = 0.90, 1 << 24  # of the no-math kernel's bandwidth, from so many elements up
BANDWIDTH = re.compile(
    r"^(?P<rule>\w+) +(?P<dtype>\w+) +(?P<n>\d+) in +(?P<tensors>\d+)"
    r" +(?P<gbs>[\d.]+) +[\d.]+ +(?P<share>[\d.]+)$",
    re.MULTILINE,
)
FOUND = 9  # exit status of compute-sanitizer where it found something
UNABLE = re.compile(r"Device not supported|Unable to find|not supported on this", re.IGNORECASE)
SHOWN = 12  # lines of a verdict
OURS = ("backward fusion", "forward fusion")


def judge_sanitizers(ran: list[Ran]) -> Verdict:
    """They come in pairs: a planted defect, which must be found, and ours."""
    unable = [one for one in ran if one.status not in (0, FOUND) and UNABLE.search(one.output)]
    if unable:
        why = UNABLE.search(unable[0].output)
        return Verdict(NOT_RUN, f"compute-sanitizer can't work here: {why.group() if why else ''}")
    wrong = []
    for planted, clean in zip(ran[::2], ran[1::2], strict=True):
        tool = planted.command.arguments[2]
        if planted.status != FOUND:
            wrong.append(f"{tool} does not find a planted defect (status {planted.status})")
        if clean.status != 0:
            wrong.append(f"{tool}: status {clean.status} on the kernels")
    if wrong:
        return Verdict(FAILED, "\n".join(wrong))
    return Verdict(OK, "nothing found but what was planted")


def judge_tests(ran: list[Ran]) -> Verdict:
    """All processes ran to their end; names what failed."""
    named = [line for one in ran for line in one.output.splitlines() if line.startswith("FAILED ")]
    last = [(one.output.strip().splitlines() or ["nothing was printed"])[-1] for one in ran]
    word = OK if all(one.status == 0 for one in ran) else FAILED
    late = ["it ran into its time limit"] if any(one.status is None for one in ran) else []
    return Verdict(word, "\n".join(["; ".join(last), *late, *named[:SHOWN]]))


def judge_controls(ran: list[Ran]) -> Verdict:
    """The first has every guard, each of the others lacks one."""
    kept, *others = ran
    wrong = [] if kept.status == 0 else [f"broken with every guard on (status {kept.status})"]
    for one in others:
        guard = one.command.variables["OPTFUSE_TEST_GUARDS_OFF"]
        if one.status != 1:
            wrong.append(f"{guard}: kept with the guard off (status {one.status})")
    if wrong:
        return Verdict(FAILED, "\n".join(wrong))
    return Verdict(OK, "each promise breaks without its guard")


def judge_bandwidth(ran: list[Ran]) -> Verdict:
    by_status = judge_by_status(ran)
    rows = list(BANDWIDTH.finditer(ran[0].output))
    if by_status.word != OK or not rows:
        return Verdict(FAILED, by_status.why if rows else "it printed no bandwidth")
    large = [r for r in rows if int(r["n"]) >= FROM]
    slow = [r.group() for r in large if float(r["share"]) < SHARE and r["rule"] == "adam"]
    least = min(float(r["share"]) for r in large)
    said = f"from {FROM >> 20} M elements up at least {least:.3f} of the no-math kernel's bandwidth"
    return Verdict(MISSED, "\n".join([said, *slow])) if slow else Verdict(OK, said)


def judge_captured(ran: list[Ran], out: Path) -> Verdict:
    """Fails if ours trained to other bits than fused=True; misses if it is slower in some cell."""
    by_status = judge_by_status(ran)
    if by_status.word != OK:
        return Verdict(by_status.word, by_status.why)
    wrong, slower, ours = [], [], 0
    for path in sorted(out.glob("captured*.json")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for line in cell["lines"]:
                if not line["name"].endswith(("fusion", "MiB")):
                    continue
                said = f"{path.stem}, {cell['cell']}: {line['name']}"
                ours += 1
                if not line["equal_bits"]:
                    wrong.append(f"{said} has other bits than fused=True")
                if line["against_fused"]["high"] < 1:
                    slower.append(f"{said} {line['against_fused']['median']:.3f}")
    if wrong or not ours:
        return Verdict(FAILED, "\n".join(wrong) or "none of ours was measured")
    if slower:
        return Verdict(MISSED, "\n".join(["slower than fused=True:", *slower]))
    return Verdict(OK, f"{ours} times ours, never slower than fused=True")


def judge_benchmark(ran: list[Ran], out: Path) -> Verdict:
    """Fails if ours did not run or trained to other bits; misses if it is
    slower than fused=True in some cell."""
    by_status = judge_by_status(ran)
    if by_status.word != OK:
        return Verdict(by_status.word, by_status.why)
    wrong, slower, cells = [], [], 0
    for path in sorted(out.glob("cells*.json")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            name = f"{path.stem}, {cell['model']}, batch {cell['batch']}"
            lines = {line["name"]: line for line in cell["lines"]}
            cells += 1
            for ours in OURS:
                if ours not in lines:
                    wrong.append(f"{name}: {ours} did not run")
                elif lines[ours]["against_fused"]["high"] < 1:
                    slower.append(f"{name}: {ours} {lines[ours]['against_fused']['median']:.3f}")
    if wrong or not cells:
        return Verdict(FAILED, "\n".join(wrong) or "no cell was measured")
    said = f"{cells} cells"
    if slower:
        return Verdict(MISSED, "\n".join([f"{said}; slower than fused=True:", *slower]))
    return Verdict(OK, f"{said}, none slower than fused=True")

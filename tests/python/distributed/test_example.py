# SPDX-License-Identifier: BSD-3-Clause
"""The script in docs/using.md, started as it says there."""

import re
from pathlib import Path

from several import launched, printed_by_two

USING = Path(__file__).parents[3] / "docs" / "using.md"
FUSED = "opt = optfuse.fuse(opt)  # or "


def section():
    return USING.read_text("utf-8").split("## A script for several processes")[1].split("\n## ")[0]


def example():
    (script,) = re.findall(r"```python\n(.*?)```", section(), re.DOTALL)
    return script


def in_backward_mode():
    """The example with the change that its comment describes."""
    assert FUSED in example()
    return example().replace(FUSED, "opt = ")


def started(script, folder):
    """The output of the script, started as the page says."""
    (command,) = re.findall(r"^# (torchrun .*)$", section(), re.MULTILINE)
    name = command.split()[-1]
    (folder / name).write_text(script, "utf-8")
    done = launched(*command.split()[1:], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"loss \d\.\d{6}, weights -?\d+\.\d{12}\n", done.stdout), done.stdout
    return done.stdout


def test_it_runs_as_written_and_prints_what_stock_does(tmp_path):
    ours = started(example(), tmp_path)
    assert float(ours.split()[1].strip(",")) < 1.5, f"it has not learned: {ours}"
    (tmp_path / "stock.py").write_text(example(), "utf-8")
    (tmp_path / "backward.py").write_text(in_backward_mode(), "utf-8")
    assert ours == printed_by_two(["stock.py"], tmp_path, OPTFUSE_DISABLE="1")
    assert ours == printed_by_two(["backward.py"], tmp_path)

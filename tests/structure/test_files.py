# SPDX-License-Identifier: BSD-3-Clause
"""Licence lines, paths and style of the files in the tree."""

from __future__ import annotations

import re
import subprocess
import sys

from tree import ROOT, files, name

LICENCE = "SPDX-License-Identifier: BSD-3-Clause"
WITHOUT_TEXT = {".png", ".svg", ".json", ".typed"}  # pictures, results and markers
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work|Users)/\w")


def texts() -> dict[str, str]:
    return {name(p): p.read_text("utf-8") for p in files() if p.suffix not in WITHOUT_TEXT}


def test_every_file_names_its_licence() -> None:
    wrong = [path for path, text in texts().items() if LICENCE not in text[:300]]
    assert not wrong, f"no SPDX line in the first lines of {wrong}"


def test_no_file_knows_a_path_of_someones_machine() -> None:
    wrong = {
        path: found.group()
        for path, text in texts().items()
        if (found := MACHINE_PATH.search(text))
    }
    assert not wrong, f"machine paths in {wrong}"


def test_python_is_clean() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--quiet", ROOT], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_folder_of_tests_is_on_their_page_and_each_module_has_a_name_of_its_own() -> None:
    top = ROOT / "tests" / "python"
    modules = [path for path in files() if path.match("tests/python/*/*.py")]
    named = re.findall(
        r"`(\w+)`", "".join(re.findall(r"^\|(.*?)\|", (top / "README.md").read_text(), re.M))
    )
    assert {path.parent.name for path in modules} == set(named)
    packages = {path.parent for path in modules if path.name == "__init__.py"}
    names = [path.name for path in modules if path.parent not in packages]
    names += [path.name for path in files() if path.match("tests/python/*.py")]
    twice = {name for name in names if names.count(name) > 1} - {"conftest.py"}
    assert not twice, f"another folder's module, too: {twice}"

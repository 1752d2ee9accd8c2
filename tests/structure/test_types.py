# SPDX-License-Identifier: BSD-3-Clause
"""The public interface is typed: mypy --strict on the public modules and on a script that uses each
name of them."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tree import LOADER, ROOT

SCRIPT = Path(__file__).parent / "typed_use.py"
PACKAGE = LOADER / "optfuse"


def public_modules() -> list[Path]:
    """From which optfuse, optfuse.optim and optfuse.pipeline have their names."""
    found = []
    for name in ("__init__", "optim", "pipeline"):
        found.append(PACKAGE / f"{name}.py")
        for node in ast.walk(ast.parse(found[-1].read_text("utf-8"))):
            module = (isinstance(node, ast.ImportFrom) and node.module) or ""
            if module.startswith(("optfuse._", "optfuse_")):
                found.append(LOADER / f"{module.replace('.', '/')}.py")
    return sorted(set(found))


def test_names_are_found_where_type_checkers_find_them() -> None:
    from optfuse._names import HOMES

    for module, homes in HOMES.items():
        path = PACKAGE / f"{module.partition('.')[2] or '__init__'}.py"
        typed = {
            alias.name: node.module
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.ImportFrom) and node.module != "typing"
            for alias in node.names
        }
        assert len(homes) > 5 and homes.items() <= typed.items()
        assert {*importlib.import_module(module).__all__} == homes.keys()


def checked(*paths: Path, cache: Path) -> list[str]:
    """The errors of mypy in these files."""
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache)]
    command += ["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    command += ["--python-executable", sys.executable]
    done = subprocess.run(
        [*command, *map(str, paths)],
        cwd=LOADER,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if ": error:" in line]
    ours = {str(path.resolve()) for path in paths}
    return [x for x in found if str((LOADER / x.split(":")[0]).resolve()) in ours]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


def test_the_public_api_is_strictly_typed(cache: Path) -> None:
    assert len(public_modules()) > 10
    wrong = checked(SCRIPT, *public_modules(), cache=cache)
    assert not wrong, "\n".join(wrong)


def test_the_script_uses_each_public_name() -> None:
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((PACKAGE / "__init__.py").read_text("utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    used = set(re.findall(r"optfuse\.(\w+)", SCRIPT.read_text("utf-8")))
    assert set(names) <= used, f"not used: {set(names) - used}"


def test_a_wrong_argument_is_found(cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        "import optfuse\n\noptfuse.fuse(3)\noptfuse.clip_grad_norm_([], max_norm='1')\n"
    )
    assert len(checked(script, cache=cache)) == 2

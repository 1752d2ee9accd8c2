# SPDX-License-Identifier: BSD-3-Clause
"""A process where Python's optfuse and an extension in C++ train: both use one library, whichever
comes first, and know of each other's updates."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import forked_python
import pytest
from installed import (
    INSTALLED,
    QUIET,
    STANDARD,
    WARNINGS,
    flags_of,
    install,
    output,
    skip_unless_built,
)

HERE = Path(__file__).resolve().parent / "extension"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a copy of the library that Python's optfuse has."""
    skip_unless_built()
    return install(INSTALLED, tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def extension(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("extension") / "both.so"
    compile_flags, link_flags = flags_of(prefix, "optfuse")
    compiler = ["c++", f"-std={STANDARD}", "-shared", "-fPIC", *WARNINGS]
    output(*compiler, HERE / "both.cpp", *compile_flags, *link_flags, "-o", made)
    return made


def run(what: str, extension: Path, **variables: str) -> str:
    """The last line of the program's output."""
    command = [HERE / "train.py", what, extension]
    asked = forked_python.started(command, HERE, os.environ | QUIET | variables)
    done = forked_python.run(asked, timeout=300)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize("what", ["python_first", "extension_first", "alone"])
def test_both_share_one_library(what: str, extension: Path) -> None:
    assert run(what, extension) == "done"


def test_an_extension_with_another_library_is_named(prefix: Path, extension: Path) -> None:
    library = next(prefix.rglob("liboptfuse_torch-*.so"))
    described = library.with_suffix(".json")
    fields = described.read_text()
    said = run("extension_first", extension, OPTFUSE_LIBRARY=named_copy(library))
    assert f"has opened {library}" in said and "is not what OPTFUSE_LIBRARY names" in said
    try:
        described.write_text(json.dumps(json.loads(fields) | {"abi": 1}))
        said = run("extension_first", extension)
    finally:
        described.write_text(fields)
    assert f"has opened {library}, for an extension in C++, which is of ABI 1" in said
    assert "Import optfuse before the extension" in said


def named_copy(library: Path) -> str:
    folder = library.parent / "copy"
    folder.mkdir()
    shutil.copy(library.with_suffix(".json"), folder)
    return str(shutil.copy(library, folder))

# SPDX-License-Identifier: BSD-3-Clause
"""The loader compares everything before it opens a library, and every refusal
is one sentence that says what was built, what is here and what to do."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optfuse._library import loader

GOOD_PLATFORM = {
    "system": "linux",
    "machine": "x86_64",
    "libc": "glibc",
    "implementation": "cpython",
    "gil": True,
    "main_interpreter": True,
}
TORCH = loader.Torch("2.13.0+cpu", True)
STEM = "liboptfuse_torch-2.13-cxx11abi1-linux_x86_64"


def make_library(folder: Path, stem: str = STEM, **changes: object) -> Path:
    """A file that is no library, with a JSON beside it. Returns the .so."""
    fields = {"torch": "2.13", "cxx11_abi": True, "platform": "linux_x86_64", "abi": loader.ABI}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(fields | changes))
    library = folder / f"{stem}.so"
    library.write_text("not a library")
    return library


def test_supported_platform_passes() -> None:
    loader.check_platform(**GOOD_PLATFORM)
    loader.check_platform(**(GOOD_PLATFORM | {"machine": "aarch64"}))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("system", "darwin", "Linux x86-64"),
        ("system", "win32", "Linux x86-64"),
        ("machine", "ppc64le", "Linux x86-64 and AArch64"),
        ("libc", "", "glibc"),
        ("implementation", "pypy", "CPython"),
        ("gil", False, "free-threaded"),
        ("main_interpreter", False, "subinterpreter"),
    ],
)
def test_other_platforms_are_refused(field: str, value: object, says: str) -> None:
    with pytest.raises(ImportError, match=says):
        loader.check_platform(**(GOOD_PLATFORM | {field: value}))


def test_this_process_is_a_supported_platform() -> None:
    assert loader._libc() == "glibc"
    assert loader._has_gil()
    assert loader._in_main_interpreter()


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.13.0a0+git1234", "2.15.0+cu132"])
def test_supported_releases_pass(version: str) -> None:
    loader.check_release(loader.Torch(version, True))


@pytest.mark.parametrize("version", ["1.13.1", "2.1.0", "2.10.0+cpu"])
def test_older_releases_are_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(ImportError) as caught:
        loader.check_release(loader.Torch(version, True))
    message = str(caught.value)
    assert "2.11 to 2.15" in message and version in message
    assert "`pip install 'torch==2.15.*'`" in message
    assert "pip install --no-build-isolation ." in message


@pytest.mark.parametrize("version", ["2.16.0", "2.20.1+cu140", "3.0.0a0+git1234"])
def test_a_release_that_came_later_needs_a_library_that_was_built_for_it(
    version: str, tmp_path: Path
) -> None:
    torch = loader.Torch(version, True)
    make_library(tmp_path)
    with pytest.raises(ImportError, match=r"built for torch 2\.13, and this is torch") as caught:
        loader.find(torch, {}, tmp_path)
    message = str(caught.value)
    assert version in message and "pip install --no-build-isolation ." in message
    assert message.startswith("torch was exchanged under optfuse, which is built for torch 2.13")
    assert "`pip install 'torch==2.13.*'`, from the index that it came from" in message
    assert f"`pip install -c torch.txt`, where torch.txt has the line torch=={version}" in message
    library = make_library(tmp_path, "liboptfuse_torch-later", torch=torch.release)
    assert loader.find(torch, {}, tmp_path) == library


def test_a_library_for_this_torch_is_chosen(tmp_path: Path) -> None:
    library = make_library(tmp_path)
    assert loader.find(TORCH, {}, tmp_path) == library


def test_of_several_libraries_the_one_for_this_torch_is_chosen(tmp_path: Path) -> None:
    make_library(tmp_path, "liboptfuse_torch-2.11-cxx11abi1-linux_x86_64", torch="2.11")
    make_library(tmp_path, "liboptfuse_torch-2.13-cxx11abi0-linux_x86_64", cxx11_abi=False)
    library = make_library(tmp_path)
    assert loader.find(TORCH, {}, tmp_path) == library


def test_where_all_are_for_other_releases_one_clause_names_them_and_one_a_torch(
    tmp_path: Path,
) -> None:
    for release in ("2.11", "2.12", "2.13"):
        make_library(tmp_path, f"liboptfuse_torch-{release}-cxx11abi1-linux_x86_64", torch=release)
    with pytest.raises(ImportError) as caught:
        loader.find(loader.Torch("2.14.1", True), {}, tmp_path)
    message = str(caught.value)
    assert message.startswith("optfuse is built for torch 2.11, 2.12, 2.13, and this is torch 2.14")
    assert "`pip install 'torch==2.13.*'`" in message and "built for torch 2.14" in message
    assert message.count("built for torch 2.12") == 0, "a clause for each library"


NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            raise {error}
sys.meta_path.insert(0, Refuse())
import types
package = types.ModuleType("optfuse")
package.__path__ = [{package!r}]
sys.modules["optfuse"] = package
import optfuse._library.loader
optfuse._library.loader.load()
"""


@pytest.mark.parametrize(
    ("module", "error", "says"),
    [
        ("torch", "ModuleNotFoundError('none', name='torch')", "this Python has none: pip install"),
        ("torch", "ImportError('libfoo.so is missing')", "libfoo.so is missing: repair it, or pip"),
        ("typing_extensions", "ModuleNotFoundError('no x', name='x')", "no x: repair it, or pip"),
    ],
)
def test_a_torch_that_is_missing_or_broken_is_told_apart(
    module: str, error: str, says: str
) -> None:
    package = str(Path(loader.__file__).parent.parent)
    message = run_load(NO_TORCH.format(module=module, error=error, package=package))
    assert says in message and "'torch==2.15.*'" in message


@pytest.mark.parametrize(
    ("changes", "built", "here"),
    [
        ({"torch": "2.12"}, "built for torch 2.12", "torch 2.13.0+cpu"),
        ({"cxx11_abi": False}, "C++11 ABI 0", "C++11 ABI 1"),
        ({"platform": "linux_aarch64"}, "linux_aarch64", "linux_x86_64"),
        ({"abi": loader.ABI + 1}, f"ABI {loader.ABI + 1}", f"ABI {loader.ABI}"),
    ],
)
def test_a_library_for_another_torch_is_refused(
    tmp_path: Path, changes: dict[str, object], built: str, here: str
) -> None:
    make_library(tmp_path, **changes)
    with pytest.raises(ImportError) as caught:
        loader.find(TORCH, {}, tmp_path)
    message = str(caught.value)
    assert built in message and here in message
    assert "pip install --no-build-isolation ." in message
    assert "\n" not in message


def test_no_library_at_all_says_where_it_looked_and_how_to_build(tmp_path: Path) -> None:
    with pytest.raises(ImportError) as caught:
        loader.find(TORCH, {}, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "pip install --no-build-isolation ." in str(caught.value)


def test_a_description_without_its_library_is_refused(tmp_path: Path) -> None:
    make_library(tmp_path).unlink()
    with pytest.raises(ImportError, match="missing"):
        loader.find(TORCH, {}, tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"torch": "2.13"}'])
def test_an_unreadable_description_is_refused(tmp_path: Path, text: str) -> None:
    make_library(tmp_path).with_suffix(".json").write_text(text)
    with pytest.raises(ImportError, match="can't read"):
        loader.find(TORCH, {}, tmp_path)


def test_test_only_builds_are_never_chosen_by_themselves(tmp_path: Path) -> None:
    make_library(tmp_path, STEM + "-guards")
    with pytest.raises(ImportError, match="no compiled library"):
        loader.find(TORCH, {}, tmp_path)


def test_a_source_checkout_finds_its_own_build(tmp_path: Path) -> None:
    package = tmp_path / "python_loader" / "optfuse"
    package.mkdir(parents=True)
    library = make_library(tmp_path / "build" / "shim")
    with pytest.raises(ImportError, match="no compiled library"):
        loader.find(TORCH, {}, package)
    (tmp_path / "meson.build").touch()
    assert loader.find(TORCH, {}, package) == library


def test_the_environment_names_a_library_that_is_compared_too(tmp_path: Path) -> None:
    make_library(tmp_path / "package")
    package = tmp_path / "package"
    mine = make_library(tmp_path / "mine", STEM + "-guards")
    assert loader.find(TORCH, {"OPTFUSE_LIBRARY": str(mine)}, package) == mine
    other = make_library(tmp_path / "other", torch="2.12")
    with pytest.raises(ImportError, match=r"built for torch 2\.12"):
        loader.find(TORCH, {"OPTFUSE_LIBRARY": str(other)}, package)
    with pytest.raises(ImportError, match="not a file"):
        loader.find(TORCH, {"OPTFUSE_LIBRARY": str(tmp_path / "none.so")}, package)


def run_load(code: str, **environment: str) -> str:
    """The last line that a fresh Python prints, on either stream, of an ImportError."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("ImportError: ")]
    assert found, done.stdout
    return found[-1]


def test_the_wrong_library_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    # The file is no library: opening it would raise OSError instead.
    library = make_library(tmp_path, torch="2.0")
    last = run_load("import optfuse._library.loader as l; l.load()", OPTFUSE_LIBRARY=str(library))
    assert last.startswith("ImportError: ") and "built for torch 2.0" in last


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="the module is named otherwise")
def test_a_subinterpreter_is_refused() -> None:
    module = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    importlib.import_module(module)
    package = str(Path(loader.__file__).parent.parent)
    inside = (
        "import sys, types\n"
        "package = types.ModuleType('optfuse')\n"  # optfuse itself would import torch
        f"package.__path__ = [{package!r}]\n"
        "sys.modules['optfuse'] = package\n"
        "from optfuse._library import loader\n"
        "try:\n    loader.load()\n"
        "except ImportError as error:\n    print('ImportError:', error, flush=True)\n"
    )
    create = "create('legacy')" if sys.version_info >= (3, 13) else "create(isolated=False)"
    code = f"import {module} as i; i.run_string(i.{create}, {inside!r})"
    assert "subinterpreter" in run_load(code)

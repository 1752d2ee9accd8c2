# SPDX-License-Identifier: BSD-3-Clause
"""Layers include only downward: kernels <- plugin <- shim <- python_loader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tree import ROOT, SOURCES, name, sources

BELOW = {"kernels": (), "plugin": ("kernels",), "shim": ("kernels", "plugin")}
#: The shim's folders, from the bottom to the top. None includes one that comes later.
FLOORS = (
    *(".", "base", "python", "memory", "plan", "absent", "gpu", "native", "host"),
    *("autograd", "clipping", "averages", "layers", "promises", "reorder", "kfac", "recorded"),
    *("ledger", "doors", "loader", "cxx"),
)
INCLUDE = re.compile(r'^\s*#\s*include\s+(<[^>]+>|"[^"]+"|\w+)', re.MULTILINE)
TORCH = re.compile(r"<(torch|ATen|c10|caffe2)/")
PYTHON = re.compile(r"Python\.h|pybind|/python_|/python/|torch/extension\.h")
CUDA = re.compile(r"<(cuda|nv|cub|thrust|cublas|curand)", re.IGNORECASE)


def includes(path: Path) -> list[str]:
    return INCLUDE.findall(path.read_text(encoding="utf-8"))


def outside(path: Path, layer: str) -> list[str]:
    """The quoted includes that are in neither this layer nor one below."""
    roots = [ROOT / part for part in (layer, *BELOW[layer])]
    places = [path.parent, *roots]
    found = []
    for include in includes(path):
        if not include.startswith('"'):
            continue
        targets = [place / include.strip('"') for place in places]
        target = next((t.resolve() for t in targets if t.is_file()), None)
        if target is None or not any(target.is_relative_to(root) for root in roots):
            found.append(include)
    return found


def arrows(root: Path) -> dict[tuple[str, str], str]:
    """(one folder, another) if a file of one includes one of the other's; and such a file."""
    found = {}
    for path in sorted(path for path in root.rglob("*") if path.suffix in SOURCES):
        for include in includes(path):
            target = root / include.strip('"')
            if include.startswith('"') and target.is_file():
                folders = [of.parent.relative_to(root).as_posix() for of in (path, target)]
                found.setdefault((folders[0], folders[1]), f"{path.name} includes {include}")
    return {folders: why for folders, why in found.items() if len(set(folders)) == 2}


def upwards(root: Path, floors: tuple[str, ...]) -> list[str]:
    return [
        f"{one}/{why}"
        for (one, other), why in arrows(root).items()
        if floors.index(one) <= floors.index(other)
    ]


def folders_of_the_core() -> tuple[list[Path], list[Path]]:
    """Its own files, and those of the planners."""
    planners = sources("plugin/planners")
    return [path for path in sources("plugin") if path not in planners], planners


def matching(path: Path, *patterns: re.Pattern[str]) -> list[str]:
    return [i for i in includes(path) if any(pattern.search(i) for pattern in patterns)]


@pytest.mark.parametrize("layer", BELOW)
def test_layer_includes_only_itself_and_those_below(layer: str) -> None:
    files = sources(layer)
    assert files, f"{layer} has no sources"
    wrong = {name(path): found for path in files if (found := outside(path, layer))}
    assert not wrong, f"{layer} includes from outside: {wrong}"


def test_folders_of_the_shim_include_only_those_of_lower_floors() -> None:
    assert len(arrows(ROOT / "shim")) > 50, "few includes were found: the search itself is broken"
    assert not upwards(ROOT / "shim", FLOORS)


UP = {
    "upwards": ("low/a.h", '#include "high/b.h"'),
    "from a file of C": ("low/a.c", '#include "high/b.h"'),
    "indented": ("low/a.h", '  # include "high/b.h"'),
    "from the top": ("c.h", '#include "low/a.h"'),
}


@pytest.mark.parametrize(("file", "text"), UP.values(), ids=UP)
def test_an_include_upwards_is_found(file: str, text: str, tmp_path: Path) -> None:
    floors = (".", "low", "high")
    for folder, include in (("low", "c.h"), ("high", "low/a.h")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{'a' if folder == 'low' else 'b'}.h").write_text(
            f'#include "{include}"\n'
        )
    (tmp_path / "c.h").touch()
    assert len(arrows(tmp_path)) == 2 and not upwards(tmp_path, floors)
    (tmp_path / file).write_text(text)
    assert len(upwards(tmp_path, floors)) == 1


def test_the_core_includes_no_planner() -> None:
    core, planners = folders_of_the_core()
    assert core and planners
    names = {f'"{path.relative_to(ROOT / "plugin")}"' for path in planners}
    wrong = {name(path): found for path in core if (found := names & set(includes(path)))}
    assert not wrong, f"the core includes planners: {wrong}"


def test_the_core_includes_no_kernels_of_one_device() -> None:
    core, _ = folders_of_the_core()
    found = {name(p): i for p in core for i in includes(p) if i.startswith(('"cpu/', '"cuda/'))}
    assert not found, "its host calls them"


def test_planners_include_of_the_core_what_says_that_they_failed() -> None:
    _, planners = folders_of_the_core()
    own = {f'"{path.relative_to(ROOT / "plugin")}"' for path in planners}
    allowed = own | {'"fail.h"', '"guard.h"', '"optfuse.h"'}
    wrong = {
        name(path): found
        for path in planners
        if (found := {i for i in includes(path) if i.startswith('"')} - allowed)
    }
    assert not wrong, f"planners include {wrong}"


@pytest.mark.parametrize("layer", ["kernels", "plugin"])
def test_only_the_shim_sees_torch_and_nobody_sees_python(layer: str) -> None:
    wrong = {name(p): found for p in sources(layer) if (found := matching(p, TORCH, PYTHON))}
    assert not wrong, f"{layer} includes {wrong}"


def test_the_shim_sees_torch_but_not_python() -> None:
    assert any(matching(path, TORCH) for path in sources("shim")), "the patterns match nothing"
    wrong = {name(path): found for path in sources("shim") if (found := matching(path, PYTHON))}
    assert not wrong, f"shim includes {wrong}"


def test_only_the_cuda_kernels_see_cuda() -> None:
    files = [p for p in sources(*BELOW) if p.parent != ROOT / "kernels" / "cuda"]
    wrong = {name(path): found for path in files if (found := matching(path, CUDA))}
    assert not wrong, f"CUDA headers outside kernels/cuda: {wrong}"


@pytest.mark.parametrize("layer", ["kernels", "plugin"])
def test_the_core_is_c(layer: str) -> None:
    assert not [name(path) for path in sources(layer) if path.suffix == ".cpp"]

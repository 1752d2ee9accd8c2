# SPDX-License-Identifier: BSD-3-Clause
"""Layers include only downward: kernels <- plugin <- shim <- python_loader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tree import ROOT, name, sources

BELOW = {"kernels": (), "plugin": ("kernels",), "shim": ("kernels", "plugin")}
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


def test_the_core_includes_no_planner() -> None:
    core, planners = folders_of_the_core()
    assert core and planners
    names = {f'"{path.relative_to(ROOT / "plugin")}"' for path in planners}
    wrong = {name(path): found for path in core if (found := names & set(includes(path)))}
    assert not wrong, f"the core includes planners: {wrong}"


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

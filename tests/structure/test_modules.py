# SPDX-License-Identifier: BSD-3-Clause
"""python_loader's modules know only modules below them, and import at their top."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from tree import ROOT

PACKAGE = ROOT / "python_loader" / "optfuse"

#: Imports that close a circle of modules: (importer, imported), and why it has to be.
CLOSING_CIRCLES: dict[tuple[str, str], str] = {}

_FINDS = "doctor has to run where torch or the library can't be loaded, and says why"

#: Imports inside of functions: (importer, imported), and why they are there.
INSIDE_FUNCTIONS: dict[tuple[str, str], str] = {
    **{
        ("optfuse._doctor.command", f"optfuse._doctor.{name}"): _FINDS
        for name in ("assumptions", "bits", "gpus", "wide_layer")
    },
    ("optfuse._script_ab.command", "optfuse._script_ab.work"): "arguments are looked at before "
    "torch is imported, and the library may be missing",
    ("optfuse._library.loader", "torch"): "the platform is looked at before torch is imported, "
    "which would not survive a subinterpreter; and a torch that is missing gets our sentence",
    ("optfuse._layers.pipeline.gantt", "matplotlib.figure.Figure"): "matplotlib need not be "
    "installed, and takes long to import",
    **{
        ("optfuse._script_ab.plots", f"matplotlib.{name}"): "matplotlib need not be installed"
        for name in ("rc_context", "figure.Figure")
    },
    ("optfuse.pipeline", "optfuse._layers.pipeline.runtime.Pipeline"): "it needs "
    "torch.distributed.pipelining, which registers operators when it is imported",
}

#: From the bottom to the top. None reaches one that comes later, by whatever way.
ROOMS = (
    "_options",
    "_rules",
    "_noted",
    "_trials.rule_choice",
    "_link",
    "_classes",
    "_fuse",
    "_ab.ab",
)


def modules(package: Path) -> dict[str, ast.Module]:
    """By dotted names; a package has that of its __init__.py."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text("utf-8"))
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names, "a.b" for `from a import b`; wherever they stand, so in functions and
    for type checkers, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports name whole modules"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges(package: Path) -> dict[str, set[str]]:
    """The modules of the package that each of them imports. A module of a sub-package brings
    that one's __init__.py along; the outermost is there anyway."""
    known = modules(package)

    def meant(name: str) -> set[str]:
        parts = name.split(".")
        heads = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        found = {head for head in heads if head in known}
        return found - {package.name} or found

    return {
        module: {target for name in imports(tree) for target in meant(name)} - {module}
        for module, tree in known.items()
    }


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One of them, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def folders(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same, with each sub-package of the outermost as one."""

    def of(module: str) -> str:
        return ".".join(module.split(".")[:2])

    return joined(graph, of)


def rooms_of(graph: dict[str, set[str]], folder: str) -> dict[str, set[str]]:
    """The same for the files and folders inside of a sub-package."""
    depth = len(folder.split(".")) + 1
    inside = {
        module: {target for target in targets if target.startswith(f"{folder}.")}
        for module, targets in graph.items()
        if module.startswith(f"{folder}.")
    }
    return joined(inside, lambda module: ".".join(module.split(".")[:depth]))


def joined(graph: dict[str, set[str]], of: Callable[[str], str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {of(module): set() for module in graph}
    for module, targets in graph.items():
        found[of(module)] |= set(map(of, targets)) - {of(module)}
    return found


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, todo = set(), [start]
    while todo:
        new = graph[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def test_modules_form_no_circle() -> None:
    graph = edges(PACKAGE)
    for importer, target in CLOSING_CIRCLES:
        assert target in graph[importer], f"{importer} does not import {target}: strike it out"
        graph[importer].remove(target)
    assert not circle(graph), f"each is imported by the next one: {circle(graph)}"
    assert not circle(folders(graph)), f"of sub-packages: {circle(folders(graph))}"
    layers = rooms_of(graph, f"{PACKAGE.name}._layers")
    assert len(layers) > 4 and not circle(layers), f"in _layers: {circle(layers)}"


def test_imports_stand_at_the_top() -> None:
    found = {
        (module, name)
        for module, tree in modules(PACKAGE).items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for name in imports(function)
    }
    assert found == set(INSIDE_FUNCTIONS)


def test_rooms_know_only_what_is_below_them() -> None:
    graph = edges(PACKAGE)
    rooms = [f"{PACKAGE.name}.{room}" for room in ROOMS]
    for i, room in enumerate(rooms):
        above = reached(graph, room) & set(rooms[i + 1 :])
        assert not above, f"{room} reaches {sorted(above)}"


UP = {
    "at the top": "from p import b\n",
    "of a name": "from p.b import x\n",
    "of the module": "import p.b\n",
    "in a function": "def f():\n    from p.b import x\n",
    "for type checkers": "if TYPE_CHECKING:\n    from p.b import x\n",
    "if it is there": "try:\n    import p.b as c\nexcept ImportError:\n    c = None\n",
    "through a sub-package": "import p.q.c\n",
    "through the package": "import p\n",
}


@pytest.mark.parametrize("text", UP.values(), ids=UP)
def test_an_import_upwards_is_found(text: str, tmp_path: Path) -> None:
    package = tmp_path / "p"
    (package / "q").mkdir(parents=True)
    files = {"__init__": "from p import b", "b": "from p import a", "a": "import sys"}
    for name, content in {**files, "q/__init__": "from p import b", "q/c": ""}.items():
        (package / f"{name}.py").write_text(content)
    assert not circle(edges(package))
    (package / "a.py").write_text(text)
    assert {"p.a", "p.b"} <= set(circle(edges(package)))


def test_a_circle_of_sub_packages_is_found() -> None:
    graph = {"p.q.a": {"p.r.a"}, "p.r.a": set(), "p.r.b": {"p.q.b"}, "p.q.b": set()}
    assert not circle(graph) and circle(folders(graph))

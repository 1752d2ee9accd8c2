# SPDX-License-Identifier: BSD-3-Clause
"""python_loader's modules know only modules below them, and import at their top; optfuse knows
nothing of the packages beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from tree import PACKAGES

_NAMES = "optfuse._names"  # which alone imports what the packages beside optfuse have

_FINDS = "doctor has to run where torch or the library can't be loaded, and says why"

#: Imports inside of functions: (importer, imported), and why they are there.
INSIDE_FUNCTIONS: dict[tuple[str, str], str] = {
    **{
        ("optfuse_tools.doctor.command", f"optfuse_tools.doctor.{name}"): _FINDS
        for name in ("assumptions", "bits", "gpus", "wide_layer")
    },
    (
        "optfuse_tools.script_ab.command",
        "optfuse_tools.script_ab.work",
    ): "arguments are looked at before torch is imported, and the library may be missing",
    ("optfuse._library.loader", "torch"): "the platform is looked at before torch is imported, "
    "which would not survive a subinterpreter; and a torch that is missing gets our sentence",
    ("optfuse_layers.pipeline.gantt", "matplotlib.figure.Figure"): "matplotlib need not be "
    "installed, and takes long to import",
    **{
        ("optfuse_tools.script_ab.page", f"matplotlib.{name}"): "matplotlib need not be installed"
        for name in ("rc_context", "figure.Figure")
    },
}

#: From the bottom to the top. None reaches one that comes later, by whatever way.
ROOMS = (
    "optfuse._class_code",
    "optfuse._options",
    "optfuse._rules",
    "optfuse._late",
    "optfuse._trials.rule_choice",
    "optfuse._link",
    "optfuse._fused.classes",
    "optfuse._fuse",
    "optfuse_tools.ab.ab",
)


def modules(packages: list[Path]) -> dict[str, ast.Module]:
    """By dotted names; a package has that of its __init__.py."""
    found = {}
    for package in packages:
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


def running(tree: ast.Module) -> ast.Module:
    """Without imports that type checkers alone read."""

    class Running(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> list[ast.stmt] | ast.If:
            self.generic_visit(node)
            return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node

    return Running().visit(tree)  # type: ignore[no-any-return]


def edges(packages: list[Path], only_running: bool = False) -> dict[str, set[str]]:
    """The modules of the packages that each of them imports. A module of a sub-package brings
    that one's __init__.py along; the outermost is there anyway. only_running: without what type
    checkers alone read."""
    known, outermost = modules(packages), {package.name for package in packages}

    def meant(name: str) -> set[str]:
        parts = name.split(".")
        heads = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        found = {head for head in heads if head in known}
        return found - outermost or found

    return {
        module: {target for name in imports(tree) for target in meant(name)} - {module}
        for module, tree in ((m, running(t) if only_running else t) for m, t in known.items())
    }


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One of them, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def folders(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same, with each sub-package of an outermost as one."""

    def of(module: str) -> str:
        return ".".join(module.split(".")[:2])

    found: dict[str, set[str]] = {of(module): set() for module in graph}
    for module, targets in graph.items():
        found[of(module)] |= set(map(of, targets)) - {of(module)}
    return found


def floors(graph: dict[str, set[str]]) -> int:
    """How many steps lead from the lowest to the highest."""
    height: dict[str, int] = {}
    for node in TopologicalSorter(graph).static_order():
        height[node] = 1 + max((height[below] for below in graph.get(node, ())), default=0)
    return max(height.values())


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, todo = set(), [start]
    while todo:
        new = graph[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def test_modules_form_no_circle() -> None:
    graph = edges(PACKAGES)
    assert not circle(graph), f"each is imported by the next one: {circle(graph)}"
    assert not circle(folders(graph)), f"of sub-packages: {circle(folders(graph))}"


def test_the_house_has_few_floors() -> None:
    assert floors(folders(edges(PACKAGES, only_running=True))) <= 12


def test_imports_stand_at_the_top() -> None:
    found = {
        (module, name)
        for module, tree in modules(PACKAGES).items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for name in imports(function)
    }
    assert found == set(INSIDE_FUNCTIONS)


def test_rooms_know_only_what_is_below_them() -> None:
    graph = edges(PACKAGES)
    for i, room in enumerate(ROOMS):
        above = reached(graph, room) & set(ROOMS[i + 1 :])
        assert not above, f"{room} reaches {sorted(above)}"


def of_others(tree: ast.Module, package: str) -> set[str]:
    """Modules of other packages of ours that a module of this one imports, or names in a string."""
    names = {other.name for other in PACKAGES} - {package}
    strings = (n.value for n in ast.walk(running(tree)) if isinstance(n, ast.Constant))
    said = (text for text in strings if isinstance(text, str) and "." in text)
    return {n for n in (*imports(running(tree)), *said) if n.split(".")[0] in names}


def test_packages_know_optfuse_and_it_knows_none_of_them() -> None:
    for module, tree in modules(PACKAGES).items():
        package = module.split(".")[0]
        wrong = of_others(tree, package)
        if package != "optfuse":
            wrong = {name for name in wrong if name.split(".")[0] != "optfuse"}
        assert module == _NAMES or not wrong, f"{module}: {wrong}"


def test_an_import_from_a_package_beside_is_found() -> None:
    inside = "def f():\n    from optfuse_layers import tap"
    running = "if TYPE_CHECKING:\n    pass\nelse:\n    import optfuse_layers.tap"
    for text in (inside, running, "import_module('optfuse_tools.ab')"):
        assert of_others(ast.parse(text), "optfuse"), text


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
    assert not circle(edges([package]))
    (package / "a.py").write_text(text)
    assert {"p.a", "p.b"} <= set(circle(edges([package])))


def test_a_circle_of_sub_packages_is_found() -> None:
    graph = {"p.q.a": {"p.r.a"}, "p.r.a": set(), "p.r.b": {"p.q.b"}, "p.q.b": set()}
    assert not circle(graph) and circle(folders(graph))

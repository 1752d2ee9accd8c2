# SPDX-License-Identifier: BSD-3-Clause
"""Parts of PyTorch that are replaced, or used although they are private, are listed in
python_loader/optfuse/_patches/listed.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tree import LOADER, ROOT, modules, name, sources

REPLACING = LOADER / "optfuse/_patches/replacing.py"
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}


def from_torch(tree: ast.AST) -> set[str]:
    """The names in a module that stand for something of PyTorch."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found.add(alias.asname or "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):  # kept under another name
        kept = isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute)
        if kept and root_of(node.value) in found:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def root_of(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def written(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def patches(source: str) -> Iterator[str]:
    """Lines that may write into something of PyTorch without replace()."""
    tree = ast.parse(source)
    theirs = from_torch(tree)
    for node in ast.walk(tree):
        for target in written(node):
            if isinstance(target, ast.Attribute | ast.Subscript) and root_of(target) in theirs:
                yield ast.unparse(node)
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        called = function.attr if isinstance(function, ast.Attribute) else root_of(function)
        if called in SETTERS and not (node.args and root_of(node.args[0]) == "self"):
            yield ast.unparse(node)
        if called in ("update", "setdefault", "pop") and root_of(function) in theirs:
            yield ast.unparse(node)


@pytest.mark.parametrize("path", modules(), ids=name)
def test_python_code_replaces_nothing_past_the_list(path: Path) -> None:
    found = [] if path == REPLACING else list(patches(path.read_text("utf-8")))
    assert not found, f"{name(path)} has to call replace() of _patches/replacing.py: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.Module.forward = f",
        "import torch._dynamo.eval_frame as eval_frame\neval_frame.stance = f",
        "def install():\n    from torch.optim import Optimizer\n    Optimizer.step = f",
        "from torch import Tensor\nsetattr(Tensor, 'data_ptr', f)",
        "import torch\nscaler = torch.amp.GradScaler\nscaler.scale = f",
        "import torch\ndel torch.Tensor.data_ptr",
        "import torch\ntorch.hooks['a'] = f",
        "import torch\ntorch._C.__dict__.update(a=f)",
        "def wrap(owner):\n    setattr(owner, 'step', f)",
    ],
)
def test_a_patch_past_the_list_is_found(source: str) -> None:
    assert list(patches(source))


#: Names that Python code imports from private modules of PyTorch without an entry in the list, and
#: why.
UNLISTED = {
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "a new name fails at the import",
    "torch.utils._python_dispatch.TorchDispatchMode": "PyTorch's own pages show it to users",
    "torch.profiler._cupti_monitor.get_monitor": "only some releases have it; it is asked for",
}


def from_private_modules(source: str) -> Iterator[str]:
    """The functions and classes that are imported by their names."""
    for node in ast.walk(ast.parse(source)):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("torch.") and any(p.startswith("_") for p in module.split(".")):
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_what_is_imported_from_private_modules_is_listed() -> None:
    from optfuse._patches import listed

    lists = [value for value in vars(listed).values() if isinstance(value, listed.Lists)]
    known = {path for each in lists for _, _, path, _ in each.places}
    found = {path for file in modules() for path in from_private_modules(file.read_text("utf-8"))}
    assert "torch.distributed.pipelining._backward.stage_backward_input" in found
    assert found - known == set(UNLISTED)


# Private parts of PyTorch that C++ code may need: members that an explicit
# instantiation or a derived class names, symbols that are looked up, places of hooks.
PRIVATE = re.compile(
    r"struct \w+<&c10::\w+::(\w+)>"
    r"|impl->\*\(&\w+::(\w+)\)"
    r"|(TESTING_ONLY_\w+)"
    r"|struct .*\b(PyTorchError) :"
    r"|pyobj_slot\(\)->(\w+)"
    r"|materialize_autograd_meta\(param\)->(\w+)"
    r"|generated::(\w+)"
    r'|->impl\("(\w+)"'
    r"|(set_sequence_nr)\("
    r"|/\* (PyMethodDef) \*/"
    r'|"((?:V[MS]\w+_64_|MKL_\w+|[sd]gemm_|torch_get_\w+|_ZN\w+))"'
)
FALLBACK = re.compile(r"registerFallback\(|TORCH_LIBRARY_IMPL|m\.impl\(|(?:\.|->)impl\(\"\w+\"")


def used_by_the_shim() -> set[tuple[str, str]]:
    shim = ROOT / "shim"
    return {
        (next(filter(None, found)), str(path.relative_to(shim)))
        for path in sources("shim")
        for found in PRIVATE.findall(path.read_text("utf-8"))
    }


def test_what_the_shim_uses_that_is_private_is_listed() -> None:
    from optfuse._patches.listed import PRIVATE

    assert {(entry.name, entry.file) for entry in PRIVATE} == used_by_the_shim()


def test_the_shim_registers_one_fallback_two_operators_and_ways_of_its_own_past_it() -> None:
    places = {name(p): FALLBACK.findall(p.read_text("utf-8")) for p in sources("shim")}
    assert {path: found for path, found in places.items() if found} == {
        "shim/averages/averages.cpp": ["m.impl("],
        "shim/clipping/operators.cpp": ["m.impl("] * 2,
        "shim/layers/tap.cpp": ['->impl("linear"', '->impl("conv2d"'],
        "shim/host/first_use.cpp": ["registerFallback("],
    }

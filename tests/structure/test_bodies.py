# SPDX-License-Identifier: BSD-3-Clause
"""No function is written twice, and none is too long to be read at once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tree import files, name

FOLDERS = ("python_loader/", "plugin/", "shim/", "kernels/")
SMALL = 60  # characters of a body without spaces: a line or two may be said twice
LONGEST = 40  # lines of a function of the loader, without its docstring

Body = tuple[str, str]  # where, and the text
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*#.*?(?<!\\)$", re.DOTALL | re.MULTILINE)
_HEAD = re.compile(r"\)(?: (?:const|noexcept|override))* \{\n|\)(?: (?:const|noexcept))*\n\{\n")


def python_functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name(path)}: {node.name}()", node


def docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt | None:
    return node.body[0] if ast.get_docstring(node) is not None else None


def python_bodies(path: Path) -> Iterator[Body]:
    for where, node in python_functions(path):
        body = node.body[1:] if docstring(node) else node.body
        yield where, "".join("\n".join(map(ast.unparse, body)).split())


def end_of(text: str, at: int) -> int:
    """Behind the brace that closes what the one before `at` has opened."""
    depth = 1
    while depth and at < len(text):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at


def c_bodies(path: Path) -> Iterator[Body]:
    """Those of functions, and of loops and branches that are longer than many a function."""
    text = _COMMENT.sub("", path.read_text("utf-8"))
    for head in _HEAD.finditer(text):
        line = text.rfind("\n", 0, head.start()) + 1
        if not text[line : line + 1].isspace():
            body = text[head.end() : end_of(text, head.end()) - 1]
            yield f"{name(path)}: {text[line : head.start()]})", "".join(body.split())


def bodies() -> Iterator[Body]:
    for path in files():
        if name(path).startswith(FOLDERS):
            if path.suffix == ".py":
                yield from python_bodies(path)
            elif path.suffix in (".c", ".h", ".cpp", ".hpp", ".cu"):
                yield from c_bodies(path)


def test_no_function_is_written_twice() -> None:
    found = defaultdict(list)
    for where, body in bodies():
        if len(body) > SMALL:
            found[body].append(where)
    assert len(found) > 2000, "few functions were found: the search itself is broken"
    twice = [wheres for wheres in found.values() if len(wheres) > 1]
    assert not twice, "\n".join(" = ".join(wheres) for wheres in twice)


def test_functions_can_be_read_at_once() -> None:
    long = {}
    for path in files():
        if not name(path).startswith("python_loader/") or path.suffix != ".py":
            continue
        for where, node in python_functions(path):
            text = docstring(node)
            lines = node.end_lineno - node.lineno + 1  # type: ignore[operator]
            lines -= text.end_lineno - text.lineno + 1 if text else 0  # type: ignore[operator]
            if lines > LONGEST:
                long[where] = lines
    assert not long, f"functions of more than {LONGEST} lines: {long}"

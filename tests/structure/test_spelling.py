# SPDX-License-Identifier: BSD-3-Clause
"""The library's errors name calls as Python writes them. For C++ programs shim/cxx/spelling.cpp
has each such phrase that they can meet."""

from __future__ import annotations

import re

from tree import ROOT

LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
PYTHON = re.compile(r"optfuse\.\w|\w=(?:\"|True|False|None)|`|torch\.(?!optim)\w|state\[|unfuse")
#: Phrases about Python's optimizers only: their operators, counters, own steps and CUDA rules.
OF_PYTHON = ("state['", "capturable", "optfuse.register", "set_default_dtype")
FOLDERS = ("base", "memory", "plan", "absent", "gpu", "host", "autograd", "doors")
FILES = list((ROOT / "plugin").glob("*.c"))
FILES += [path for name in FOLDERS for path in (ROOT / "shim" / name).glob("*.cpp")]


def texts(code: str) -> list[str]:
    """String literals, those that the compiler joins in one piece."""
    code = re.sub(r"^\s*#.*|//.*", "", code, flags=re.MULTILINE)
    return [text.replace('\\"', '"') for text in LITERAL.findall(re.sub(r'"\s+"', "", code))]


def in_cxx(text: str) -> str:
    spellings = texts((ROOT / "shim" / "cxx" / "spelling.cpp").read_text())
    for python, cxx in zip(spellings[::2], spellings[1::2], strict=True):
        text = text.replace(python, cxx)
    return text


def test_each_python_phrase_of_an_error_has_a_spelling_in_cxx() -> None:
    seen = 0
    for path in FILES:
        for text in texts(path.read_text()):
            if any(phrase in text for phrase in OF_PYTHON):
                continue
            seen += text != in_cxx(text)
            found = PYTHON.search(in_cxx(text))
            assert not found, f"{path.relative_to(ROOT)} says {found[0]} to C++: {text}"
    assert seen >= 10, "texts with such phrases"

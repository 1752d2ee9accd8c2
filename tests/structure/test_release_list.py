# SPDX-License-Identifier: BSD-3-Clause
"""The list of tested releases (python_loader/optfuse/_library/releases.py) and what other files,
which can't read it, say of releases."""

from __future__ import annotations

import re
import runpy

from tree import ROOT

LIST = runpy.run_path(str(ROOT / "python_loader" / "optfuse" / "_library/releases.py"))
TESTED = LIST["TESTED"]
RANGE = f"torch {TESTED[0]} to {TESTED[-1]}"


def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def test_releases_are_in_order_without_gaps() -> None:
    minors = [int(release.removeprefix("2.")) for release in TESTED]
    assert minors == list(range(minors[0], minors[-1] + 1))


def test_what_is_said_to_be_supported_is_what_is_tested() -> None:
    for path in ("README.md", "pyproject.toml"):
        ranges = re.findall(r"torch 2\.\d+ to 2\.\d+", read(path).replace("\n", " "))
        assert ranges and set(ranges) == {RANGE}, f"{path} says {ranges}, not {RANGE}"


def test_the_shim_takes_the_oldest_release_and_later_ones() -> None:
    oldest = re.search(r"#if !OF_TORCH_AT_LEAST\((\d+)\)", read("shim/base/compat.h"))
    assert oldest is not None and f"2.{oldest.group(1)}" == TESTED[0]
    assert f"version_compare('<{TESTED[0]}')" in read("shim/meson.build")


def test_the_environment_of_the_tests_has_a_tested_release() -> None:
    usual = re.search(r'"torch==(2\.\d+)\.\d+"', read("tests/bootstrap.py"))
    assert usual is not None and usual.group(1) in TESTED


def test_classes_of_cxx_have_the_bits_of_the_releases_in_the_list() -> None:
    code = read("shim/cxx/classes.cpp")
    rows = re.findall(r'\{"\w+", "(\w+)",.*?, (\d+)\}', code[code.index("classes[]") :], re.DOTALL)
    assert len(rows) == 5
    for rule, last in rows:
        listed = {LIST["_LAST"].get((rule, dtype)) for dtype in ("bfloat16", "float16")}
        assert listed == {f"2.{last}" if int(last) else None}, rule


def test_no_bits_are_known_on_another_processor() -> None:
    holds, last = LIST["holds"], TESTED[-1]
    assert holds("adam", "float32", last, "x86_64")
    assert not holds("adam", "float32", last, "aarch64")

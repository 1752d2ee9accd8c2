# SPDX-License-Identifier: BSD-3-Clause
"""The blocks of README.md and docs/ run as they stand there."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import docs_blocks
import pytest
from docs_blocks import BLOCKS, PAGES, ROOT
from docs_setups import ALL, APART, ELSEWHERE, ON_TWO, SETUPS
from several import finished

import optfuse

KINDS = ("python", "sh", "c", "cpp", "cmake", "text")
SOURCES = ("kernels", "plugin", "shim", "docs/examples")


def of_kind(kind):
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.kind == kind]


def test_each_block_is_of_a_kind_that_is_tested():
    wrong = [str(block) for block in BLOCKS if block.kind not in KINDS]
    assert not wrong, f"their fences name none of {KINDS}: {wrong}"
    wrong = [
        str(b)
        for b in BLOCKS
        if b.kind == "text" and re.search(r"optfuse\.(?!h\b)|import ", b.text)
    ]
    assert not wrong, f"Python that can't be parsed: {wrong}"


def test_no_setup_is_left_over():
    firsts = {part.first for block in BLOCKS if block.kind == "python" for part in parts(block)}
    left = {*SETUPS, *ON_TWO, *ELSEWHERE, *APART} - firsts - {b.page for b in BLOCKS}
    assert not left, f"no block begins so: {left}"


def parts(block):
    """The block, or its paragraphs."""
    if block.first not in APART:
        return [block]
    return [
        docs_blocks.Block(block.page, block.line, block.kind, text)
        for text in block.text.split("\n\n")
    ]


def runnable(block):
    """Where something is not installed, without the lines that need it."""
    lines = block.text.splitlines()
    missing = [
        package
        for package in re.findall(r"# needs (\w+)", block.text)
        if importlib.util.find_spec(package) is None
    ]
    return "\n".join(x for x in lines if not any(f"# needs {name}" in x for name in missing))


def start_on_two(block, folder):
    script = folder / "script.py"
    script.write_text(ALL + ON_TWO[block.first] + block.text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = finished(
        [*torchrun, "--nproc-per-node=2", str(script)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore:.*DistributedDataParallel:UserWarning")
@pytest.mark.parametrize("block", of_kind("python"))
def test_python_runs(block, gloo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = ELSEWHERE.get(block.first) or ELSEWHERE.get(block.page)
    if elsewhere:
        pytest.skip(f"{elsewhere} starts it")
    if block.first in ON_TWO:
        start_on_two(block, tmp_path)
        return
    for part in parts(block):
        assert part.first in SETUPS, f"{part}: no line of docs_setups.py begins {part.first!r}"
        names = {"__name__": str(part)}
        exec(ALL + SETUPS[part.first], names)
        exec(compile(runnable(part), str(part), "exec"), names)


@pytest.mark.parametrize("block", [*of_kind("c"), *of_kind("cpp"), *of_kind("cmake")])
def test_c_stands_in_the_sources(block):
    """In this order; the build compiles them there."""

    def lines_of(text):
        return [" ".join(line.split()) for line in text.splitlines() if line.strip()]

    def has(path):
        rest = iter(lines_of(path.read_text("utf-8")))
        return all(line in rest for line in lines_of(block.text))

    paths = [path for layer in SOURCES for path in (ROOT / layer).rglob("*.[cdhpt]*")]
    paths = [path for path in paths if path.suffix != ".pyc"]
    assert any(has(path) for path in paths)


HELP = {
    "pip": [sys.executable, "-m", "pip"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "optfuse": [sys.executable, "-m", "optfuse"],
}


@functools.cache
def help_of(*command):
    return subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout


def split(words):
    """The command, of which --help says what it takes, and its own words."""
    if words[:3] == ["python", "-m", "optfuse"]:
        words = words[2:]
    elif words[0] == "python":
        raise AssertionError(f"{words}: which module is that?")
    if words[0] in ("pip", "optfuse") and len(words) > 1:
        return (*HELP[words[0]], words[1]), words[2:]
    if words[0] in HELP:
        return tuple(HELP[words[0]]), words[1:]
    return (sys.executable, str(ROOT / words[0])), words[1:]


def own_flags(words):
    """Those before the script, whose flags are its own."""
    end = next((i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")), None)
    return [word.split("=")[0] for word in words[:end] if word.startswith("-")]


def test_commands_have_the_flags_that_the_docs_give_them():
    wrong, seen = [], 0
    for where, words in docs_blocks.commands():
        command, rest = split(words)
        known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", help_of(*command)))
        wrong += [f"{where}: {words} has no {flag}" for flag in {*own_flags(rest)} - known]
        seen += 1
    assert seen > 10 and not wrong, "\n".join(wrong)


def test_a_wrong_flag_is_found():
    command, rest = split(["python", "-m", "optfuse", "ab", "--round", "3", "a.py", "--epochs"])
    assert own_flags(rest) == ["--round"] and " --round " not in help_of(*command)


def named():
    """optfuse.pipeline.plan, where a page names it."""
    for page in PAGES:
        for name in re.findall(r"\boptfuse((?:\.[a-zA-Z]\w*)+)", page.read_text("utf-8")):
            yield page.name, name[1:]


def test_functions_that_the_docs_name_are_there():
    def is_there(name):
        try:
            functools.reduce(getattr, name.split("."), optfuse)
        except AttributeError:
            return name.split(".")[-1] in ("h", "hpp", "py") or is_module(name)
        return True

    def is_module(name):
        return (
            (ROOT / "python_loader" / "optfuse" / name.replace(".", "/"))
            .with_suffix(".py")
            .exists()
        )

    wrong = [f"{page}: optfuse.{name}" for page, name in named() if not is_there(name)]
    assert not wrong, wrong


def test_pages_that_the_docs_link_are_there():
    wrong = []
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
            if "://" not in target and not (page.parent / target).exists():
                wrong.append(f"{page.name}: {target}")
    assert not wrong, wrong
    assert Path(ROOT / "docs").is_dir()


def test_the_picture_of_a_trace_can_be_drawn(tmp_path):
    """docs/trace.svg comes from this script."""
    picture = tmp_path / "trace.svg"
    script = [sys.executable, str(ROOT / "benchmarks" / "trace.py"), str(picture)]
    subprocess.run(script, check=True, capture_output=True)
    kept, drawn = (ROOT / "docs" / "trace.svg").read_text("utf-8"), picture.read_text("utf-8")
    for name in ("all parameters", "second.weight", "second.bias + 1"):
        assert f">{name}</text>" in kept
    for name in ("aten::_fused_adamw_", "'second.weight'", "'second.bias'"):
        assert name in drawn

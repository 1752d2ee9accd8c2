# SPDX-License-Identifier: BSD-3-Clause
"""The blocks of README.md and docs/ run as they stand there."""

import functools
import importlib.util
import os
import re

import docs_blocks
import forked_python
import pytest
from docs_blocks import BLOCKS, PAGES, ROOT
from several import launched, printed

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


def runnable(text):
    """Where something is not installed, without the lines that need it."""
    missing = [
        package
        for package in re.findall(r"# needs (\w+)", text)
        if importlib.util.find_spec(package) is None
    ]
    lines = text.splitlines()
    return "\n".join(x for x in lines if not any(f"# needs {name}" in x for name in missing))


def written(text, folder, name):
    """Nothing is added to the text."""
    (folder / name).write_text(runnable(text), "utf-8")


def pasted(page):
    """Its Python blocks that are no scripts of their own, one behind the other: each is pasted
    after those before it."""
    blocks = [block for block in BLOCKS if block.page == page and block.kind == "python"]
    return "\n\n".join(block.text for block in blocks if not block.command)


@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.kind == "python"}))
def test_the_blocks_of_a_page_run_one_after_the_other(page, tmp_path):
    if not pasted(page):
        pytest.skip("tests/python/recipes starts its scripts")
    written(pasted(page), tmp_path, "pasted.py")
    printed(["pasted.py"], tmp_path)


ON_TWO = [param for param in of_kind("python") if param.values[0].command.startswith("torchrun ")]


@pytest.mark.parametrize("block", ON_TWO)
def test_a_block_for_two_processes_runs_by_its_command(block, tmp_path):
    _, *words = block.command.split()
    written(block.text, tmp_path, words[-1])
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    done = launched(*words, cwd=tmp_path, PYTHONPATH=os.pathsep.join(paths))
    assert done.returncode == 0, done.stdout + done.stderr


def test_blocks_for_several_processes_are_scripts():
    """Others would need what is not on the page, as the files of recipes.md do not."""
    assert len(ON_TWO) >= 3
    several = re.compile(r"init_process_group|fully_shard|DistributedDataParallel\(")
    wrong = [
        str(block)
        for block in BLOCKS
        if block.kind == "python" and several.search(block.text) and not block.command
    ]
    assert not wrong, f"they don't begin with their command: {wrong}"


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
    "pip": ["-m", "pip"],
    "torchrun": ["-m", "torch.distributed.run"],
    "optfuse": ["-m", "optfuse"],
}


@functools.cache
def help_of(*command):
    asked = forked_python.started([*command, "--help"], ROOT, dict(os.environ))
    done = forked_python.run(asked, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def split(words):
    """The arguments of a Python whose --help says what it takes, and the command's own words."""
    if words[:3] == ["python", "-m", "optfuse"]:
        words = words[2:]
    elif words[0] == "python":
        raise AssertionError(f"{words}: which module is that?")
    if words[0] in ("pip", "optfuse") and len(words) > 1:
        return (*HELP[words[0]], words[1]), words[2:]
    if words[0] in HELP:
        return tuple(HELP[words[0]]), words[1:]
    return (str(ROOT / words[0]),), words[1:]


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
            return name.split(".")[-1] in ("h", "hpp", "pc", "py") or is_module(name)
        return True

    def is_module(name):
        return (
            (ROOT / "python_loader" / "optfuse" / name.replace(".", "/"))
            .with_suffix(".py")
            .exists()
        )

    wrong = [f"{page}: optfuse.{name}" for page, name in named() if not is_there(name)]
    assert not wrong, wrong


def anchors(page):
    heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_pages_and_sections_that_the_docs_link_are_there():
    wrong, seen = [], 0
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for target, _, section in re.findall(r"\]\(([^)#\s]*)(#([^)\s]+))?\)", prose):
            other = page.parent / target if target else page
            if "://" in target:
                continue
            seen += bool(section)
            if not other.exists() or (section and section not in anchors(other)):
                wrong.append(f"{page.name}: {target}#{section}")
    assert seen > 20 and not wrong, wrong


def test_the_picture_of_a_trace_can_be_drawn(tmp_path):
    """docs/trace.svg comes from this script."""
    picture = tmp_path / "trace.svg"
    printed([str(ROOT / "benchmarks" / "trace.py"), str(picture)], tmp_path)
    kept, drawn = (ROOT / "docs" / "trace.svg").read_text("utf-8"), picture.read_text("utf-8")
    for name in ("all parameters", "second.weight", "embed.bias + 1"):
        assert f">{name}</text>" in kept
    for name in ("aten::_fused_adamw_", "'second.weight'", "'second.bias'"):
        assert name in drawn

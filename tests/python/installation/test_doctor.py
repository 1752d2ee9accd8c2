# SPDX-License-Identifier: BSD-3-Clause
"""`python -m optfuse doctor`: what it finds where all is well, and that it says what to do where
something is not."""

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from several import python

import optfuse
from optfuse._library import started
from optfuse_tools.doctor import assumptions, bits, facts, wide_layer
from optfuse_tools.doctor.command import without_names

PACKAGE = Path(optfuse.__file__).parent
PACKAGES = [PACKAGE.with_name(name) for name in ("optfuse", "optfuse_layers", "optfuse_tools")]


def doctor(*arguments, cwd="/", fresh=True, **variables):
    """fresh: in an interpreter that has not imported torch yet."""
    return python(["-m", "optfuse", "doctor", *arguments], cwd, fresh=fresh, **variables)


def problems(done):
    """The faults that doctor reports; its exit status agrees."""
    lines = done.stdout.splitlines()
    assert lines[0] == "---- optfuse doctor ----" and "---- end ----" in lines, done.stdout
    assert not done.stderr, done.stderr
    found = [line for line in lines if "PROBLEM: " in line]
    assert done.returncode == int(bool(found)), done.stdout
    return found


def seconds(done):
    return float(re.search(r"^verdict: .* after ([\d.]+) s$", done.stdout, re.MULTILINE)[1])


def test_it_finds_nothing_here():
    done = doctor()
    assert problems(done) == []
    facts = dict(line.split(": ", 1) for line in done.stdout.splitlines()[1:-1])
    assert facts["optfuse"].strip().startswith(optfuse.__version__)
    assert torch.__version__ in facts["torch"]
    assert facts["instructions"].split(":")[0].strip() in ("c", "baseline", "avx2", "avx512")
    assert re.search(r"liboptfuse_torch-.*\.so, built for this torch$", facts["library"])
    assert "all that optfuse replaces or relies on" in facts["torch's parts"]
    assert facts["page faults"].strip()
    assert "[" not in done.stdout, "counts are for --verbose"
    assert re.search(r"/lib[gi]?omp", facts["OpenMP"])
    equal, tried = re.match(r" *(\d+) of (\d+) cases", facts["bits"]).groups()
    assert equal == tried and int(tried) > 10
    assert all(name in facts["first use"] for name in assumptions.USES)


@pytest.mark.parametrize(("machine", "says"), [("aarch64", True), ("x86_64", False)])
def test_it_says_which_processors_were_emulated_only(machine, says, monkeypatch):
    monkeypatch.setattr(facts.platform, "machine", lambda: machine)
    texts = [f"{finding.name}: {finding.text}" for finding in facts.versions()]
    assert ("tested: aarch64: under emulation, not yet on hardware" in texts) == says, texts


def test_verbose_adds_numbers_to_the_same_lines():
    done = doctor("--verbose", fresh=False)
    assert problems(done) == []
    assert re.search(r"relies on is as expected \[\d+ replaced, \d+ used\]", done.stdout)
    assert re.search(r"built for this torch \[abi \d+, .*torch 2\.\d+\]", done.stdout)


def test_without_numpy_it_is_clean(tmp_path):
    """Site-packages as they are here, without NumPy; torch warns there when it looks for it."""
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not entry.name.startswith(("numpy", "_numpy", "__pycache__")):
            (tmp_path / entry.name).symlink_to(entry)
    for package in PACKAGES:
        if not (tmp_path / package.name).exists():  # it may be installed beside torch
            (tmp_path / package.name).symlink_to(package)
    command = ["-S", "-m", "optfuse", "doctor"]
    done = python(command, "/", fresh=True, PYTHONPATH=str(tmp_path))
    assert problems(done) == []
    assert re.search(
        r"^NumPy: +not installed; torch and optfuse work without it$", done.stdout, re.MULTILINE
    )
    assert "DLPack" in done.stdout and "operators, NumPy" not in done.stdout


def test_another_torch_than_the_one_that_optfuse_was_compiled_for(tmp_path):
    text = "__version__ = '2.15.3+cu130'\ndef compiled_with_cxx11_abi(): return True"
    done = doctor(PYTHONPATH=fake_torch(tmp_path, text))
    (problem,) = problems(done)
    assert "torch was exchanged under optfuse" in problem and "build optfuse again" in problem


@pytest.mark.parametrize("share", (0.2, 0.01))
def test_page_faults_of_a_wide_layer_are_named_with_the_remedy(share, monkeypatch):
    monkeypatch.setattr(wide_layer, "_used", lambda: None)
    monkeypatch.setattr(wide_layer, "share", lambda used: share)
    (finding,) = wide_layer.findings()
    assert ("GLIBC_TUNABLES=" in finding.text) is (share > 0.05) and not finding.is_problem


def test_the_wide_layer_has_page_faults():
    """As long as malloc gives its gradient back."""
    used = wide_layer._used()
    assert used.faults > 0 and 0 < used.in_kernel <= used.seconds


def test_no_name_of_a_user_or_machine_is_printed(tmp_path):
    """Paths are where names are; here the home directory has the library's build."""
    build = Path(os.environ.get("OPTFUSE_LIBRARY") or next(PACKAGE.glob("liboptfuse_torch*.so")))
    home = tmp_path / "alice"
    home.mkdir()
    for file in (build, build.with_suffix(".json")):
        shutil.copy(file, home)
    variables = {"HOME": str(home), "OPTFUSE_LIBRARY": str(home / build.name), "USER": "alice"}
    done = doctor(fresh=False, **variables)
    assert problems(done) == []
    assert f"~/{build.name}" in done.stdout
    assert "alice" not in done.stdout and str(tmp_path) not in done.stdout


def test_names_in_paths_are_replaced(monkeypatch):
    monkeypatch.setenv("HOME", "/users/alice")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "box7")
    shown = without_names
    assert shown("at /users/alice/x, /users/alice: /users/alicent") == "at ~/x, ~: /users/alicent"
    assert shown("/scratch/alice/a /net/box7/alices") == "/scratch/USER/a /net/HOST/alices"
    assert shown("torch on box7 by alice") == "torch on box7 by alice"  # we print no such text


def fake_torch(folder, text):
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(text)
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ImportError('libfoo.so is missing')", "can't be imported: libfoo.so is missing"),
        ("import ctypes; ctypes.CDLL('libbar.so')", "can't be imported: libbar.so: cannot open"),
        (
            "__version__ = '2.1.0'\ndef compiled_with_cxx11_abi(): return True",
            "optfuse supports torch 2.11 to 2.15; this is torch 2.1.0: install a supported release",
        ),
    ],
)
def test_torch_that_cant_be_used(text, says, tmp_path):
    done = doctor(PYTHONPATH=fake_torch(tmp_path, text))
    (problem,) = problems(done)
    assert problem.startswith("loading: ") and says in problem
    assert "install 'torch==" in problem, "the fix"
    assert ".json" not in done.stdout, "libraries are named, not their descriptions"


def test_a_library_that_is_not_there(tmp_path):
    done = doctor(fresh=False, OPTFUSE_LIBRARY=str(tmp_path / "none.so"))
    (problem,) = problems(done)
    assert "OPTFUSE_LIBRARY names" in problem and "which is not a file" in problem


def test_a_package_without_a_library(tmp_path):
    ignore = shutil.ignore_patterns("*.so", "*.json", "__pycache__")
    for package in PACKAGES:
        shutil.copytree(package, tmp_path / package.name, ignore=ignore)
    done = doctor(fresh=False, cwd=tmp_path, OPTFUSE_LIBRARY="", PYTHONPATH=str(tmp_path))
    (problem,) = problems(done)
    assert "has no compiled library" in problem
    assert "pip install --no-build-isolation ." in problem


def test_a_file_that_is_no_library(tmp_path):
    build = Path(os.environ.get("OPTFUSE_LIBRARY") or next(PACKAGE.glob("liboptfuse_torch*.so")))
    (tmp_path / "broken.so").write_text("broken")
    shutil.copy(build.with_suffix(".json"), tmp_path / "broken.json")
    (problem,) = problems(doctor(fresh=False, OPTFUSE_LIBRARY=str(tmp_path / "broken.so")))
    assert problem.startswith("loading:") and "broken.so" in problem


def test_it_works_with_optfuse_disabled():
    done = doctor(fresh=False, OPTFUSE_DISABLE="1")
    assert problems(done) == []
    assert "OPTFUSE_DISABLE is set: fuse() does nothing" in done.stdout


def test_only_the_command_is_left_without_the_names_of_the_package(tmp_path, monkeypatch):
    (tmp_path / "myoptfuse.py").write_text("import optfuse; print(optfuse.fuse)")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    run = [sys.executable, "-m", "myoptfuse"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for command, is_it in (
        ("-m optfuse run", True),
        ("-um optfuse", True),
        ("-moptfuse run", True),
        ("-mymoptfuse run", False),
        ("-m other optfuse", False),
        ("-X dev -m optfuse.other", False),
    ):
        words = command.split()
        module = next(i for i, word in enumerate(words) if re.match("-[a-z]*m", word))
        module += words[module].endswith("m")
        monkeypatch.setattr(sys, "orig_argv", ["python", *words])
        monkeypatch.setattr(sys, "argv", ["-m", *words[module + 1 :]])
        assert started.as_command() is is_it, command
        monkeypatch.setattr(sys, "argv", ["elsewhere", *words[module + 1 :]])
        assert not started.as_command()


def test_numbers_that_differ_are_a_problem():
    """The negative control: of an optimizer with another option the bits differ."""
    for case in bits.cases():
        assert bits.why_not(case) is None, case
        if case[3] is torch.float32:
            assert "other bits than" in bits.why_not(case, lr=0.011), case


def test_a_use_that_is_not_seen_is_a_problem(tmp_path):
    guards = os.environ.get("OPTFUSE_GUARDS_LIBRARY")
    if not guards:
        pytest.skip("OPTFUSE_GUARDS_LIBRARY is not set; tests/run sets it")
    done = doctor(fresh=False, OPTFUSE_LIBRARY=guards, OPTFUSE_TEST_GUARDS_OFF="raw")
    found = problems(done)
    assert found and all(line.startswith("first use:") for line in found), done.stdout
    assert any("data_ptr()" in line for line in found)


def test_what_differs_in_torch_is_a_problem(monkeypatch):
    lists = assumptions.listed.EVERYWHERE
    other = assumptions.listed.Patch("torch.Tensor.there_is_none", "it is tried")
    monkeypatch.setattr(
        assumptions.listed,
        "EVERYWHERE",
        assumptions.listed.Lists((*lists.patches, other), lists.places),
    )
    (finding,) = [found for found in assumptions.findings() if found.is_problem]
    assert finding.text.startswith("torch.Tensor.there_is_none is not there")

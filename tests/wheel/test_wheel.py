# SPDX-License-Identifier: BSD-3-Clause
"""The wheel that python_loader/build_wheel.py makes, for the torch that is here: what it holds,
what it asks of a system, and that it works in a clean environment without a compiler."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python_loader"))

import symbols  # noqa: E402

TORCH = Path(torch.__file__).parent
RELEASE = ".".join(torch.__version__.split(".")[:2])
STEM = f"liboptfuse_torch-{RELEASE}-cxx11abi1-linux_x86_64"
#: The platform tag promises to ask for no newer one.
GLIBC = re.compile(r"^optfuse-[\d.]+-py3-none-manylinux_(\d+)_(\d+)_x86_64\.whl$")
PACKAGES = {"optfuse", "optfuse_layers", "optfuse_tools"}
USUAL = {"CC": "cc", "CXX": "c++"}
Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def wheel() -> Path:
    named = os.environ.get("OPTFUSE_WHEEL")
    if not named:
        pytest.skip("OPTFUSE_WHEEL is not set; tests/run sets it")
    return Path(named)


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    return folder


def environment(folder: Path) -> Python:
    """Runs a virtual environment's Python: no command but its own on PATH, no home."""
    variables = {"PATH": str(folder / "bin"), "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}

    def run(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "bin" / "python"), *map(str, arguments)]
        given = {"env": variables | more, "cwd": "/", "timeout": 300}
        return subprocess.run(command, capture_output=True, text=True, **given)

    return run


def site(folder: Path) -> Path:
    return next(folder.glob("lib/python3*/site-packages"))


@pytest.fixture(scope="session")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment into which its own pip has installed the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True, with_pip=True)
    done = environment(folder)("-m", "pip", "install", "--quiet", "--no-index", wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    compilers = ("cc", "gcc", "clang", "c++", "g++", "clang++", "nvcc")
    assert not [name for name in compilers if shutil.which(name, path=folder / "bin")]
    return folder


@pytest.fixture
def python(clean: Path) -> Iterator[Python]:
    """That environment's, with the torch that is here."""
    path = site(clean) / "torch.pth"
    path.write_text(f"{TORCH.parent}\n")
    yield environment(clean)
    path.unlink()


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.so*"))


def test_it_is_for_every_python_and_for_the_systems_that_torch_is_for(
    wheel: Path, unpacked: Path
) -> None:
    assert GLIBC.match(wheel.name), wheel.name
    (described,) = unpacked.glob("*.dist-info/WHEEL")
    tags = re.findall(r"^Tag: (.*)$", described.read_text(), re.MULTILINE)
    assert tags == [wheel.name.removesuffix(".whl").split("-", 2)[2]]


def test_it_holds_the_packages_a_shim_for_this_torch_and_the_cuda_kernels(unpacked: Path) -> None:
    source = ROOT / "python_loader"
    paths = [path for package in PACKAGES for path in (source / package).rglob("*")]
    files = {path.relative_to(source) for path in paths if path.is_file()}
    files = {path for path in files if "__pycache__" not in path.parts}
    built = {Path("optfuse", f"{STEM}{ending}") for ending in (".so", ".json")}
    built |= {Path("optfuse/liboptfuse_cuda.so")} if shutil.which("nvcc") else set()
    held = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    assert {path for path in held if not path.parts[0].endswith(".dist-info")} == files | built
    assert json.loads((unpacked / "optfuse" / f"{STEM}.json").read_text())["torch"] == RELEASE
    assert {path.name.split("-")[0] for path in unpacked.iterdir()} == PACKAGES


def test_it_asks_of_a_system_no_more_than_its_tag_and_torch(wheel: Path, unpacked: Path) -> None:
    theirs = symbols.newest([TORCH / "lib" / "libtorch_cpu.so", TORCH / "lib" / "libc10.so"])
    tag = GLIBC.match(wheel.name)
    assert tag and libraries(unpacked)
    allowed = theirs | {"GLIBC": (int(tag[1]), int(tag[2]))}
    found = {path.name: symbols.too_new(path, allowed) for path in libraries(unpacked)}
    assert not any(found.values()), f"beyond {allowed}: {found}"


def test_what_the_system_here_has_newer_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "new.c").write_text(
        "#include <math.h>\n#include <dlfcn.h>\nvoid *f(double *x);\n"
        'void *f(double *x) { *x = pow(*x, *x); return dlopen("x", 1); }\n'
    )
    compile = [*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", "-O2", "new.c", "-lm"]
    portable = ["-include", str(ROOT / "kernels" / "portable.h")]
    found = []
    for name, more in (("new.so", []), ("old.so", portable)):
        command = [*compile, *more, "-ldl", "-o", name]
        subprocess.run(command, cwd=tmp_path, check=True)
        found.append(symbols.too_new(tmp_path / name, {"GLIBC": (2, 28)}))
    assert list(found[0]) == ["GLIBC"] and not found[1], found


@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_what_older_runtimes_have_not_is_answered_as_newer_ones_do(
    level: str, tmp_path: Path
) -> None:
    cc, cxx = (os.environ.get(name, usual).split() for name, usual in USUAL.items())
    subprocess.run([*cc, "-c", level, ROOT / "shim" / "old_runtime.c"], cwd=tmp_path, check=True)
    compile = [*cxx, "-std=c++20", level, Path(__file__).with_name("old_runtime.cpp")]
    compile += ["-include", ROOT / "kernels" / "portable.h"]
    for name, more in (("new", []), ("old", ["old_runtime.o"])):
        subprocess.run([*compile, *more, "-o", name], cwd=tmp_path, check=True)
        done = subprocess.run([tmp_path / name], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout == "", f"{name}: {done.stdout}"
    newer = [symbols.asked(tmp_path / name)["GLIBCXX"] for name in ("new", "old")]
    assert newer[0] > (3, 4, 22), "nothing was called that older runtimes have not"
    assert newer[1] <= (3, 4, 22) or level == "-O0"  # of which no wheel is made


def test_doctor_finds_nothing_wrong(python: Python, clean: Path) -> None:
    """It trains each class in both modes beside stock."""
    done = python("-m", "optfuse", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{clean}/" in done.stdout, "another optfuse was tested"
    equal, tried = re.findall(r"(\d+) of (\d+) cases", done.stdout)[0]
    assert equal == tried and int(tried) > 10


def test_training_has_the_bits_of_stock(python: Python) -> None:
    """The suite's own test of whole models, with this suite's pytest."""
    ours = f"import sys, optfuse; sys.path.append({sysconfig.get_path('purelib')!r}); import pytest"
    run = "sys.exit(pytest.main(sys.argv[1:]))"
    models = ROOT / "tests" / "python" / "training" / "test_models.py"
    options = ["-q", "-p", "no:cacheprovider", "-k", "gpt or mlp"]
    done = python("-c", f"{ours}; {run}", *options, models)
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("platform", ["musllinux_1_2", "manylinux_2_99"])
def test_pip_refuses_a_wheel_for_another_system(
    platform: str, wheel: Path, clean: Path, tmp_path: Path
) -> None:
    """As it refuses this one on theirs, in words that docs/troubleshooting.md has."""
    other = tmp_path / wheel.name.replace("manylinux_2_28", platform)
    shutil.copy(wheel, other)
    done = environment(clean)("-m", "pip", "install", "--no-index", "--no-deps", other)
    assert done.returncode == 1
    assert f"{other.name} is not a supported wheel on this platform" in done.stderr


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    found = [line for line in done.stderr.splitlines() if line.startswith("ImportError: ")]
    assert done.returncode == 1 and found, done.stdout + done.stderr
    return found[-1]


def test_without_torch_the_error_says_what_to_install(clean: Path) -> None:
    message = refusal(environment(clean)("-c", "import optfuse"))
    assert "this Python has none" in message and "pip install 'torch==2." in message


@pytest.mark.parametrize("version", ["2.10.1", "2.99.0+cu150"])
def test_with_another_release_the_error_says_which_to_install(
    version: str, clean: Path, tmp_path: Path
) -> None:
    fake = tmp_path / "torch"
    fake.mkdir()
    text = f"__version__ = {version!r}\ndef compiled_with_cxx11_abi(): return True\n"
    (fake / "__init__.py").write_text(text)
    done = environment(clean)("-c", "import optfuse", PYTHONPATH=str(tmp_path))
    message = refusal(done)
    assert f"this is torch {version}" in message
    assert re.search(r"`pip install 'torch==2\.\d+\.\*'`", message)
    assert message.count("built for torch") <= 3, "one clause for all libraries"

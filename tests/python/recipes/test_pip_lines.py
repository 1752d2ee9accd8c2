# SPDX-License-Identifier: BSD-3-Clause
"""The pip lines of docs/recipes.md keep the torch that is there."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

DOCS = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text("utf-8")
LINES = re.findall(r"^    pip (\w+) (.*)$", DOCS, re.MULTILINE)


def test_each_line_that_installs_is_given_the_torch_that_is_written_down_first():
    first, *others = LINES
    assert first == ("list", '--format=freeze | grep "^torch==" > torch.txt')
    assert len(others) >= 5
    assert all(what == "install" and rest.startswith("-c torch.txt ") for what, rest in others)
    for section in ("Hugging Face Trainer", "Accelerate", "Lightning", "timm"):
        text = DOCS.split(f"\n## {section}\n")[1]
        assert text.lstrip("\n").startswith("    pip install -c torch.txt "), section


def make_wheel(folder, name, version, *needs):
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A framework whose vision package asks for one torch, as torchvision does."""
    folder = tmp_path_factory.mktemp("index")
    make_wheel(folder, "torch", "2.13.0+cpu")
    make_wheel(folder, "torch", "2.15.0")
    make_wheel(folder, "vision", "0.28.0", "torch==2.13.0")
    make_wheel(folder, "vision", "0.30.0", "torch==2.15.0")
    make_wheel(folder, "framework", "1.0", "torch>=2.0", "vision")
    make_wheel(folder, "newest", "1.0", "torch>=2.15")
    (folder / "torch.txt").write_text("torch==2.13.0+cpu\n")
    return folder


def would_install(index, *arguments):
    """As pip says it, without constraints of this machine's own."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index"]
    links = ["--ignore-installed", "--find-links", str(index)]
    usual = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(
        [*pip, *links, *arguments],
        cwd=index,
        env={**usual, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
    )


def test_with_the_line_torch_stays_and_without_it_is_exchanged(index):
    assert "Would install framework-1.0 torch-2.15.0 vision-0.30.0" in (
        would_install(index, "framework").stdout
    )
    kept = would_install(index, "-c", "torch.txt", "framework").stdout
    assert "Would install framework-1.0 torch-2.13.0+cpu vision-0.28.0" in kept


def test_what_cant_do_with_that_torch_is_refused(index):
    done = would_install(index, "-c", "torch.txt", "newest")
    assert done.returncode != 0 and "Cannot install newest==1.0" in done.stderr

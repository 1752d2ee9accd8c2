# SPDX-License-Identifier: BSD-3-Clause
"""The needs of tests/gpu/run: a Python with torch and pytest, the toolkit,
the build tools. Nothing is installed; what is missing is said."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ASK = """
import json, torch
there = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "torch's CUDA": str(torch.version.cuda),
    "device": torch.cuda.get_device_name() if there else "",
    "capability": "%d%d" % torch.cuda.get_device_capability() if there else "",
}))
"""
TOOLKITS = ("CUDA_HOME", "CUDA_PATH")
USUAL = "/usr/local/cuda"


@dataclass(frozen=True)
class Machine:
    torch: str
    cuda: str
    device: str  # the GPU's name, or ""
    chip: str  # "90", or ""
    environment: dict[str, str]  # with the tools in PATH

    def find(self, tool: str) -> str | None:
        return shutil.which(tool, path=self.environment["PATH"])

    def describe(self) -> dict[str, str]:
        nvcc = self.find("nvcc")
        said = output([nvcc, "--version"]) if nvcc else ""
        release = next((line for line in said.splitlines() if "release" in line), "not found")
        return {
            "python": sys.version.split()[0],
            "torch": f"{self.torch}, CUDA {self.cuda}",
            "GPU": f"{self.device}, compute capability {self.chip}" if self.chip else "none",
            "driver": driver(self),
            "nvcc": release,
        }


def output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def driver(machine: Machine) -> str:
    tool = machine.find("nvidia-smi")
    query = ["--query-gpu=driver_version", "--format=csv,noheader"]
    return (output([tool, *query]).strip() if tool else "") or "unknown"


def search_path() -> str:
    """PATH, then where toolkits and this Python keep their programs."""
    toolkits = [os.environ[name] for name in TOOLKITS if os.environ.get(name)] + [USUAL]
    more = [str(Path(sys.executable).parent), *(f"{top}/bin" for top in toolkits)]
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *more])


def look() -> Machine:
    """Exits where this Python has no torch that works."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OPTFUSE_")}
    kept["PATH"] = search_path()
    if not importlib.util.find_spec("pytest"):
        sys.exit(f"error: pytest runs the checks, and {sys.executable} has none")
    done = subprocess.run([sys.executable, "-c", ASK], env=kept, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(
            f"error: {sys.executable} can't import torch: run this with the Python that has "
            f"it\n{done.stderr.strip()}"
        )
    said = json.loads(done.stdout.splitlines()[-1])
    return Machine(said["torch"], said["torch's CUDA"], said["device"], said["capability"], kept)


def meson(machine: Machine) -> list[str]:
    """The command, or the module where only that is installed."""
    found = machine.find("meson")
    if found:
        return [found]
    if importlib.util.find_spec("mesonbuild"):
        return [sys.executable, "-m", "mesonbuild.mesonmain"]
    sys.exit("error: meson is needed to build optfuse, and this machine has none")

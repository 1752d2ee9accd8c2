# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.hpp on this device, in a process without Python (cxx.cpp)."""

import os
import shutil
import subprocess
from pathlib import Path

DEVICE, KERNELS = os.environ["OPTFUSE_FAKE_CUDA"], os.environ["OPTFUSE_CUDA_LIBRARY"]
PROGRAM = Path(DEVICE).parents[1] / "cxx" / "test_cxx-guards"


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "OPTFUSE_CUDA_LIBRARY"}
    command = [PROGRAM, "device", DEVICE, KERNELS]
    return subprocess.run(command, env=kept | variables, capture_output=True, text=True)


def test_a_program_trains_with_the_bits_of_the_operators():
    done = run(OPTFUSE_CUDA_LIBRARY=KERNELS)
    assert done.returncode == 0 and "all passed" in done.stdout, done.stdout + done.stderr


def test_the_kernels_are_found_beside_the_library(tmp_path):
    library = shutil.copy(os.environ["OPTFUSE_LIBRARY"], tmp_path)
    beside = {"LD_LIBRARY_PATH": str(Path(library).parent)}
    said = run(**beside).stderr
    assert "parameter 0 of group 0 of shape [40] is on a GPU, but this build of optfuse has" in said
    (tmp_path / "liboptfuse_cuda.so").symlink_to(KERNELS)
    done = run(**beside)
    assert done.returncode == 0, done.stdout + done.stderr

# SPDX-License-Identifier: BSD-3-Clause
"""Tests on a GPU that is played by the CPU. tests/run builds it and names the
libraries in the environment; without it nothing here is collected."""

import gc
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))  # `common`

NEEDED = ("OPTFUSE_FAKE_CUDA", "OPTFUSE_CUDA_LIBRARY")
missing = [name for name in NEEDED if not os.environ.get(name)]
collect_ignore_glob = ["test_*.py"] if missing else []

if not missing:
    os.environ["OPTFUSE_TEST_DEVICE"] = "privateuseone"
    import fakecuda
    import folders  # noqa: F401 - tests import modules of its folders
    import torch
    import torch._dynamo
    from watched import python_updates  # noqa: F401

    fakecuda.load()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is loaded stays; collecting after each test needn't look at it

    @pytest.fixture(scope="module", autouse=True)
    def quicker_collections():
        """Freezes all that is loaded when a module begins, too: its tests collect often."""
        gc.collect()
        gc.freeze()

    @pytest.fixture(autouse=True)
    def nothing_is_left_open():
        """A test that leaves a race behind fails, unless it has cleared it."""
        fakecuda.synchronize(0)
        fakecuda.synchronize(1)
        fakecuda.clear()
        yield
        gc.collect()
        found = fakecuda.races()
        assert not found, "nothing puts in order:\n" + "\n".join(found)

    @pytest.fixture
    def rounds_as_cpu():
        """For tests that compare operators there with the CPU's, and fuse no recorded class."""

    @pytest.fixture(autouse=True)
    def rounds_as_cuda(request):
        """Trials of operators are for the whole process."""
        fakecuda.round_as_cuda("rounds_as_cpu" not in request.fixturenames)

# SPDX-License-Identifier: BSD-3-Clause
"""Tests on a GPU that is played by the CPU. tests/run builds it and names the
libraries in the environment; without it, and without a real one (see gpu.py), nothing here is
collected."""

import gc
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))  # `common`

NEEDED = ("OPTFUSE_FAKE_CUDA", "OPTFUSE_CUDA_LIBRARY")
on_real = os.environ.get("OPTFUSE_TEST_ON") == "cuda"
missing = [] if on_real else [name for name in NEEDED if not os.environ.get(name)]
collect_ignore_glob = ["test_*.py"] if missing else []

if not missing:
    if not on_real:
        os.environ["OPTFUSE_TEST_DEVICE"] = "privateuseone"
    import folders  # noqa: F401 - tests import modules of its folders
    import gpu
    import torch
    import torch._dynamo
    from watched import python_updates  # noqa: F401

    gpu.load()

    from optfuse._trials import stock_trial  # the device must be there before optfuse is loaded

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
        gpu.settle()
        yield
        gc.collect()
        found = gpu.races()
        assert not found, "nothing puts in order:\n" + "\n".join(found)

    @pytest.fixture
    def rounds_as_cpu():
        """For tests that compare operators there with the CPU's, and fuse no recorded class."""

    @pytest.fixture(autouse=True)
    def rounds_as_cuda(request):
        """Trials of operators are for the whole process."""
        gpu.round_as_cuda("rounds_as_cpu" not in request.fixturenames)

    @pytest.fixture
    def nothing_known(monkeypatch):
        """Trials of a test's own."""
        monkeypatch.setattr(stock_trial, "known", {})

    @pytest.fixture
    def small_trials(nothing_known, monkeypatch):
        """And quick."""
        monkeypatch.setattr(stock_trial, "SIZES", (1, 7, 64))

# SPDX-License-Identifier: BSD-3-Clause
import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Everything here is tiny; a pool of threads would only wait for itself."""
    torch.set_num_threads(1)
    yield
    gc.collect()  # what a test leaves behind must not run into the next one


@pytest.fixture
def several_threads(one_thread):
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)

# SPDX-License-Identifier: BSD-3-Clause
import gc
from pathlib import Path

import folders  # noqa: F401 - tests import modules of other folders
import on_device
import pytest
import torch
from watched import python_updates  # noqa: F401

on_device.use()


def pytest_collection_modifyitems(items):
    for item in items if on_device.DEVICE else ():
        if why := on_device.reason_to_skip(item.name):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session", autouse=True)
def quick_collections():
    """Modules that are loaded once stay; collecting after each test needn't look at them."""
    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def quicker_collections(quick_collections):
    """Objects that tests of a module have loaded, such as compilers, stay as well."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread():
    """Everything here is tiny; a pool of threads would only wait for itself."""
    torch.set_num_threads(1)
    on_device.settle()
    yield
    gc.collect()  # what a test leaves behind must not run into the next one
    on_device.nothing_is_left_open()


@pytest.fixture(scope="module")
def benchmarks():
    """Lets the benchmark's modules be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield


@pytest.fixture
def gloo():
    """A process group of the tests' process alone."""
    from common import one_process  # which imports optfuse: after on_device.use()

    with one_process():
        yield


@pytest.fixture
def several_threads(one_thread):
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)

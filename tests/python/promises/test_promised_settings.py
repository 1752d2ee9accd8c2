# SPDX-License-Identifier: BSD-3-Clause
"""Settings of PyTorch that change how it multiplies."""

import pytest
import torch

from promises.scripted import batch, equal, script_of

SETTINGS = {
    "threads": lambda: torch.set_num_threads(1 if torch.get_num_threads() != 1 else 2),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "denormals": lambda: torch.set_flush_denormal(True),
    "oneDNN": lambda: torch.backends.mkldnn.set_flags(False),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
}


def as_ever(threads):
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(False)
    torch.backends.mkldnn.set_flags(True)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def restored():
    threads = torch.get_num_threads()
    yield
    as_ever(threads)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("when", ("between steps", "before a look", "before step"))
def test_settings_that_change(setting, when, restored):
    """Tiny numbers, so that denormals are among the products."""

    threads = 1 if setting == "denormals" else 2  # that one is of a single thread

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        (model(batch(i)).square().mean() * 1e-36).backward()
        if i == 1 and when != "between steps":
            # Stock has computed the gradient by now.
            grads = [p.grad for p in model.parameters()] if when == "before a look" else []
            SETTINGS[setting]()
            seen = [g.mul(1.0) if setting != "denormals" else g.tolist() for g in grads]
            as_ever(threads)
            yield "seen", seen
        optimizer.step()
        if i == 1 and when == "between steps":
            SETTINGS[setting]()

    def script(wrap):
        as_ever(threads)
        yield from script_of(iteration, steps=4)(wrap)

    equal(script, "forward")

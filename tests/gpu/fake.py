# SPDX-License-Identifier: BSD-3-Clause
"""The scenarios on a GPU that the CPU plays (tests/device), and no race between
streams in any of them, neither in stock nor in ours.

    fake.py bits --quick
    fake.py transparency --quick

The environment is that of tests/device: OPTFUSE_FAKE_CUDA, OPTFUSE_CUDA_LIBRARY
and, as OPTFUSE_LIBRARY, the build with switchable guards."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

os.environ["OPTFUSE_TEST_DEVICE"] = "privateuseone"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "device"))

import fakecuda

fakecuda.load()
fakecuda.round_as_cuda()

import harness  # noqa: E402 - the device must be there before optfuse is loaded
import scenarios  # noqa: E402
import torch  # noqa: E402
from harness import FAILED, On, Outcome, Scenario, play  # noqa: E402

NEEDS_CUDA = ("graphs", "memory")  # modules that call torch.cuda
NOT_PLAYED = re.compile(
    r"dlpack|array interface|data =|grad scaler|GradScaler|recurrent|autocast|compiled model"
)


def with_streams() -> None:
    """torch.fakecuda gets the functions of torch.cuda that scenarios use."""
    module = torch.get_device_module(fakecuda.NAME)
    module.Stream, module.current_stream = fakecuda.stream, fakecuda.current
    module.synchronize, module.stream = fakecuda.synchronize, lambda stream: stream


def play_and_watch(one: Scenario, on: On) -> Outcome:
    fakecuda.clear()
    outcome = play(one, on)
    races = fakecuda.races()
    if races:
        outcome.verdict = FAILED
        outcome.why += f"{len(races)} races between streams: " + "\n".join(races[:3])
    return outcome


def playable() -> None:
    """Scenarios for GPUs only are played, too, where the fake one can."""
    for name, ones in harness.SCENARIOS.items():
        ones[:] = [
            Scenario(one.name, one.body, (fakecuda.NAME,), one.modes, one.slow)
            for one in ones
            if not NOT_PLAYED.search(one.name)
            and not (name in NEEDS_CUDA and "cpu" not in one.devices)
        ]


if __name__ == "__main__":
    with_streams()
    playable()
    harness.BOTH = (fakecuda.NAME,)
    scenarios.play = play_and_watch
    sys.argv += ["--device", fakecuda.NAME]
    sys.exit(scenarios.main())

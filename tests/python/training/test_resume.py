# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints: at every step, in both directions between stock and fused, after
a kill, from a signal handler; and a short form of the long run."""

import signal

import pytest
import torch
from common import Fused, Stock, adamw, assert_same, net, python, python_ok, sgd, train
from long_run import MAKE, Training, compare
from programs.deeds.reading import saved

STEPS = 20
both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))


def trained(wrap, make, first, last, kept=None):
    """Steps first to last, from a checkpoint; the next one, saved with updates
    pending."""
    torch.manual_seed(0)
    model = net()
    optimizer = wrap(make(model.parameters()))
    if kept:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    for i in range(first, last):
        train(model, optimizer, i)
    wrap.pending()
    return saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def wrap_of(kind, mode):
    return Stock() if kind == "stock" else Fused(mode)


@both_modes
@pytest.mark.parametrize("make", (adamw, sgd))
@pytest.mark.parametrize("way", (("fused", "stock"), ("stock", "fused"), ("fused", "fused")))
def test_saved_and_resumed_at_every_step(way, make, mode):
    expected = trained(Stock(), make, 0, STEPS)
    for k in range(1, STEPS):
        kept = trained(wrap_of(way[0], mode), make, 0, k)
        ours = trained(wrap_of(way[1], mode), make, k, STEPS, kept)
        assert_same(f"resumed at step {k}", ours, expected)


KILLED = """
import os, signal
from common import Fused
from long_run import MAKE, Training
training = Training(Fused({mode!r}), MAKE["adamw"], {path!r})
while training.done < 20:
    training.step()
    if training.done % 5 == 0:
        training.save()
    if training.done == 12:
        training.wrap.pending()
        os.kill(os.getpid(), signal.SIGKILL)
"""

RESUMED = """
from common import Fused
from long_run import MAKE, Training
training = Training(Fused({mode!r}), MAKE["adamw"], {path!r})
training.resume()
assert training.done == 10, training.done
while training.done < 20:
    training.step()
print(training.digest())
"""


@pytest.mark.slow
@both_modes
def test_killed_between_step_and_forward_and_resumed(mode, tmp_path):
    path = str(tmp_path / "checkpoint")
    done = python(KILLED.format(mode=mode, path=path))
    assert done.returncode == -signal.SIGKILL, done.stderr
    ours = python_ok(RESUMED.format(mode=mode, path=path), OMP_NUM_THREADS="1").split()[-1]
    stock = Training(Stock(), MAKE["adamw"], path)
    for _ in range(STEPS):
        stock.step()
    assert ours == stock.digest(), "other bits than an uninterrupted run with stock"


@both_modes
def test_a_checkpoint_written_by_a_signal_handler(mode):
    """Between any two bytecodes of the training loop, with updates pending."""

    def run(wrap):
        torch.manual_seed(0)
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        kept = []

        def save(*_):
            both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            kept.append(saved(both))

        old = signal.signal(signal.SIGUSR1, save)
        try:
            for i in range(5):
                train(model, optimizer, i)
                wrap.pending()
                signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, old)
        return kept

    assert_same("checkpoints", run(Fused(mode)), run(Stock()))


@both_modes
@pytest.mark.parametrize("make", MAKE)
def test_a_hundred_steps_with_saves_and_resumes(make, mode):
    """long_run.py, short."""
    compare(mode, MAKE[make], 100, 3)


@pytest.mark.slow
def test_memory_stays_flat():
    """Repeated resumes, each of which makes an optimizer anew, keep it flat, too."""
    done = python_ok(
        "import folders, torch; torch.set_num_threads(1)\n"
        "from long_run import MAKE, compare\n"
        "for mode in ('forward', 'backward'):\n"
        "    warm, end = compare(mode, MAKE['adamw'], 400, 1)\n"
        "    print((end - warm) // 1024)\n"
    )
    grown = [int(line) for line in done.split()]
    assert max(grown) < 1024, f"resident memory grew by {grown} KiB in 360 steps"

# SPDX-License-Identifier: BSD-3-Clause
"""Peers of the benchmarks train what PyTorch trains: the losses of their first steps are those of
the loop, up to rounding."""

from pathlib import Path

import pytest
import torch

STEPS = 5


@pytest.fixture(scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
        import small

        yield small


def losses(build, wrap):
    torch.manual_seed(0)
    iterate = build(wrap)
    return torch.tensor([float(iterate()) for _ in range(STEPS)], dtype=torch.float64)


def pair(small, name, setting, peer, threads=1):
    from cells import OPTIMIZERS

    (net,) = (net for net in small.NETS if net.name == name)
    build = small.training(small.SmallCell(net, setting, threads), OPTIMIZERS["adamw"])
    return losses(build, lambda optimizer: optimizer), losses(build, peer)


@pytest.mark.full
@pytest.mark.parametrize("setting", ["step", "clip", "clip and EMA"])
def test_a_compiled_step_trains_as_the_loop_does(small, setting):
    import peers

    expected, found = pair(small, "PPO's net", setting, peers.Compiled)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("setting", ["step", "clip", "clip and EMA"])
@pytest.mark.parametrize("net", ["PPO's net", "a fit to an equation, float64"])
def test_jax_trains_as_the_loop_does(small, net, setting):
    pytest.importorskip("jax")
    import peers

    expected, found = pair(small, net, setting, peers.Jitted)
    # its first step was made before the first iteration
    torch.testing.assert_close(found[:-1], expected[1:], rtol=1e-4, atol=0)


def test_jax_on_another_network_is_refused(small):
    pytest.importorskip("jax")
    import peers

    model = small.tower([4, 8, 2])
    opt = peers.Jitted(torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match="JAX's first loss is 0.0, PyTorch's 1"):
        peers.jitted(opt, model, lambda run: 0 * run(peers.array(torch.ones(1, 4))).sum(), 1.0)


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_jax_computes_the_wide_models(small, kind):
    pytest.importorskip("jax")
    import peers
    from promised_gradients_cases import Case, training

    build = lambda wrap: training(Case(kind, 2, 128, (4,), 1), wrap)  # noqa: E731
    expected, found = losses(build, lambda optimizer: optimizer), losses(build, peers.Jitted)
    torch.testing.assert_close(found[:-1], expected[1:], rtol=1e-3, atol=0)


def test_peers_that_are_missing_are_left_out(small, monkeypatch):
    import peers

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert list(peers.peers(True)) == [peers.COMPILED] and not peers.peers(False)

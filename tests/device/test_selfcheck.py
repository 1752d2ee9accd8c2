# SPDX-License-Identifier: BSD-3-Clause
"""fuse() looks at the bits of a few updates on the GPU itself before it promises
any, and refuses what is off."""

import pytest
import torch
from common import adamw
from fakecuda import NAME

import optfuse
from optfuse import _selfcheck
from optfuse._ab import result
from optfuse._clipping import clip_norm


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(_selfcheck, "_known", {})


def optimizer(dtype=torch.float32):
    return adamw([torch.ones(9, device=NAME, dtype=dtype, requires_grad=True)])


def with_other(**options):
    """In place of our update: stock's with something changed."""

    def fuse(stock):
        stock.param_groups[0].update(options)
        return stock

    return fuse


@pytest.mark.parametrize("dtype", _selfcheck.TOLERANCE)
def test_equal_bits_are_seen(dtype):
    assert optfuse.summary(optfuse.fuse(optimizer(dtype), strict=True)).gpu_bits_differ == ()


def test_another_rounding_is_told_and_refused_if_strict():
    differs = with_other(lr=1e-2 * (1 + 2e-7))
    assert _selfcheck.gpu_bits_differ(optimizer(), differs) == ["float32 on fakecuda:0"]
    with pytest.warns(UserWarning, match="float32 on fakecuda:0 round differently"):
        fused = optfuse.fuse(optimizer())  # known by now
    assert "float32 on fakecuda:0 round differently" in str(optfuse.summary(fused))
    with pytest.raises(optfuse.Error, match="strict=True, but updates of float32 on fakecuda:0"):
        optfuse.fuse(optimizer(), strict=True)


@pytest.mark.parametrize("wrong", [{"lr": 0.011}, {"betas": (0.8, 0.999)}, {"weight_decay": 0.5}])
@pytest.mark.parametrize("dtype", _selfcheck.TOLERANCE)
def test_a_wrong_update_is_refused(wrong, dtype):
    with pytest.raises(optfuse.Error, match="far more than rounding; nothing was fused"):
        _selfcheck.gpu_bits_differ(optimizer(dtype), with_other(**wrong))


def test_each_set_of_options_is_looked_at_once(monkeypatch):
    optfuse.fuse(optimizer())
    monkeypatch.setattr(_selfcheck, "_compare", lambda *_: pytest.fail("compared again"))
    optfuse.fuse(optimizer())


def test_fused_where_new_tensors_go_to_the_gpu_by_default():
    """As after torch.set_default_device("cuda"), whose operators take no generator
    of the CPU."""
    with torch.device(NAME):
        optimizer_there = optfuse.fuse(optimizer())
        with pytest.raises(RuntimeError, match="expected a generator of this device"):
            torch.randn(3, generator=torch.Generator("cpu"))
    assert optfuse.summary(optimizer_there).gpu_bits_differ == ()


def test_what_else_draws_numbers_does_so_on_the_cpu():
    on_the_cpu = clip_norm._our_norm_is_torchs.__wrapped__()  # as this CPU's operators sum
    with torch.device(NAME):
        assert clip_norm._our_norm_is_torchs.__wrapped__() == on_the_cpu
        assert result.median_interval([2.0, 4.0]).median == 3.0

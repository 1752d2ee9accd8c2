# SPDX-License-Identifier: BSD-3-Clause
"""The launches of clipping on the device: the update applies the factor and nobody
waits for it. In a capture gradients are multiplied at once."""

import fakecuda
import pytest
import torch
from clipped import clip, clipped_steps
from common import adamw, fuse_with
from legal import backward, legal, net, settle, train
from test_captures import captured

import optfuse
from optfuse._library.bindings import lib
from optfuse._link import link_of
from optfuse._process import drain_all


def work_of(optimizer, model):
    """The kernels and operators on the device after a backward pass, up to the next use of a
    weight."""
    backward(model, optimizer, 1)
    torch.ops.fakecuda.set_logging(True)
    clip(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    model[0].weight.detach().sign()
    return names_logged()


def names_logged():
    names = [text.split()[0] for text in torch.ops.fakecuda.launches()]
    torch.ops.fakecuda.set_logging(False)
    return names


def trained(**options):
    model = net()
    optimizer = fuse_with(adamw(model.parameters()), "forward", **options)
    train(model, optimizer, 0)
    optfuse.flush(optimizer)
    return optimizer, model


READS_A_NUMBER = "aten::_local_scalar_dense"  # the host waits for it
MULTIPLIES = "aten::mul"  # once for the factor itself, and a gradient each time
OURS_ALONE = ["of_cuda_advance_steps", "of_cuda_adam_float32_3_small"]


def kernels_of(names):
    return [name for name in names if name.startswith("of_cuda")]


def test_nobody_waits_and_no_gradient_is_written():
    names = work_of(*trained())
    assert READS_A_NUMBER not in names, names
    assert names.count(MULTIPLIES) == 1 and kernels_of(names) == OURS_ALONE, names


def test_without_folding_torchs_operator_multiplies():
    names = work_of(*trained(fold=False))
    assert READS_A_NUMBER not in names, names
    assert names.count(MULTIPLIES) == 1 + 6 and kernels_of(names) == OURS_ALONE, names
    legal(clipped_steps(), fold=False)


def test_where_no_update_waits_torchs_operator_multiplies():
    """As after compiled code has met one."""
    optimizer, model = trained()
    lib.of_shim_stop_deferring(link_of(optimizer).plan)
    names = work_of(optimizer, model)
    assert READS_A_NUMBER not in names and kernels_of(names) == OURS_ALONE, names
    assert names.count(MULTIPLIES) == 1 + 6, names


def test_gradients_that_others_see_are_multiplied_at_once():
    optimizer, model = trained()
    backward(model, optimizer, 1)
    views = [p.grad.view(-1) for p in model.parameters()]
    before = [view.cpu() for view in views]
    clip(optimizer)
    after = [view.cpu() for view in views]
    assert all(abs(a).sum() < abs(b).sum() for a, b in zip(after, before, strict=True))


# Captures


def test_in_a_capture_gradients_are_multiplied_at_once():
    optimizer, model = trained()
    drain_all()
    stream = fakecuda.stream()
    with captured(stream):
        backward(model, optimizer, 1)
        torch.ops.fakecuda.set_logging(True)
        clip(optimizer)
        names = names_logged()
        assert names.count(MULTIPLIES) == 1 + 6 and READS_A_NUMBER not in names, names
        optimizer.step()
    settle()


def test_a_capture_refuses_a_gradient_that_was_clipped_outside():
    optimizer, model = trained()
    backward(model, optimizer, 1)
    clip(optimizer)
    stream = fakecuda.stream()
    stream.wait_stream(fakecuda.current())
    with captured(stream), pytest.raises(optfuse.Error, match="captured"):
        model[0].weight.grad.add(1)
    drain_all()  # what capture_begin calls first
    with captured(stream):
        model[0].weight.grad.add(1)
    settle()

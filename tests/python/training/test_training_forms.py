# SPDX-License-Identifier: BSD-3-Clause
"""Forms of training that touch weights or gradients in ways of their own; more of them are deeds
of the programs."""

import sys

import pytest
from common import adamw, batch, everything, net, same
from scripts import trained

STEPS = 5
both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))


@both_modes
@pytest.mark.filterwarnings("ignore")
def test_quantization_aware_training(mode):
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    def start(wrap):
        model = net().train()
        model.qconfig = get_default_qat_qconfig("x86")
        prepare_qat(model, inplace=True)
        optimizer = wrap(adamw(model.parameters()))
        return model, optimizer

    same(trained(start=start), mode)


def test_replicas_of_a_model_see_the_update(monkeypatch):
    """nn.parallel.replicate, with copies in place of the broadcast to GPUs."""
    from torch.nn.parallel import replicate

    module = sys.modules["torch.nn.parallel.replicate"]

    def copies(tensors, devices, detach=False):
        return [[t.clone() for t in tensors] for _ in devices]

    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(module, "_get_device_index", lambda device, *_: device)

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            replicas = replicate(model, [0, 1])
            x, y = batch(i)
            loss = sum((replica(x) - y).square().mean() for replica in replicas)
            loss.backward()
            optimizer.step()
            wrap.pending()
            yield "loss", loss
        yield from everything(model, optimizer)

    same(script)

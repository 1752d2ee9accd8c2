# SPDX-License-Identifier: BSD-3-Clause
"""Forms of training that touch weights or gradients in ways of their own; more of them are deeds
of the programs."""

import sys

import pytest
import torch
from common import adamw, batch, everything, net, same, sgd
from scripts import trained
from torch import nn

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


@both_modes
@pytest.mark.parametrize("make", (adamw, sgd))
def test_generator_and_discriminator(make, mode):
    """Two optimizers; the generator's loss goes through the discriminator, whose
    gradients from it are thrown away."""

    def script(wrap):
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        first = wrap(make(critic.parameters()))
        second = wrap(make(generator.parameters()))
        for i in range(STEPS):
            x, _ = batch(i)
            noise = x[:, :4]
            first.zero_grad()
            loss = critic(generator(noise).detach()).mean() - critic(x).mean()
            loss.backward()
            first.step()
            yield "loss of the critic", loss
            second.zero_grad()
            for p in critic.parameters():
                p.requires_grad_(False)
            loss = -critic(generator(noise)).mean()
            loss.backward()
            for p in critic.parameters():
                p.requires_grad_(True)
            second.step()
            yield "loss of the generator", loss
        yield from everything(critic, first)
        yield from everything(generator, second)

    same(script, mode)


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

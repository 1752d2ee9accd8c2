# SPDX-License-Identifier: BSD-3-Clause
"""Forms of training that touch weights or gradients in ways of their own."""

import sys

import pytest
import torch
from common import adamw, batch, everything, loss_of, net, same, sgd, train
from scripts import trained
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

STEPS = 5
both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))


@both_modes
@pytest.mark.parametrize("make", (adamw, sgd))
def test_pruning_masks_set_and_made_permanent(make, mode):
    def between(model, optimizer, i):
        if i == 1:
            prune.l1_unstructured(model[2], "weight", 0.5)
            prune.random_structured(model[0], "weight", 0.3, dim=0)
        if i == 3:
            prune.remove(model[2], "weight")
        yield "masked", [model[2].weight, model[0].weight]

    same(trained(make, between=between), mode)


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
def test_parameters_as_one_vector_and_back(mode):
    """Afterwards all of them are views of one memory."""

    def between(model, optimizer, i):
        vector = parameters_to_vector(model.parameters())
        yield "vector", vector
        if i == 2:
            vector_to_parameters(vector.detach() * 0.5, model.parameters())

    same(trained(between=between, pending=False), mode)


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


def test_two_optimizers_over_one_graph():
    def script(wrap):
        model = net()
        optimizers = [wrap(adamw(model[0].parameters())), wrap(sgd(model[2:].parameters()))]
        for i in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            out = model(batch(i)[0])
            out.square().mean().backward(retain_graph=True)
            out.sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            wrap.pending()
        for optimizer in optimizers:
            yield from everything(model, optimizer)

    same(script)


@both_modes
def test_gradient_penalty(mode):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        x = batch(i)[0].requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()

    same(trained(iteration=iteration), mode)


@both_modes
def test_tensor_hooks_that_change_the_gradient(mode):
    """One that gives a new gradient, one that changes it in place."""

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        handles = [
            model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01)),
            model[2].weight.register_hook(lambda g: g.mul_(-2)),
            model[2].weight.register_hook(lambda g: torch.nan_to_num(g) + 0.5),
        ]
        for i in range(STEPS):
            train(model, optimizer, i)
        handles[1].remove()
        train(model, optimizer, STEPS)
        yield from everything(model, optimizer)

    same(script, mode)


@both_modes
def test_data_parallel_without_devices(mode):
    def script(wrap):
        model = net()
        wrapped = nn.DataParallel(model)
        optimizer = wrap(adamw(wrapped.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            loss_of(wrapped, i).backward()
            optimizer.step()
        yield from everything(model, optimizer)

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


@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_an_interrupt_in_forward(mode):
    def interrupt(*_):
        raise KeyboardInterrupt

    def between(model, optimizer, i):
        hook = model[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, i)
        hook.remove()

    same(trained(between=between), mode)

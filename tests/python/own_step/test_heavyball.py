# SPDX-License-Identifier: BSD-3-Clause
"""heavyball's classes: those whose groups become steady fuse after register(), with their own bits
in every step, and those that couple parameters for good are refused."""

import copy

import pytest
import torch
import torch._inductor.compile_fx
from common import everything, loss_of, net, refused, same, train
from scripts import trained

import optfuse
from optfuse._link import link_of

heavyball = pytest.importorskip("heavyball")

TAKEN = (
    "ADOPT AdEMAMix AdamC AdamW HeavyKLSOAP HeavySOAP HeavySOAPAdEMAMix HeavySOAPNAdam HeavySOLP "
    "HyperBallAdamW KLSOAP LaProp LaPropOrtho MSAMLaProp NAdam OrthoLaProp RMSprop SFAdamW SGD "
    "SOAP SOAPAdEMAMix SOAPNAdam SOLP SUDSAdamW SignLaProp UnscaledAdamW"
)
COUPLED = (
    "HeavyKLShampoo KLShampoo LATHER Muon MuonAdamW MuonLaProp PSGDKron PSGDLRA PSGDPRO QSGD Scion"
)


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch):
    """Compiling takes minutes a class."""
    monkeypatch.setattr(heavyball.utils, "compile_mode", None)


def register(name):
    cls = getattr(heavyball, name)
    optfuse.register(cls)
    return cls


def script(cls):
    def start(wrap):
        model = net()
        first, *others, last = model.parameters()
        return model, wrap(cls([{"params": [first, *others[:2]]}, {"params": [*others[2:], last]}]))

    def iteration(model, optimizer, i):
        first, second, *_ = model.parameters()
        first.requires_grad_(i not in (3, 4, 7))
        second.requires_grad_(i != 4)
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()
        for group in optimizer.param_groups if i == 5 else ():
            group["lr"] = 1e-3
        if i == 8:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        yield from everything(model, optimizer)

    return trained(start=start, iteration=iteration, steps=12)


@pytest.mark.parametrize("name", TAKEN.split())
def test_its_own_bits_in_backward_mode(name):
    same(script(register(name)), "backward")


@pytest.mark.parametrize("name", ["AdamW", "SOAP"])
def test_forward_mode_leaves_step_as_it_is(name):
    same(script(register(name)), "forward", prove=False)
    model = net()
    optimizer = optfuse.fuse(getattr(heavyball, name)(model.parameters()))
    for i in range(3):
        train(model, optimizer, i)
    assert link_of(optimizer).ledger.updater.own_steps == 3


@pytest.mark.parametrize("name", ["AdamW", "SOAP"])
def test_as_it_comes_it_compiles_lists_and_is_refused_at_once(name, monkeypatch):
    monkeypatch.setattr(heavyball.utils, "compile_mode", "max-autotune-no-cudagraphs")
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", None)  # it is not asked
    optimizer = register(name)(net().parameters())
    words = ("torch.compile (heavyball.utils.", "uncompiled")
    refused(lambda: optfuse.fuse(optimizer), *words, way_out="as it is")
    assert not optimizer.state


@pytest.mark.parametrize("name", COUPLED.split())
def test_lasting_coupling_is_refused(name):
    optimizer = register(name)(net().parameters())
    refused(lambda: optfuse.fuse(optimizer), "independently", way_out="as it is")
    assert not optimizer.state

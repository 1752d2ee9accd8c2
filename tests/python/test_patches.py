# SPDX-License-Identifier: BSD-3-Clause
"""What optfuse replaces of PyTorch is as the tested releases have it, and a release that has
changed it is told so."""

import pytest
import torch
from common import python, python_ok

import optfuse
from optfuse import _patches

SEAL = """
tensor = torch.ones(3)
address = tensor.data_ptr()
assert list(torch.ops.optfuse.seal([tensor])) == [0]
try:
    tensor.data_ptr()
    print("no effect")
except RuntimeError:
    pass
torch.ops.optfuse.unseal([tensor])
assert tensor.data_ptr() == address
"""
FUSE = """
import torch, optfuse
weight = torch.nn.Parameter(torch.ones(3))
optimizer = optfuse.fuse(torch.optim.SGD([weight], lr=0.1))
"""
DUMPS = """
import torch, torch._dynamo
def registrations():
    names = torch._C._dispatch_get_all_op_names()
    return {name: torch._C._dispatch_dump(name) for name in names}
key = torch._C._parse_dispatch_key("TESTING_ONLY_GenericWrapper")
has_fallback = lambda: torch._C._dispatch_has_backend_fallback(key)
before = registrations()
assert not has_fallback()
"""
COMPARE = """
after = registrations()
for name in sorted(after):
    if after[name] != before.get(name) and not name.startswith("optfuse::"):
        print(name)
assert has_fallback()
"""


def test_this_release_has_what_is_replaced_as_the_tested_ones_have():
    assert _patches.changes() == []


def test_this_release_has_what_sharded_parameters_need_as_the_tested_ones_have():
    assert _patches.changes(_patches.DISTRIBUTED) == []


@pytest.mark.parametrize("place", _patches.DISTRIBUTED.places, ids=lambda place: place[2])
def test_a_place_that_sharded_parameters_need_and_that_is_no_more_is_noticed(place, monkeypatch):
    _, _, path, names = place
    plant(monkeypatch, path, other)
    changed = [change for change in _patches.changes(_patches.DISTRIBUTED) if path in change]
    assert len(changed) == len(names)


@pytest.mark.parametrize("patch", _patches.DISTRIBUTED.patches, ids=lambda patch: patch.target)
def test_another_function_for_sharded_parameters_is_noticed(patch, monkeypatch):
    for path in (patch.asked_by, patch.target):
        plant(monkeypatch, path, other)
        (change,) = _patches.changes(_patches.DISTRIBUTED)
        assert change.startswith(patch.target)


@pytest.mark.parametrize("patch", _patches.PATCHES, ids=lambda patch: patch.target)
def test_a_listed_function_is_replaced_by_the_first_fuse(patch):
    optfuse.fuse(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    function = _patches.find(patch.target)
    if patch.optional and (function is None or "CUDAGraph" in patch.target):
        pytest.skip("this build has none, or no use for it")
    assert hasattr(function, "__wrapped__"), f"{patch.target} is listed, but nobody replaces it"


def other(*_args, **_options):
    """What a release has made of a function."""


WITH_PARAMETERS = [patch for patch in _patches.PATCHES if patch.takes]
ASKED = [patch for patch in _patches.PATCHES if patch.asked_by]


def plant(monkeypatch, path, function):
    owner, _, name = path.rpartition(".")
    monkeypatch.setattr(_patches.find(owner), name, function)


def changed_by(monkeypatch, path, function):
    plant(monkeypatch, path, function)
    return [change for change in _patches.changes() if path in change]


@pytest.mark.parametrize("patch", WITH_PARAMETERS, ids=lambda patch: patch.target)
def test_other_parameters_are_noticed(patch, monkeypatch):
    if _patches.find(patch.target) is None:
        pytest.skip("this release has none")
    (change,) = changed_by(monkeypatch, patch.target, other)
    assert change.startswith(patch.target) and patch.why in change


@pytest.mark.parametrize("patch", ASKED, ids=lambda patch: patch.target)
def test_a_function_that_is_no_longer_asked_is_noticed(patch, monkeypatch):
    changes = changed_by(monkeypatch, patch.asked_by, other)  # it may ask for several
    assert sum(change.startswith(f"{patch.target} is not called by") for change in changes) == 1


@pytest.mark.parametrize("place", _patches.PLACES, ids=lambda place: place[2])
def test_a_place_that_is_no_more_is_noticed(place, monkeypatch):
    _, _, path, names = place
    assert len(changed_by(monkeypatch, path, other)) == len(names)


def test_a_function_that_is_gone_is_noticed(monkeypatch):
    monkeypatch.delattr(torch.amp.GradScaler, "scale")
    (change,) = _patches.changes()
    assert change.startswith("torch.amp.GradScaler.scale is not there")


def test_the_first_fuse_says_what_has_changed():
    changed = "import torch\ntorch.utils.swap_tensors = lambda *tensors: None\n"
    done = python(changed + FUSE, fresh=True)
    assert done.returncode == 0, done.stderr
    for word in ("RuntimeWarning", "torch._C._swap_tensor_impl is not called by", "don't fuse"):
        assert word in done.stderr, done.stderr
    assert "_patches" not in python_ok(FUSE, fresh=True)


def test_nothing_is_replaced_that_is_not_listed():
    with pytest.raises(optfuse.Error, match="no entry"):
        _patches.replace(torch.nn.Module, "forward", other)
    assert torch.nn.Module.forward is not other


def test_no_operator_of_pytorch_is_overridden():
    assert python_ok(DUMPS + FUSE + COMPARE, timeout=300, fresh=True) == ""


def test_an_operator_that_is_overridden_would_be_seen():
    override = (
        "library = torch.library.Library('aten', 'IMPL')\n"
        "library.impl('relu', lambda x: x, 'SparseCPU', allow_override=True)\n"
    )
    done = python(DUMPS + FUSE + override + COMPARE, timeout=300, fresh=True)
    assert done.stdout.split() == ["aten::relu"], done.stderr


def test_a_seal_has_an_effect():
    assert python_ok(FUSE + SEAL, fresh=True) == ""

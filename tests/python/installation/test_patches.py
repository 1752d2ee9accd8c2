# SPDX-License-Identifier: BSD-3-Clause
"""The replaced parts of PyTorch are as the tested releases have them, and a release that has
changed them is told so."""

import pytest
import torch
from common import python, python_ok
from recorded_classes import OldStyle

import optfuse
from optfuse._patches import listed, replacing

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
    assert replacing.changes() == []


@pytest.mark.parametrize("name", ["AWAITED", "DISTRIBUTED", "FINAL_UPDATES", "MASTERS"])
def test_this_release_has_what_several_processes_need_as_the_tested_ones_have(name):
    assert replacing.changes(getattr(listed, name)) == []


@pytest.mark.parametrize("place", listed.DISTRIBUTED.places, ids=lambda place: place[2])
def test_a_place_that_sharded_parameters_need_and_that_is_no_more_is_noticed(place, monkeypatch):
    _, _, path, names = place
    plant(monkeypatch, path, other)
    changed = [change for change in replacing.changes(listed.DISTRIBUTED) if path in change]
    assert len(changed) == len(names)


@pytest.mark.parametrize("patch", listed.DISTRIBUTED.patches, ids=lambda patch: patch.target)
def test_another_function_for_sharded_parameters_is_noticed(patch, monkeypatch):
    for path in (patch.asked_by, patch.target):
        plant(monkeypatch, path, other)
        (change,) = replacing.changes(listed.DISTRIBUTED)
        assert change.startswith(patch.target)


FOR_GPUS = "CUDAGraph", "torch.Event", "torch.Stream", "synchronizeDevice", "run_backward"


@pytest.mark.parametrize("patch", listed.PATCHES, ids=lambda patch: patch.target)
def test_a_listed_function_is_replaced_by_the_first_fuse(patch):
    optfuse.fuse(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    optfuse.fuse(OldStyle([torch.nn.Parameter(torch.ones(1))]), recorded=True)
    function = replacing.find(patch.target)
    has_no_use = any(name in patch.target for name in FOR_GPUS) and torch.version.cuda is None
    if patch.optional and (function is None or has_no_use):
        pytest.skip("this build has none, or no use for it")
    assert replacing.is_replaced(function), f"{patch.target} is listed, but nobody replaces it"


def pending():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = optfuse.fuse(torch.optim.SGD([weight], lr=0.25))
    weight.sum().backward()
    optimizer.step()
    assert optfuse.summary(optimizer).pending == 1
    return weight, optimizer


TAKEN = {
    "nothing": lambda t: t.new().shape == (0,),
    "a number": lambda t: t.new(3).shape == (3,),
    "a list": lambda t: t.new([2.0]).tolist() == [2],
    "a name": lambda t: t.new_tensor(data=[2.0]).tolist() == [2],
    "a name and more": lambda t: t.new_tensor([2], dtype=torch.int8).dtype == torch.int8,
    "another pending tensor": lambda t: t.new_tensor(pending()[0].data).tolist() == [0.75] * 4,
    "one object": lambda t: t.data.apply_(lambda x: x * 2).tolist() == [1.5] * 4,
    "names of two": lambda t: t.data.map_(other=t.data, callable=max).tolist() == [0.75] * 4,
    "an array": lambda t: torch._C._is_cow_tensor(t) is False,
    "a storage": lambda t: t.new(2).untyped_storage().copy_(src=t.new(2).untyped_storage()),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("arguments", TAKEN)
def test_functions_written_in_c_take_their_arguments_as_before(arguments):
    weight, _optimizer = pending()
    assert TAKEN[arguments](weight)


def test_functions_written_in_c_refuse_arguments_as_before():
    weight, _optimizer = pending()
    for wrong in (lambda: weight.new_tensor(), lambda: weight.data_ptr(1), lambda: weight.map_(1)):
        with pytest.raises(TypeError):
            wrong()


def test_a_method_that_was_bound_before_launches_too():
    weight = torch.nn.Parameter(torch.ones(4))
    like = weight.new_tensor
    optimizer = optfuse.fuse(torch.optim.SGD([weight], lr=0.25))
    weight.sum().backward()
    optimizer.step()
    assert like([1.0]).tolist() == [1]


def test_a_function_that_is_called_in_another_way_is_warned_of(monkeypatch):
    monkeypatch.setattr(replacing, "_listed", lambda _: {(id(torch), "add")})
    monkeypatch.setattr(replacing.lib_with_gil, "of_shim_call_first", lambda *_: 1)
    with pytest.warns(RuntimeWarning, match="don't fuse"):
        replacing.call_first(torch, "add", print)
    assert not replacing.is_replaced(torch.add)


REPLACED_BEFORE = """
import torch
stock = torch.Tensor.data_ptr
torch.Tensor.data_ptr = lambda self: stock(self)
import optfuse
weight = torch.nn.Parameter(torch.ones(3))
optimizer = optfuse.fuse(torch.optim.SGD([weight], lr=0.25))
weight.sum().backward()
optimizer.step()
print(optfuse.summary(optimizer).pending)
weight.data_ptr()
print(optfuse.summary(optimizer).pending)
"""


def test_a_function_that_another_library_has_replaced_launches_first_too():
    assert python_ok(REPLACED_BEFORE).split() == ["1", "0"]


def other(*_args, **_options):
    """A function as another release has it."""


WITH_PARAMETERS = [patch for patch in listed.PATCHES if patch.takes]
ASKED = [patch for patch in listed.PATCHES if patch.asked_by]


def plant(monkeypatch, path, function):
    owner, _, name = path.rpartition(".")
    monkeypatch.setattr(replacing.find(owner), name, function)


def changed_by(monkeypatch, path, function):
    plant(monkeypatch, path, function)
    return [change for change in replacing.changes() if path in change]


@pytest.mark.parametrize("patch", WITH_PARAMETERS, ids=lambda patch: patch.target)
def test_other_parameters_are_noticed(patch, monkeypatch):
    if replacing.find(patch.target) is None:
        pytest.skip("this release has none")
    (change,) = changed_by(monkeypatch, patch.target, other)
    assert change.startswith(patch.target) and patch.why in change


@pytest.mark.parametrize("patch", ASKED, ids=lambda patch: patch.target)
def test_a_function_that_is_no_longer_asked_is_noticed(patch, monkeypatch):
    changes = changed_by(monkeypatch, patch.asked_by, other)  # it may ask for several
    assert sum(change.startswith(f"{patch.target} is not called by") for change in changes) == 1


@pytest.mark.parametrize("place", listed.PLACES, ids=lambda place: place[2])
def test_a_place_that_is_no_more_is_noticed(place, monkeypatch):
    _, _, path, names = place
    assert len(changed_by(monkeypatch, path, other)) == len(names)


def test_a_function_that_is_gone_is_noticed(monkeypatch):
    monkeypatch.delattr(torch.amp.GradScaler, "scale")
    (change,) = replacing.changes()
    assert change.startswith("torch.amp.GradScaler.scale is not there")


def test_the_first_fuse_says_what_has_changed():
    changed = "import torch\ntorch.utils.swap_tensors = lambda *tensors: None\n"
    done = python(changed + FUSE)
    assert done.returncode == 0, done.stderr
    for word in ("RuntimeWarning", "torch._C._swap_tensor_impl is not called by", "don't fuse"):
        assert word in done.stderr, done.stderr
    assert "_patches" not in python_ok(FUSE)


def test_nothing_is_replaced_that_is_not_listed():
    with pytest.raises(optfuse.Error, match="no entry"):
        replacing.call_first(torch.Tensor, "add_", other)
    with pytest.raises(optfuse.Error, match="no entry"):
        replacing.replace(torch.nn.Module, "forward", other)
    assert torch.nn.Module.forward is not other


def test_no_operator_of_pytorch_is_overridden():
    assert python_ok(DUMPS + FUSE + COMPARE, timeout=300) == ""


def test_an_operator_that_is_overridden_would_be_seen():
    override = (
        "library = torch.library.Library('aten', 'IMPL')\n"
        "library.impl('relu', lambda x: x, 'SparseCPU', allow_override=True)\n"
    )
    done = python(DUMPS + FUSE + override + COMPARE, timeout=300)
    assert done.stdout.split() == ["aten::relu"], done.stderr


def test_a_seal_has_an_effect():
    assert python_ok(FUSE + SEAL) == ""

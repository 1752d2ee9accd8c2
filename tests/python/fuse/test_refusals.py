# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer that can't be fused is refused as early as that can be seen, with the reason, the
parameter and what to do, and with nothing changed."""

import functools

import pytest
import torch
from common import (
    adamw,
    net,
    python,
    python_ok,
    sgd,
    train,
    weights,
)
from torch import nn

import optfuse
from optfuse._link import links

both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))


def refused(optimizer, *words, **options):
    """fuse() raises, says these words and leaves the optimizer as it was."""
    kind, attributes = type(optimizer), sorted(vars(optimizer))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    hooks = [p._post_accumulate_grad_hooks for p in params]
    with pytest.raises(optfuse.Error) as caught:
        optfuse.fuse(optimizer, **options)
    message = str(caught.value)
    assert message.startswith("optfuse: "), message
    for word in words:
        assert word in message, f"{word!r} is not in the message: {message}"
    assert "frame #" not in message, f"a backtrace is no explanation: {message}"
    assert type(optimizer) is kind and sorted(vars(optimizer)) == attributes
    assert [p._post_accumulate_grad_hooks for p in params] == hooks


def test_error_is_a_runtime_error():
    assert issubclass(optfuse.Error, RuntimeError)


def test_a_class_in_the_place_of_one_of_torch_is_not_taken_for_it():
    """Its step() would not be called any more. Scripts patch torch.optim before optfuse comes."""
    python_ok(
        """
import torch
class Logged(torch.optim.Adam):
    def step(self, closure=None):
        self.param_groups[0]["lr"] *= 0.5
        return super().step(closure)
torch.optim.Adam = Logged
import optfuse
optimizer = Logged([torch.nn.Parameter(torch.ones(3))], fused=True)
optfuse.fuse(optimizer)
optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
optimizer.step()
assert optimizer.param_groups[0]["lr"] == 0.0005, "fused as Adam"
"""
    )


@pytest.mark.parametrize("flag", ("differentiable", "capturable"))
def test_flags_without_a_fused_update(flag):
    refused(torch.optim.AdamW(net().parameters(), **{flag: True}), flag, "group 0")


@both_modes
def test_fusing_twice(mode):
    optimizer = optfuse.fuse(adamw(net().parameters()), mode=mode)
    with pytest.raises(optfuse.Error, match="unfuse"):
        optfuse.fuse(optimizer)


def test_an_eager_parameter_of_another_model():
    refused(adamw(net().parameters()), "eager[0]", eager=[nn.Parameter(torch.zeros(3))])


@both_modes
@pytest.mark.parametrize("make", (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW))
@pytest.mark.parametrize("flags", ({}, {"foreach": True}, {"fused": False}))
def test_strict_refuses_flags_that_select_another_implementation(make, flags, mode):
    refused(make(net().parameters(), **flags), "strict", "fused", mode=mode, strict=True)
    plain = optfuse.fuse(make(net().parameters(), **flags), mode=mode)
    assert "fused=True" in str(optfuse.summary(plain)), "the difference is not in the summary"
    optfuse.fuse(make(net().parameters(), fused=True), mode=mode, strict=True)


@both_modes
def test_strict_where_the_reference_is_the_for_loop(mode):
    make = torch.optim.Adamax
    several = make(net().parameters(), foreach=True)
    refused(several, "strict", "foreach=True", mode=mode, strict=True)
    optfuse.fuse(make(net().parameters()), mode=mode, strict=True)


@both_modes
@pytest.mark.parametrize("make", ("Adamax", "ASGD", "NAdam", "RAdam"))
def test_strict_refuses_a_float32_tensor_as_lr_where_stock_computes_with_it(make, mode):
    make = getattr(torch.optim, make)
    optimizer = make(net().parameters(), lr=torch.tensor(0.01))
    refused(optimizer, "strict", "torch.float32", mode=mode, strict=True)
    assert optfuse.summary(optfuse.fuse(optimizer, mode=mode)).reference_differs == (0,)
    wide = make(net().parameters(), lr=torch.tensor(0.01, dtype=torch.float64))
    assert optfuse.summary(optfuse.fuse(wide, mode=mode, strict=True)).reference_differs == ()


class Subclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def subclass():
    inner = torch.zeros(3, 4)
    return torch.Tensor._make_wrapper_subclass(Subclass, inner.shape, requires_grad=True)


PARAMETERS = {
    "complex": (lambda: torch.zeros(3, 4, dtype=torch.complex64, requires_grad=True), "complex"),
    "meta": (lambda: torch.zeros(3, 4, device="meta", requires_grad=True), "meta"),
    "subclass": (subclass, "Subclass"),
    "sparse": (lambda: torch.eye(3, 4).to_sparse().requires_grad_(), "layout"),
    "float8": (
        lambda: torch.zeros(3, 4).to(torch.float8_e4m3fn).requires_grad_(),
        "float8_e4m3fn",
    ),
}


@both_modes
@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_without_a_fused_update(kind, mode):
    make, word = PARAMETERS[kind]
    good = nn.Parameter(torch.zeros(2))
    groups = [{"params": [good]}, {"params": [nn.Parameter(torch.ones(5)), make()]}]
    refused(torch.optim.AdamW(groups), word, "parameter 1 of group 1", "(3, 4)", mode=mode)


def test_uninitialized_parameters():
    refused(torch.optim.AdamW(nn.LazyLinear(3).parameters()), "initialized")


def test_names_are_used_where_the_optimizer_has_them():
    named = [("fine", nn.Parameter(torch.zeros(2))), ("layer.weight", PARAMETERS["complex"][0]())]
    refused(torch.optim.AdamW(named), "'layer.weight'", "(3, 4)")


@both_modes
def test_foreach_over_parameters_that_overlap(mode):
    """Each operator of a step would run for all of them before the next one."""
    flat = torch.zeros(24)
    first, second, apart = (nn.Parameter(part) for part in (flat[:16], flat[15:20], flat[20:]))
    together = torch.optim.AdamW([apart, second, first], foreach=True)
    refused(together, "2 of", "1 of", "overlap", mode=mode)
    for params, foreach in (([first, apart], True), ([first, second], False)):
        optfuse.unfuse(optfuse.fuse(torch.optim.AdamW(params, foreach=foreach), mode))


@both_modes
def test_foreach_over_parameters_that_overlap_later(mode):
    """They are updated one after the other."""
    trained = {}
    for foreach, fused in ((True, False), (False, False), (True, True)):
        torch.manual_seed(0)
        model = net()
        optimizer = adamw(model.parameters(), fused=False, foreach=foreach)
        if fused:
            optfuse.fuse(optimizer, mode)
        model[2].bias.data = model[0].bias.data
        train(model, optimizer, 0)
        trained[foreach, fused] = weights(model)
    torch.testing.assert_close(trained[True, True], trained[False, False], rtol=0, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(trained[True, True], trained[True, False], rtol=0, atol=1e-6)


def clamped(step):
    """Without functools.wraps(), as step() itself is, and with it."""

    def clamp_and_step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.clamp_(-1e-3, 1e-3)
        return step(self, closure)

    return clamp_and_step


@both_modes
@pytest.mark.parametrize("wrap", (lambda new, _: new, lambda new, old: functools.wraps(old)(new)))
def test_a_step_method_that_was_replaced_on_the_class(mode, wrap, monkeypatch):
    stock = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", wrap(clamped(stock), stock))
    optimizer = adamw(net().parameters())
    refused(optimizer, "AdamW was replaced by test_refusals.", mode=mode)
    monkeypatch.undo()
    optfuse.fuse(optimizer, mode=mode)


def test_distributed_tensors(gloo):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0])
    weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))
    partial = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
    refused(torch.optim.AdamW([nn.Parameter(partial)]), "DTensor", "Shard and Replicate")

    class Own(DTensor):
        pass

    own = Own(torch.zeros(4), weight._spec, requires_grad=True)
    refused(torch.optim.AdamW([own]), "tensor subclass", "Own")
    for use_orig_params in (False, True):
        wrapped = FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        refused(torch.optim.AdamW(wrapped.parameters()), "FSDP1", "fully_shard")


def test_parameters_and_engines_of_deepspeed():
    weight = nn.Parameter(torch.zeros(4))
    weight.ds_id = 0  # which ZeRO's third stage gives each
    refused(torch.optim.AdamW([weight]), "DeepSpeed", "fully_shard")
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(optfuse.Error, match="DeepSpeed.*fully_shard"):
        optfuse.fuse(engine())


def test_disabled_by_the_environment():
    python_ok(
        "import torch, optfuse\n"
        "from common import net, adamw\n"
        "opt = adamw(net().parameters()); before = dict(vars(opt))\n"
        "assert optfuse.fuse(opt) is opt and type(opt) is torch.optim.AdamW\n"
        "assert vars(opt).keys() == before.keys()\n"
        "optfuse.flush(); optfuse.flush(opt)\n",
        OPTFUSE_DISABLE="1",
    )


def test_a_wrong_instruction_set_in_the_environment():
    done = python(
        "import optfuse\nfrom common import *\noptfuse.fuse(adamw(net().parameters()))\n",
        OPTFUSE_ISA="mmx",
    )
    assert done.returncode != 0 and "mmx" in done.stderr, f"{done.returncode}: {done.stderr}"


@both_modes
@pytest.mark.parametrize(
    "option, value, words",
    (
        ("lr", "fast", "option 'lr' of a parameter group is 'fast', and must be a number"),
        ("eps", None, "option 'eps' of a parameter group is None, and must be a number"),
        ("betas", (0.9,), "option 'betas' of a parameter group is (0.9,), and must be 2 numbers"),
        ("betas", None, "option 'betas' of a parameter group is None, and must be 2 numbers"),
        ("lr", ..., "option 'lr' of a parameter group is missing, and must be a number"),
    ),
)
def test_an_option_that_is_no_number_is_named(option, value, words, mode):
    p = nn.Parameter(torch.ones(2))
    optimizer = optfuse.fuse(adamw([p]), mode=mode)
    group = optimizer.param_groups[0]
    group[option] = value
    if value is ...:
        del group[option]
    with pytest.raises((TypeError, ValueError, LookupError, optfuse.Error)) as caught:
        p.sum().backward()
        optimizer.step()
    assert words in str(caught.value)
    assert (p == 1).all()


def test_a_failed_fuse_keeps_nothing():
    """In backward mode it fails late: the parameter already has an owner."""
    p = nn.Parameter(torch.ones(2))
    keep = optfuse.fuse(sgd([p]), mode="backward")
    n = len(links)
    second = sgd([p])
    with pytest.raises(optfuse.Error, match="already"):
        optfuse.fuse(second, mode="backward")
    assert len(links) == n and type(second) is torch.optim.SGD
    optfuse.unfuse(keep)
    optfuse.fuse(second, mode="backward")

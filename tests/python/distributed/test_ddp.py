# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel: every option of it, in both modes, has stock's bits, or backward
mode refuses it before anything has changed."""

import pickle

import ddp_scripts
import pytest
import ranks
import torch
import torch.distributed as dist
from common import adamw, batch, everything, fuse_with, net, refused, same
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse

SCRIPTS = "ddp_scripts"


@ranks.by(
    ddp_scripts.SCENARIOS,
    three=["option batched copy backward", "option buckets backward", "no_sync views forward"],
)
def test_training_is_as_in_stock(world, scenario, played):
    assert played is None, played


@pytest.mark.parametrize(
    "scenario",
    ["wrapped_anew copies backward", "wrapped_anew views backward"]
    + [f"zeroed_after_the_forward_pass views {mode}" for mode in ("forward", "backward")],
)
def test_buckets_that_are_made_beside_consumed_gradients(gloo, scenario):
    torch.manual_seed(0)
    ddp_scripts.SCENARIOS[scenario]()


def refuses(model, *words, way_out='mode="forward"', parameters=None, hook=None, **options):
    optimizer = adamw((parameters or model).parameters())
    refused(
        lambda: fuse_with(optimizer, "backward", ddp=optfuse.DDPModel(model, hook), **options),
        *words,
        way_out=way_out,
    )
    assert type(optimizer) is torch.optim.AdamW


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](x)


@pytest.mark.parametrize("options", ({}, {"gradient_as_bucket_view": True}), ids=str)
def test_what_a_pass_does_not_use_is_reduced_with_the_gradient_of_the_one_before(gloo, options):
    """DDP asks for the memory of that gradient in C++, and its update may be pending."""

    def script(wrap):
        wrapped = DDP(TwoHeads(), find_unused_parameters=True, **options)
        optimizer = wrap(adamw(wrapped.parameters()))
        for i in range(4):
            wrapped(torch.ones(2, 4), i % 2).square().sum().backward()
            yield "gradients", [p.grad for p in wrapped.parameters()] if i % 3 == 0 else []
            optimizer.step()
        yield from everything(wrapped, optimizer)

    same(script)


@pytest.mark.parametrize("options", ({}, {"gradient_as_bucket_view": True}), ids=str)
def test_buckets_are_rebuilt_with_a_parameter_that_the_module_has_no_more(gloo, options):
    """DDP still knows its gradient, which backward fusion has consumed."""

    def script(wrap):
        wrapped = DDP(net(), **options)
        layer = wrapped.module[0]
        optimizer = wrap(adamw(wrapped.parameters()), ddp=wrapped)
        wrapped(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        old, layer.bias = layer.bias, nn.Parameter(layer.bias.detach().clone())
        params = optimizer.param_groups[0]["params"]
        params[next(i for i, p in enumerate(params) if p is old)] = layer.bias
        optimizer.zero_grad()
        yield "output", wrapped(torch.ones(2, 6))
        yield "weights", dict(wrapped.module.state_dict())

    same(script, "backward")


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("options", ({}, {"gradient_as_bucket_view": True}), ids=str)
def test_buckets_are_rebuilt_with_a_parameter_that_is_frozen(gloo, mode, options):
    """DDP asks for the memory of its gradient, too, and doesn't survive an exception there."""

    def script(wrap):
        wrapped = DDP(net(), **options)
        optimizer = wrap(adamw(wrapped.parameters()), **ddp_scripts.ddp_of(wrap, wrapped))
        wrapped(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["params"].pop(0).requires_grad_(False)
        optimizer.zero_grad()
        yield "output", wrapped(torch.ones(2, 6))
        yield "weights", dict(wrapped.module.state_dict())

    same(script, mode)


@pytest.mark.parametrize("options", ({}, {"gradient_as_bucket_view": True}), ids=str)
def test_a_frozen_parameter_is_reduced_with_the_gradient_of_the_pass_before(gloo, options):
    def script(wrap):
        wrapped = DDP(TwoHeads(), find_unused_parameters=True, **options)
        optimizer = wrap(adamw(wrapped.parameters()))
        for i in range(4):
            wrapped(torch.ones(2, 4), i % 2).square().sum().backward()
            optimizer.step()
            if i == 1:
                wrapped.module.heads[1].weight.requires_grad_(False)
        yield from everything(wrapped, optimizer)

    same(script)


def test_unused_parameters_are_refused(gloo):
    refuses(DDP(net(), find_unused_parameters=True), "find_unused_parameters=True")


def test_delayed_reductions_are_refused(gloo):
    model = net()
    delayed = [("0.weight", model[0].weight)]
    wrapped = DDP(
        model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model[4].weight
    )
    refuses(wrapped, "delay_all_reduce_named_params")


def test_a_static_graph_whose_passes_are_counted_is_refused(gloo):
    refuses(DDP(net(), static_graph=True), "static_graph", accumulate=2)


def test_mixed_precision_is_refused(gloo):
    wrapped = DDP(net())
    wrapped.mixed_precision = object()  # which DDP itself makes where a GPU is
    refuses(wrapped, "mixed_precision")


def test_the_reducer_of_compiled_code_is_refused(gloo):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        refuses(DDP(net()), "python_reducer")


@pytest.mark.parametrize("builtin", (False, True))
def test_a_hook_that_was_registered_before_is_refused(gloo, builtin):
    wrapped = DDP(net())
    if builtin:
        wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    else:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    refuses(wrapped, "has a communication hook already", way_out="comm_hook=(state, hook)")


def test_hooks_that_come_later_are_refused_by_pytorch(gloo):
    wrapped = DDP(net())
    optimizer = optfuse.fuse(adamw(wrapped.parameters()), optfuse.Backward(ddp=wrapped))
    with pytest.raises(RuntimeError, match="only be called once"):
        wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(RuntimeError, match="only be called once"):
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    wrapped(batch(0)[0]).sum().backward()
    optimizer.step()


def test_models_of_others_are_refused(gloo):
    wrapped = DDP(net())
    refuses(
        wrapped, "none of the optimizer's parameters", way_out="pass the model", parameters=net()
    )


def test_a_second_hook_for_the_same_model_is_refused(gloo):
    wrapped = DDP(net())
    first = optfuse.fuse(adamw(wrapped.module[0].parameters()), optfuse.Backward(ddp=wrapped))
    hook = (None, default_hooks.allreduce_hook)
    refuses(wrapped, "another optimizer", way_out="first fuse()", hook=hook)
    assert optfuse.summary(first).mode == "backward"


def test_the_model_can_be_saved_and_dies(gloo):
    """The hook that the model lists does not go with a copy of it."""
    wrapped = DDP(net())
    optimizer = optfuse.fuse(adamw(wrapped.parameters()), optfuse.Backward(ddp=wrapped))
    wrapped(batch(0)[0]).sum().backward()
    optimizer.step()
    pickle.loads(pickle.dumps([hook for hook, _ in wrapped._comm_hooks]))
    reduction = wrapped._comm_hooks[0][1]
    assert pickle.loads(pickle.dumps(reduction)).comm_hook is None
    with pytest.raises(optfuse.Error, match="no longer exists"):
        pickle.loads(pickle.dumps(reduction)).model()


def test_without_a_model_backward_mode_names_the_way(gloo):
    wrapped = DDP(net())
    optfuse.fuse(optimizer := adamw(wrapped.parameters()), mode="backward")
    with pytest.raises(optfuse.Error, match=r"Backward\(ddp=model\)"):
        wrapped(batch(0)[0]).sum().backward()
    del optimizer


def test_a_copied_optimizer_is_of_no_model(gloo):
    import copy

    wrapped = DDP(net())
    optimizer = optfuse.fuse(adamw(wrapped.parameters()), optfuse.Backward(ddp=wrapped))
    twin = copy.deepcopy(optimizer)
    wrapped(batch(0)[0]).sum().backward()
    optimizer.step()
    assert optfuse.summary(twin).created == 0

# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel on one process: the two ways that know it, Backward(ddp=model) and
Forward(ddp=model), refuse what they can't follow before anything has changed; what DDP does with
gradients that are consumed or on their way. Scripts of several processes: ddp_scripts.py."""

import copy
import pickle
from pathlib import Path

import ddp_scripts
import pytest
import torch
import torch.distributed as dist
from common import adamw, batch, everything, net, refused, same
from ddp_models import fused
from several import started
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse

WAYS = {"backward": optfuse.Backward, "awaited": optfuse.Forward}
OF_ALL = pytest.mark.parametrize("way", WAYS)
LAYOUTS = pytest.mark.parametrize("options", ({}, {"gradient_as_bucket_view": True}), ids=str)


def refuses(way, model, *words, way_out=None, parameters=None, hook=None, **options):
    optimizer = adamw((parameters or model).parameters())
    way_out = way_out or {"backward": 'mode="forward"', "awaited": "without ddp="}[way]
    mode = WAYS[way](ddp=optfuse.DDPModel(model, hook), **options)
    refused(lambda: optfuse.fuse(optimizer, mode), *words, way_out=way_out)
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize(
    "scenario",
    [name for name in ddp_scripts.SCENARIOS if name.startswith("wrapped_anew")]
    + [f"zeroed_after_the_forward_pass views {mode}" for mode in ("forward", "backward")],
)
def test_buckets_that_are_made_beside_consumed_gradients(gloo, scenario):
    torch.manual_seed(0)
    ddp_scripts.SCENARIOS[scenario]()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](x)


@LAYOUTS
@pytest.mark.parametrize("freezes", (False, True))
def test_what_a_pass_does_not_use_is_reduced_with_the_gradient_of_the_one_before(
    gloo, options, freezes
):
    """DDP asks for the memory of that gradient in C++, and its update may be pending."""

    def script(wrap):
        wrapped = DDP(TwoHeads(), find_unused_parameters=True, **options)
        optimizer = wrap(adamw(wrapped.parameters()))
        for i in range(4):
            wrapped(torch.ones(2, 4), i % 2).square().sum().backward()
            looks = i % 3 == 0 and not freezes
            yield "gradients", [p.grad for p in wrapped.parameters()] if looks else []
            optimizer.step()
            if i == 1 and freezes:
                wrapped.module.heads[1].weight.requires_grad_(False)
        yield from everything(wrapped, optimizer)

    same(script)


@LAYOUTS
@pytest.mark.parametrize(
    ("change", "way"), [("replaced", "backward"), ("frozen", "backward"), ("frozen", "forward")]
)
def test_buckets_are_rebuilt_with_a_parameter_that_is_trained_no_more(gloo, change, way, options):
    """DDP asks for the memory of its gradient, which backward fusion has consumed, and doesn't
    survive an exception there."""

    def script(wrap):
        wrap.way = way
        wrapped = DDP(net(), **options)
        layer = wrapped.module[0]
        optimizer = fused(wrap, wrapped, adamw(wrapped.parameters()))
        wrapped(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        params = optimizer.param_groups[0]["params"]
        if change == "frozen":
            params.pop(0).requires_grad_(False)
        else:
            old, layer.bias = layer.bias, nn.Parameter(layer.bias.detach().clone())
            params[next(i for i, p in enumerate(params) if p is old)] = layer.bias
        optimizer.zero_grad()
        yield "output", wrapped(torch.ones(2, 6))
        yield "weights", dict(wrapped.module.state_dict())

    same(script, way)


def delayed():
    model = net()
    return DDP(
        model,
        delay_all_reduce_named_params=[("0.weight", model[0].weight)],
        param_to_hook_all_reduce=model[4].weight,
    )


def of_mixed_precision():
    wrapped = DDP(net())
    wrapped.mixed_precision = object()  # which DDP itself makes where a GPU is
    return wrapped


REFUSED = {
    "find_unused_parameters=True": lambda: DDP(net(), find_unused_parameters=True),
    "delay_all_reduce_named_params": delayed,
    "mixed_precision": of_mixed_precision,
}


@OF_ALL
@pytest.mark.parametrize("why", REFUSED)
def test_options_of_ddp_are_refused(gloo, why, way):
    refuses(way, REFUSED[why](), why)


@OF_ALL
def test_the_reducer_of_compiled_code_is_refused(gloo, way):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        refuses(way, DDP(net()), "python_reducer")


@OF_ALL
def test_models_of_others_are_refused(gloo, way):
    words = "none of the optimizer's parameters"
    refuses(way, DDP(net()), words, way_out="pass the model", parameters=net())


@OF_ALL
@pytest.mark.parametrize("builtin", (False, True))
def test_a_hook_that_was_registered_before_is_refused(gloo, builtin, way):
    wrapped = DDP(net())
    if builtin:
        wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    else:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    refuses(way, wrapped, "has a communication hook already", way_out="comm_hook=(state, hook)")


def chained(model):
    return ddp_scripts.power_sgd(model)[0], default_hooks.fp16_compress_wrapper(powerSGD_hook)


@pytest.mark.parametrize("make", (ddp_scripts.power_sgd, chained))
def test_hooks_that_communicate_twice_are_refused(gloo, make):
    wrapped = DDP(net())
    refuses("awaited", wrapped, "powerSGD_hook", "in another order", hook=make(wrapped))


def test_a_static_graph_whose_passes_are_counted_is_refused(gloo):
    refuses("backward", DDP(net(), static_graph=True), "static_graph", accumulate=2)


def test_hooks_that_come_later_are_refused_by_pytorch(gloo):
    wrapped, optimizer = fused_wrapped()
    with pytest.raises(RuntimeError, match="only be called once"):
        wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(RuntimeError, match="only be called once"):
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    one_step(wrapped, optimizer)


def fused_wrapped(way="backward"):
    wrapped = DDP(net())
    return wrapped, optfuse.fuse(adamw(wrapped.parameters()), WAYS[way](ddp=wrapped))


def one_step(wrapped, optimizer):
    wrapped(batch(0)[0]).sum().backward()
    optimizer.step()


def test_a_second_hook_for_the_same_model_is_refused(gloo):
    wrapped, first = fused_wrapped()
    hook = (None, default_hooks.allreduce_hook)
    refuses("backward", wrapped, "another optimizer", way_out="first fuse()", hook=hook)
    assert optfuse.summary(first).mode == "backward"


@pytest.mark.parametrize(("first", "second"), [("awaited", "backward"), ("backward", "awaited")])
def test_two_ways_for_one_model_are_refused(gloo, first, second):
    wrapped, optimizer = fused_wrapped(first)
    refuses(second, wrapped, way_out="in the same way")
    assert optfuse.summary(optimizer).created == 0


def test_the_model_can_be_saved_and_dies(gloo):
    """The hook that the model lists does not go with a copy of it."""
    wrapped, optimizer = fused_wrapped()
    one_step(wrapped, optimizer)
    pickle.loads(pickle.dumps([hook for hook, _ in wrapped._comm_hooks]))
    reduction = wrapped._comm_hooks[0][1]
    assert pickle.loads(pickle.dumps(reduction)).comm_hook is None
    with pytest.raises(optfuse.Error, match="no longer exists"):
        pickle.loads(pickle.dumps(reduction)).model()


def test_a_model_that_waits_at_first_use_can_be_pickled(gloo):
    wrapped, _optimizer = fused_wrapped("awaited")
    assert type(pickle.loads(pickle.dumps(wrapped))) is DDP


def test_without_a_model_backward_mode_names_the_way(gloo):
    wrapped = DDP(net())
    _optimizer = optfuse.fuse(adamw(wrapped.parameters()), mode="backward")
    with pytest.raises(optfuse.Error, match=r"Backward\(ddp=model\)"):
        wrapped(batch(0)[0]).sum().backward()


def test_a_copied_optimizer_is_of_no_model(gloo):
    wrapped, optimizer = fused_wrapped()
    twin = copy.deepcopy(optimizer)
    one_step(wrapped, optimizer)
    assert optfuse.summary(twin).created == 0


def test_a_forward_pass_that_calls_no_hooks_waits_at_its_end(gloo):
    def script(wrap):
        wrapped = DDP(net())
        optimizer = wrap(adamw(wrapped.parameters()), ddp=wrapped)
        for i in range(3):
            wrapped.forward(batch(i)[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield "weights", dict(wrapped.module.state_dict())

    same(script)


def said_at_the_end(folder, *arguments):
    """The output of a job's rank 0."""
    folder.mkdir()
    outputs = [folder / f"output-{rank}" for rank in range(2)]
    script = Path(__file__).with_name("ending.py")
    ranks = [started(out, script, folder, i, *arguments) for i, out in enumerate(outputs)]
    assert [process.wait(timeout=60) for process in ranks] == [0, 0]
    return outputs[0].read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("ends", ((), ("destroy",)))
def test_a_job_may_end_while_gradients_are_on_their_way(ends, tmp_path):
    stock = said_at_the_end(tmp_path / "stock", "stock", *ends)
    assert stock and said_at_the_end(tmp_path / "ours", "fused", *ends) == stock

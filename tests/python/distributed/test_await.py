# SPDX-License-Identifier: BSD-3-Clause
"""Forward(ddp=model): reductions are awaited in the next forward pass, with stock's
bits, or fuse() refuses before anything has changed."""

import pickle
from pathlib import Path

import await_scripts
import pytest
import ranks
import torch
from common import adamw, batch, net, refused, same
from ddp_scripts import power_sgd
from several import started
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse

SCRIPTS = "await_scripts"


@ranks.by(
    await_scripts.SCENARIOS,
    three=["option buckets adamw forward", "option buckets views sgd forward",
           "backward_and_step_do_not_wait copies forward"],
)  # fmt: skip
def test_training_is_as_in_stock(world, scenario, played):
    assert played is None, played


def refuses(model, *words, way_out="without ddp=", parameters=None, hook=None):
    optimizer = adamw((parameters or model).parameters())
    mode = optfuse.Forward(ddp=optfuse.DDPModel(model, hook))
    refused(lambda: optfuse.fuse(optimizer, mode), *words, way_out=way_out)
    assert type(optimizer) is torch.optim.AdamW


def test_unused_parameters_are_refused(gloo):
    refuses(DDP(net(), find_unused_parameters=True), "find_unused_parameters=True")


def test_delayed_reductions_are_refused(gloo):
    model = net()
    delayed = [("0.weight", model[0].weight)]
    wrapped = DDP(
        model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model[4].weight
    )
    refuses(wrapped, "delay_all_reduce_named_params")


def test_mixed_precision_is_refused(gloo):
    wrapped = DDP(net())
    wrapped.mixed_precision = object()  # which DDP itself makes where a GPU is
    refuses(wrapped, "mixed_precision")


def test_the_reducer_of_compiled_code_is_refused(gloo):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        refuses(DDP(net()), "python_reducer")


def wrapped_chained(model):
    return power_sgd(model)[0], default_hooks.fp16_compress_wrapper(powerSGD_hook)


@pytest.mark.parametrize("make", (power_sgd, wrapped_chained))
def test_hooks_that_communicate_twice_are_refused(gloo, make):
    wrapped = DDP(net())
    refuses(wrapped, "powerSGD_hook", "in another order", hook=make(wrapped))


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


def test_a_model_that_waits_at_first_use_can_be_pickled(gloo):
    wrapped = DDP(net())
    optfuse.fuse(adamw(wrapped.parameters()), optfuse.Forward(ddp=wrapped))
    assert type(pickle.loads(pickle.dumps(wrapped))) is DDP


def test_a_hook_that_was_registered_before_is_refused(gloo):
    wrapped = DDP(net())
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    refuses(wrapped, "has a communication hook already", way_out="comm_hook=(state, hook)")


@pytest.mark.parametrize("first", (optfuse.Forward, optfuse.Backward))
def test_two_ways_for_one_model_are_refused(gloo, first):
    wrapped = DDP(net())
    optimizer = optfuse.fuse(adamw(wrapped.module[0].parameters()), first(ddp=wrapped))
    other = adamw(wrapped.module[2].parameters())
    second = optfuse.Backward if first is optfuse.Forward else optfuse.Forward
    with pytest.raises(optfuse.Error, match="in the same way"):
        optfuse.fuse(other, second(ddp=wrapped))
    assert type(other) is torch.optim.AdamW and optfuse.summary(optimizer).created == 0


def test_models_of_others_are_refused(gloo):
    refuses(
        DDP(net()), "none of the optimizer's parameters", way_out="pass the model", parameters=net()
    )


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

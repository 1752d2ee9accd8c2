# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode's errors at the mistakes that are made most: at most three lines, with the place in
the script and the way out."""

import os
import sys
import warnings

import pytest
import torch
from common import adamw, fused_backward, loss_of, net, sgd, train
from torch import nn

import optfuse
from optfuse._library import caller
from optfuse._library.bindings import Error

FORWARD = 'optfuse.fuse(optimizer, mode="forward")'
MARK = "inside `with optfuse.accumulate(optimizer):`"
COUNTED = "optfuse.Backward(accumulate=n)"

#: A line that raises, those before it, and words of the message.
MISTAKES = {
    "zero_grad() between": (
        "backward()",
        "optimizer.zero_grad()",
        "zero_grad() before step()",
        "Call step() first",
        MARK,
        FORWARD,
    ),
    "zero_grad() of the model between": (
        "backward(); model.zero_grad()",
        "optimizer.step()",
        "was discarded, zeroed or replaced between backward() and step()",
        MARK,
        FORWARD,
    ),
    "clipping": (
        "backward()",
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "clipping (aten::",
        "Clipping needs all gradients after backward(): use",
        FORWARD,
    ),
    "clipping values": (
        "backward()",
        "nn.utils.clip_grad_value_(model.parameters(), 1.0)",
        "clipping (aten::",
        FORWARD,
    ),
    "unscaling": (
        "scaler = torch.amp.GradScaler('cpu'); scaler.scale(torch.zeros(())); backward()",
        "scaler.unscale_(optimizer)",
        "unscaling (aten::",
        FORWARD,
    ),
    "accumulating": (
        "backward()",
        "backward()",
        "a second backward() before step() would add to the gradient of a parameter of shape",
        COUNTED,
        MARK,
        FORWARD,
    ),
    "accumulating into None": (
        "backward(); model.zero_grad()",
        "backward()",
        "a second gradient arrived before step()",
        COUNTED,
        MARK,
        FORWARD,
    ),
    "no zero_grad()": (
        "backward(); optimizer.step()",
        "backward()",
        "backward() without zero_grad() after step() would add to",
        "Call zero_grad() between step() and the next backward()",
    ),
    "reading .grad": (
        "backward()",
        "model[0].weight.grad.norm()",
        "aten::linalg_vector_norm read the gradient of a parameter of shape (8, 6)",
        "Gradients are there after backward() with",
        FORWARD,
    ),
    "writing .grad": (
        "backward()",
        "model[0].weight.grad.zero_()",
        "aten::zero_ would overwrite the gradient of a parameter of shape (8, 6)",
        "Overwrite it after step()",
        MARK,
        FORWARD,
    ),
}  # fmt: skip


def raised(before, line, file="train.py"):
    """The message of a script that does this in its fifth line."""
    model, optimizer = fused_backward()
    names = {
        **{"model": model, "optimizer": optimizer, "nn": nn, "torch": torch},
        "loss": lambda: loss_of(model, 0),
    }
    text = f"\n\ndef backward():\n    loss().backward()\n{line}\n"
    exec(before.replace("backward()", "loss().backward()"), names)
    with pytest.raises(optfuse.Error) as found:
        exec(compile(text, file, "exec"), names)
    return str(found.value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_three_lines_at_most_with_its_place_and_the_way_out(mistake):
    before, line, *words = MISTAKES[mistake]
    message = raised(before, line)
    number = 4 if line == "backward()" else 5  # of the innermost frame
    assert message.startswith(f"optfuse: train.py:{number}: "), message
    assert len(message.splitlines()) <= 3, message
    for word in words:
        assert word in message, message


def test_below_the_working_directory_the_place_begins_there():
    before, line, *_ = MISTAKES["clipping"]
    inside = os.path.join(os.getcwd(), "src", "train.py")
    assert raised(before, line, inside).startswith(f"optfuse: {os.path.join('src', 'train.py')}:5")
    assert raised(before, line, "/elsewhere/train.py").startswith("optfuse: /elsewhere/train.py:5")


def test_the_frame_is_the_innermost_outside_of_torch():
    """Here that of a hook inside of backward()."""
    model, _ = fused_backward()

    def read(param):
        model[4].bias.grad.sum()

    loss_of(model, 0).backward()
    model[0].weight.register_hook(read)
    with pytest.raises(optfuse.Error) as found:
        loss_of(model, 1).backward(inputs=[model[0].weight])
    line = read.__code__.co_firstlineno + 1
    assert f"test_messages.py:{line}: aten::sum read" in str(found.value)


def test_passes_that_go_well_look_for_no_caller(monkeypatch):
    def fail():
        raise AssertionError("nothing was wrong")

    monkeypatch.setattr(Error, "_find_caller", staticmethod(fail))
    model, optimizer = fused_backward()
    for i in range(3):
        train(model, optimizer, i)


def test_a_caller_that_cant_be_found_leaves_the_message(monkeypatch):
    def fail():
        raise ValueError("there is none")

    monkeypatch.setattr(Error, "_find_caller", staticmethod(fail))
    before, line, *words = MISTAKES["reading .grad"]
    message = raised(before, line)
    assert message.startswith(f"optfuse: {words[0]}"), message
    assert sys.exc_info() == (None, None, None)


def test_a_thread_without_a_script_has_no_caller(monkeypatch):
    monkeypatch.setattr(caller, "_OURS", (*caller._OURS, __name__.partition(".")[0], ""))
    frame = sys._getframe
    monkeypatch.setattr(caller.sys, "_getframe", lambda depth: None)
    assert caller.find_caller() == ("", "")
    monkeypatch.setattr(caller.sys, "_getframe", frame)


def test_accumulate_of_an_optimizer_that_is_not_fused_says_so_once(monkeypatch):
    stock = sgd(net().parameters())
    words = "does nothing for this SGD, which is not fused"
    with pytest.warns(UserWarning, match=words) as seen, optfuse.accumulate(stock):
        pass
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optfuse.accumulate(stock, optfuse.fuse(adamw(net().parameters()))):
            pass
        monkeypatch.setenv("OPTFUSE_DISABLE", "1")
        with optfuse.accumulate(sgd(net().parameters())):
            pass

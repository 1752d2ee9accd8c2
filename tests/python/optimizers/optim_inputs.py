# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's own database of optimizers, as inputs for our tests.

torch.testing._internal.common_optimizers has a list of every optimizer with the
options that PyTorch tests it with. From it come here:

- all that PyTorch uses on the CPU: every input with every implementation flag;
- foreach=True, which PyTorch's helper adds on GPUs only;
- the inputs that it has for GPUs only (capturable=True), as they are and, since
  some have other options too, without capturable.
"""

import sys
import types
import unittest
from dataclasses import dataclass

import torch
from optim_entries import OURS

# The list is in PyTorch's tests' package, which derives its test cases from those of a
# package of another project. No test case of theirs is used here, so no such package is
# needed, and a machine with a GPU may lack it.
if "expecttest" not in sys.modules:
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput, optim_db
from torch.testing._internal.common_optimizers import (
    _get_optim_inputs_including_global_cliquey_kwargs as inputs_with_flags,
)

import optfuse
from optfuse._library import releases
from optfuse._rules import RULES
from optfuse.optim import CLASSES


def inputs_of(name):
    """Inputs of a class of optfuse.optim, as the list has them."""
    every = [*OURS[name].options, {"lr": torch.tensor(0.001)}]
    return lambda device, dtype=None: [OptimizerInput(params=None, kwargs=one) for one in every]


#: PyTorch's own, and beside them ours.
INFOS = {info.name: info for info in optim_db}
for ours in CLASSES:
    name = ours.__name__
    INFOS[name] = OptimizerInfo(ours, optim_inputs_func=inputs_of(name), supported_impls=())
#: Options that choose PyTorch's implementation: no part of the algorithm.
FLAGS = ("foreach", "fused", "differentiable")
#: Optimizers with a fused kernel on the CPU; its bits are the reference. For
#: the others it is the loop over the parameters (docs/numerics.md).
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
#: These have the bits of the class's own step(), with the flags it has.
OWN_STEP = ("Adafactor", "Muon")
#: Odd sizes; the last is split between threads and leaves a tail in each dtype.
SHAPES = ((), (1,), (7,), (3, 5), (17,), (2, 3, 11), (131, 157))
MATRICES = ((1, 1), (3, 5), (31, 3), (131, 157))


@dataclass(frozen=True)
class Input:
    """One way to make an optimizer."""

    name: str
    kwargs: dict
    desc: str

    def options(self):
        """Without the flags; tensors of its own."""
        return {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self.kwargs.items()
            if key not in FLAGS
        }

    def key(self):
        """Equal where stock's reference computes the same."""
        options = self.kwargs if self.name in OWN_STEP else self.options()
        return self.name, repr(sorted(options.items(), key=lambda item: item[0]))

    def __str__(self):
        kwargs = ", ".join(f"{key}={value!r}" for key, value in self.kwargs.items())
        return f"{self.name}({kwargs})"


def plain_inputs(name):
    """Those of PyTorch on the CPU without flags; without capturable, those of GPUs."""
    info = INFOS[name]
    found = [Input(name, one.kwargs, one.desc) for one in info.optim_inputs_func(device="cpu")]
    known = {one.key() for one in found}
    for one in info.optim_inputs_func(device="cuda"):
        kwargs = {key: value for key, value in one.kwargs.items() if key != "capturable"}
        without = Input(name, kwargs, f"{one.desc}, but not capturable")
        if without.key() not in known:
            known.add(without.key())
            found.append(without)
    return found


def flagged_inputs(name):
    """The others: every flag that the optimizer has, and capturable."""
    info = INFOS[name]
    found = [
        Input(name, one.kwargs, one.desc) for one in inputs_with_flags("cpu", torch.float32, info)
    ]
    if "foreach" in info.supported_impls:
        for one in info.optim_inputs_func(device="cpu"):
            found.append(Input(name, {**one.kwargs, "foreach": True}, f"{one.desc} & foreach"))
    for one in info.optim_inputs_func(device="cuda"):
        if one.kwargs.get("capturable"):
            found.append(Input(name, one.kwargs, one.desc))
    return found


def inputs_for_gpus(name):
    """Those that PyTorch uses on GPUs, with every implementation flag."""
    found = inputs_with_flags("cuda", torch.float32, INFOS[name])
    return [Input(name, one.kwargs, one.desc) for one in found]


def shapes_of(name, dtype):
    if name == "SGD" and dtype.itemsize == 2:
        return (*SHAPES[:-1], (31, 157))  # the reference is slow there: test_bits.py
    return MATRICES if name == "Muon" else SHAPES


def make(one, params, **flags):
    """The optimizer; with flags, those instead of the input's own."""
    kwargs = one.options() if flags else {**one.kwargs, **one.options()}
    return INFOS[one.name].optim_cls(params, **kwargs, **flags)


def falls_back(one, params):
    """Whether these parameters get the class's own step(), with the flags it has, because
    their release has other bits than the kernels."""
    release = releases.release_of(torch.__version__)
    dtype = str(params[0].dtype).removeprefix("torch.")
    if releases.holds(RULES[INFOS[one.name].optim_cls].name, dtype, release):
        return False
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    return optfuse.summary(optfuse.fuse(make(one, copies))).isa[dtype] == "own step()"


def reference(one, params):
    """The same algorithm by the implementation whose bits are promised."""
    if one.name in FUSED:
        return make(one, params, **({} if falls_back(one, params) else {"fused": True}))
    if one.name not in OWN_STEP and "foreach" in INFOS[one.name].supported_impls:
        return make(one, params, foreach=False)
    return make(one, params)

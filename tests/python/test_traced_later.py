# SPDX-License-Identifier: BSD-3-Clause
"""Traced optimizers whose parameters or state become others in the middle of training. Forward
mode leaves such a step to the class; backward mode refuses it."""

import pytest
import torch
import traced_classes
from torch import nn

import optfuse


@pytest.mark.parametrize("cls", [traced_classes.AdaBelief, traced_classes.FactoredState])
def test_a_lazy_parameter_is_refused_as_for_classes_with_kernels(cls):
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    for make in (cls, torch.optim.AdamW):
        with pytest.raises(optfuse.Error, match="it is not initialized yet; run one forward pass"):
            optfuse.fuse(make(model.parameters()))

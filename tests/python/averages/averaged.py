# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of averages: what is trained and averaged."""

from common import adamw, net
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

import optfuse

KINDS = {
    "EMA": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "EMA of little decay": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.3)},
    "EMA one by one": lambda: {"avg_fn": swa_utils.get_ema_avg_fn(0.99)},
    "SWA": dict,
    "SWA one by one": lambda: {"avg_fn": swa_utils.get_swa_avg_fn()},
    "SWA by its function": lambda: {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
}


def averaged_net(wrap, kind="EMA"):
    """A model, its optimizer and its average."""
    model = net()
    return model, wrap(adamw(model.parameters())), AveragedModel(model, **KINDS[kind]())


def averages_of(optimizer):
    return optfuse.summary(optimizer).averages

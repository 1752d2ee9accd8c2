# SPDX-License-Identifier: BSD-3-Clause
"""fastai: a Learner with the one-cycle policy, which sets rates and momenta before each batch."""

import torch
from digits import dataset, net
from fastai.basics import CrossEntropyLossFlat, DataLoader, DataLoaders
from fastai.callback.schedule import Learner
from fastai.optimizer import OptimWrapper

import optfuse


def make(parameters, **options):
    wrapper = OptimWrapper(parameters, torch.optim.AdamW, fused=True, **options)
    optimizer = wrapper.opt
    optfuse.fuse(optimizer)
    return wrapper


torch.manual_seed(0)
loader = DataLoader(dataset, bs=128, shuffle=False, drop_last=True)
loaders = DataLoaders(loader, loader, device=torch.device("cpu"))
learner = Learner(loaders, net(), loss_func=CrossEntropyLossFlat(), opt_func=make)
with learner.no_logging():
    learner.fit_one_cycle(2, lr_max=3e-3)
model = learner.model

# SPDX-License-Identifier: BSD-3-Clause
"""pytorch-tabnet: a classifier of tables. --clip 0 is its clip_value=None."""

import sys

import torch
from digits import dataset
from pytorch_tabnet.tab_model import TabNetClassifier

import optfuse


def make(parameters, **options):
    optimizer = torch.optim.Adam(parameters, **options)
    optfuse.fuse(optimizer)
    return optimizer


clip = {} if "--clip" not in sys.argv else {"clip_value": None}
images, labels = (tensor.numpy() for tensor in dataset.tensors)
classifier = TabNetClassifier(
    n_d=8,
    n_a=8,
    n_steps=2,
    optimizer_fn=make,
    optimizer_params={"lr": 2e-2, "fused": True},
    scheduler_fn=torch.optim.lr_scheduler.StepLR,
    scheduler_params={"step_size": 1, "gamma": 0.9},
    device_name="cpu",
    verbose=0,
    **clip,
)
table = images.reshape(len(images), -1)
classifier.fit(table, labels, max_epochs=1, batch_size=128, virtual_batch_size=32)
model = classifier.network

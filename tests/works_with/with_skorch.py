# SPDX-License-Identifier: BSD-3-Clause
"""skorch: a classifier of scikit-learn's interface, whose optimizer runs a closure."""

import torch
from digits import dataset, net
from skorch import NeuralNetClassifier

import optfuse

torch.manual_seed(0)
images, labels = dataset.tensors
classifier = NeuralNetClassifier(
    net(),
    criterion=torch.nn.CrossEntropyLoss,
    optimizer=torch.optim.AdamW,
    optimizer__fused=True,
    lr=3e-3,
    batch_size=128,
    max_epochs=1,
    verbose=0,
)
classifier.initialize()
optimizer = classifier.optimizer_
optimizer = optfuse.fuse(optimizer)
classifier.partial_fit(images.numpy(), labels.numpy())
model = classifier.module_

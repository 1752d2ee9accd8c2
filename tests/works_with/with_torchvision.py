# SPDX-License-Identifier: BSD-3-Clause
"""As references/classification of torchvision: groups by decay, mixing of images, warm-up, weights
averaged."""

import torch
from digits import dataset
from torch import nn
from torchvision.models import mobilenet_v3_small
from torchvision.ops.misc import Conv2dNormActivation
from torchvision.transforms import v2

import optfuse

torch.manual_seed(0)
model = mobilenet_v3_small(num_classes=10)
model.features[0] = Conv2dNormActivation(1, 16, stride=1, activation_layer=nn.Hardswish)
norms = [p for p in model.parameters() if p.dim() < 2]
others = [p for p in model.parameters() if p.dim() >= 2]
groups = [{"params": others, "weight_decay": 2e-5}, {"params": norms, "weight_decay": 0.0}]
optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, fused=True)
optimizer = optfuse.fuse(optimizer)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [4])
average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
mix = v2.RandomChoice([v2.MixUp(num_classes=10), v2.CutMix(num_classes=10)])
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
loader = torch.utils.data.DataLoader(dataset, batch_size=128, shuffle=True, drop_last=True)
for i, (image, label) in enumerate(loader):
    image, target = mix(nn.functional.interpolate(image, size=32), label)
    loss = criterion(model(image), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if i % 4 == 0:
        average.update_parameters(model)

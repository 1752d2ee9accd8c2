# SPDX-License-Identifier: BSD-3-Clause
"""MONAI: its UNet and Dice loss, trained by its SupervisedTrainer, an engine of Ignite, with a
schedule."""

import torch
from monai.data import DataLoader, Dataset, create_test_image_2d
from monai.engines import SupervisedTrainer
from monai.handlers import LrScheduleHandler
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.utils import set_determinism

import optfuse

set_determinism(0)
sizes = {"rad_max": 8, "rad_min": 2, "num_seg_classes": 1, "channel_dim": 0}
images = [create_test_image_2d(32, 32, **sizes) for _ in range(32)]
named = [{"image": torch.tensor(x), "label": torch.tensor(y)} for x, y in images]
model = UNet(2, 1, 1, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
optimizer = optfuse.fuse(optimizer)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
trainer = SupervisedTrainer(
    device=torch.device("cpu"),
    max_epochs=2,
    train_data_loader=DataLoader(Dataset(named), batch_size=4, shuffle=True),
    network=model,
    optimizer=optimizer,
    loss_function=DiceLoss(sigmoid=True),
    train_handlers=[LrScheduleHandler(schedule, print_lr=False)],
)
trainer.run()

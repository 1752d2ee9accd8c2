# SPDX-License-Identifier: BSD-3-Clause
"""Ultralytics: YOLO finds rectangles that this script draws. Its trainer clips, scales losses and
averages weights."""

from pathlib import Path

import cv2
import numpy as np
import torch
from ultralytics.models.yolo.detect import DetectionTrainer

import optfuse


class Trainer(DetectionTrainer):
    def build_optimizer(self, *args, **options):
        optimizer = super().build_optimizer(*args, **options)
        for group in optimizer.param_groups:
            group["fused"] = True
        optfuse.fuse(optimizer)
        return optimizer

    def validate(self):  # by an operator of torchvision, which lacks it beside torch for CPUs
        return {}, 0.0

    def final_eval(self):
        pass


random = np.random.default_rng(0)
for kind in ("images", "labels"):
    Path("data", kind).mkdir(parents=True)
for i in range(24):
    image = random.integers(0, 60, (64, 64, 3), dtype=np.uint8)
    x, y, width, height = (int(n) for n in random.integers(12, 28, 4))
    cv2.rectangle(image, (x, y), (x + width, y + height), (200, 220, 240), -1)
    cv2.imwrite(f"data/images/{i}.png", image)
    box = (x + width / 2) / 64, (y + height / 2) / 64, width / 64, height / 64
    Path(f"data/labels/{i}.txt").write_text("0 " + " ".join(f"{n:.4f}" for n in box))
Path("data.yaml").write_text(
    f"path: {Path('data').resolve()}\ntrain: images\nval: images\nnames: {{0: rectangle}}\n"
)
torch.set_num_threads(1)
settings = {"model": "yolo11n.yaml", "data": "data.yaml", "imgsz": 64, "epochs": 2, "batch": 4}
settings |= {"optimizer": "AdamW", "lr0": 1e-3, "workers": 0, "device": "cpu", "seed": 0}
settings |= {"plots": False, "val": False, "pretrained": False, "project": "runs", "nbs": 8}
trainer = Trainer(overrides=settings)
trainer.train()
model = trainer.model

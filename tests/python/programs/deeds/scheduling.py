# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: rates by schedulers."""

import warnings

from torch.optim import lr_scheduler

from programs.deed import BEFORE_FUSE, deed
from programs.deeds.tuning import SCHEDULERS


def scheduled(world, scheduler):
    """A scheduler that has missed step() only warns."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        on_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([1.0] if on_plateau else []))
    world.see("warnings", [str(warning.message) for warning in said])
    world.see("options", [{**group, "params": 0} for group in world.optimizer().param_groups])
    world.see("epoch", getattr(scheduler, "last_epoch", 0))


@deed(kind=SCHEDULERS, kinds=("AdamW", "SGD"))
def train_by_a_scheduler(world, kind):
    scheduler = kind(world.optimizer())
    for _ in range(4):
        world.train()
        scheduled(world, scheduler)


@deed(BEFORE_FUSE, weight=0, kind=SCHEDULERS, kinds=("AdamW", "SGD"))
def scheduler_from_before_fuse(world, kind):
    scheduler = kind(world.optimizer())
    world.optimizer().register_step_post_hook(lambda *_: scheduled(world, scheduler))

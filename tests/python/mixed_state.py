# SPDX-License-Identifier: BSD-3-Clause
"""Adam and AdamW whose state is bfloat16 beside float32 parameters, as scripts make it: in a hook
before step(), which finds no state yet."""

import torch

AVERAGES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
NARROW = torch.bfloat16


def entry_of(param, amsgrad, step=0.0, dtypes=(NARROW,) * 3):
    """The step is where fused=True has it."""
    averages = zip(AVERAGES[: 2 + amsgrad], dtypes, strict=False)
    return {
        "step": torch.tensor(step, device=param.device),
        **{name: torch.zeros_like(param, dtype=dtype) for name, dtype in averages},
    }


def make_state(optimizer, *_):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and not optimizer.state[p]:
                optimizer.state[p] = entry_of(p, group["amsgrad"])


def with_narrow_state(optimizer):
    optimizer.register_step_pre_hook(make_state)
    return optimizer


def dtypes_of(optimizer):
    return {
        name: {str(entry[name].dtype) for entry in optimizer.state.values() if name in entry}
        for name in AVERAGES
    }

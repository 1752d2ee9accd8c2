# SPDX-License-Identifier: BSD-3-Clause
"""Runs the tests of this directory on a device: OPTFUSE_TEST_ON names it, "cuda"
or "fakecuda" (tests/device), and whatever they make is made there."""

import os
import re
import sys
from pathlib import Path

DEVICE = os.environ.get("OPTFUSE_TEST_ON", "")

# Tests that make no sense on a device, or can't be done on the fake one.
HOST_MEMORY = "it needs memory of the host"
OTHER_PROCESS = "the device is not set up in another process"
OTHER_THREAD = "torch.set_default_device() is for one thread"
AT_ONCE = "on a device step() leaves nothing pending"
NOT_PLAYED = "the fake device can't do it"
LEFT_OUT = {
    r"numpy|np\.asarray|share_memory|shared|unscaling_writes_no_gradient": HOST_MEMORY,
    r"atexit|pickled_optimizer_loads|data_parallel|fork": OTHER_PROCESS,
    r"in_two_threads|in_another_thread": OTHER_THREAD,
    r"another_thread_ends_no_waiting": "one thread runs all passes of a device",
    r"frameworks_may_clip": "an update on a GPU unscales, as stock's fused=True does",
    r"summary_and_flush|eager_parameters_are_never": AT_ONCE,
    r"norms_are_those_of_torch": "our own norms are for the CPU",
    r"one_scaling_a_gradient|swap_data": NOT_PLAYED,
    r"dtensor|DTensors\]|without_storage": NOT_PLAYED,
    r"storage_of_a_consumed": HOST_MEMORY,
    r"could_not_be_overwritten": "PyTorch's own error comes after a copy_ that failed there",
    r"gradients_of_layers_are_their_own\[recurrent": NOT_PLAYED,
    r"sparse|a_failure_names_its_parameter": NOT_PLAYED,
    r"holes_from_the_beginning|strides_that_come_later|group_with_holes": "of the CPU's kernels",
    r"capability": "a CPU has it",
    r"iteration_in_another_order": "times that decide of an order are a CPU's",
}

# Those that a real GPU can do.
LEFT_OUT_WHERE_IT_IS_PLAYED = {
    r"DLPack|\[(adamw-|sgd-)?data =\]": NOT_PLAYED,
    # p.data = launches nothing there.
    r"another_dtype|forward-(write|new_data|vector_to_parameters|cast_before_step)\]": NOT_PLAYED,
    r"replace_gradients_by_zeros": NOT_PLAYED,
    r"backward-change_groups\]": "RMSprop's counters are on the default device",
    r"clip_(act_and_step|step_and_act)\]": "cond of a gradient that waits: not implemented there",
    r"backward-(step_with_a_closure_that_it_ignores|notes_before_step)\]": "of classes that are "
    "left to step() on GPUs",
    r"backward-swap_tensors_before_step\]": "swap_tensors() raises there: not explained",
    r"backward-(read|read_a_gradient|change_state)\]": "long, and played in forward mode",
}

# On a GPU, which the fake one plays otherwise.
LEFT_OUT_ON_A_GPU = {
    r"\[data_ptr\]|through_address|no_gradient_is_written": HOST_MEMORY,
    r"without_folding_every_gradient_is_written": HOST_MEMORY,
    r"bfloat16_state_of_a_float32": "PyTorch takes it there from 2.12 on",
}


def use() -> None:
    """Before optfuse is imported."""
    import torch

    if DEVICE == "fakecuda":
        assert "optfuse" not in sys.modules, "it reads OPTFUSE_TEST_DEVICE when it is imported"
        os.environ["OPTFUSE_TEST_DEVICE"] = "privateuseone"
        sys.path.insert(0, str(Path(__file__).parent.parent / "device"))
        import gpu

        gpu.load()
        torch.ops.fakecuda.set_rounds_as_cuda(True)  # as programs do
    if DEVICE:
        torch.set_default_device(DEVICE)
        torch.backends.cudnn.deterministic = True  # or stock differs from itself


def settle() -> None:
    """Forgets the races between streams that the played GPU has seen."""
    if DEVICE == "fakecuda":
        import gpu

        gpu.settle()


def nothing_is_left_open() -> None:
    if DEVICE == "fakecuda":
        import gpu

        found = gpu.races()
        assert not found, "nothing puts in order:\n" + "\n".join(found)


def reason_to_skip(name: str) -> str | None:
    of_one = LEFT_OUT_ON_A_GPU if DEVICE == "cuda" else LEFT_OUT_WHERE_IT_IS_PLAYED
    left_out = LEFT_OUT | of_one
    return next((why for what, why in left_out.items() if re.search(what, name)), None)

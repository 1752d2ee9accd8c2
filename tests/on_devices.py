# SPDX-License-Identifier: BSD-3-Clause
"""Tests of tests/python that are run on a device, too: on a GPU that the CPU plays by tests/run,
on a GPU by tests/gpu/run. See tests/python/on_device.py."""

BITS = ["numerics/test_bits"]  # on a GPU only: tests/device/test_gpu_bits.py is for the played one
LAYERS = ["kfac/test_kfac", "kfac/test_kfac_training", "reorder/test_reorder"]
PROMISES = ["fuse/test_optimizer", "fuse/test_step_hooks", "fuse/test_inputs"]
PROMISES += ["fuse/test_layouts"]
PROMISES += ["programs/test_each", "backward/test_backward_mode"]
PROMISES += ["backward/test_consumed", "backward/test_overwritten", "clipping/test_clip"]
PROMISES += ["backward/test_recomputation", "backward/test_waiting", "backward/test_threads"]
PROMISES += ["amp/test_scaler"]
PROMISES += ["clipping/test_clip_memory", "clipping/test_clip_looks"]
PROMISES += ["clipping/test_clip_parameters"]
PROMISES += ["programs/test_each"]  # every deed

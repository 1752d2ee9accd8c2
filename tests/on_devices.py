# SPDX-License-Identifier: BSD-3-Clause
"""Tests of tests/python that are run on a device, too: on a GPU that the CPU plays by tests/run,
on a GPU by tests/gpu/run. See tests/python/on_device.py."""

BITS = ["numerics/test_bits"]  # on a GPU only: tests/device/test_gpu_bits.py is for the played one
LAYERS = ["kfac/test_kfac", "kfac/test_kfac_training", "reorder/test_reorder"]
PROMISES = ["fuse/test_optimizer", "programs/test_each", "clipping/test_clip", "amp/test_scaler"]
PROMISES += ["backward/test_backward_mode", "backward/test_consumed", "backward/test_threads"]
PROMISES += ["backward/test_recomputation", "backward/test_waiting", "final/test_final"]
PROMISES += ["masters/test_masters"]

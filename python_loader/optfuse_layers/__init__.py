# SPDX-License-Identifier: BSD-3-Clause
"""Beside the optimizer: layers whose weight gradients are tasks of their own (optfuse.reorder(),
optfuse.kfac(), optfuse.pipeline), and updates that arrive late."""

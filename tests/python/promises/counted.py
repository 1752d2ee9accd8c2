# SPDX-License-Identifier: BSD-3-Clause
"""Counts of an optimizer's promised gradients."""

import optfuse


def promises_of(optimizer):
    return optfuse.summary(optimizer).promised


def total(optimizer, what, shape=""):
    """shape: of the weights that count, as str() prints it; all by default."""
    layers = [layer for layer in promises_of(optimizer) if layer.label.endswith(shape)]
    return sum(getattr(layer, what) for layer in layers)

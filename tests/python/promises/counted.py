# SPDX-License-Identifier: BSD-3-Clause
"""Counts of an optimizer's promised gradients."""

import optfuse


def promises_of(optimizer):
    return optfuse.summary(optimizer).promised


def total(optimizer, what):
    return sum(getattr(layer, what) for layer in promises_of(optimizer))

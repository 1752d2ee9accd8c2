# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of linear layers that are promises (docs/promises.md)."""

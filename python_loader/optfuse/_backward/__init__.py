# SPDX-License-Identifier: BSD-3-Clause
"""Gradients in backward mode."""

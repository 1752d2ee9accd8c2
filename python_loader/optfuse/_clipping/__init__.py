# SPDX-License-Identifier: BSD-3-Clause
"""Clipping and loss scaling in forward mode."""

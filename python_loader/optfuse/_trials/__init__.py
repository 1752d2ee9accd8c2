# SPDX-License-Identifier: BSD-3-Clause
"""Trials of updates against stock, by bits."""

# SPDX-License-Identifier: BSD-3-Clause
"""Averages of weights, made with the weights' updates."""

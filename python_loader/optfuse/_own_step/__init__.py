# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers without kernels: the class's own step() on one parameter, and the trial of that."""

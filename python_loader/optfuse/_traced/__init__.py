# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers without rules of ours: what the class's own step() does is recorded on stand-ins
without data, once a step, and run as a program by the library."""

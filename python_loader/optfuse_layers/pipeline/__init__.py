# SPDX-License-Identifier: BSD-3-Clause
"""Layer pipelines: plans (plan.py), what layers cost (costs.py), charts (gantt.py), weights of
forward passes rebuilt (average.py)."""

# SPDX-License-Identifier: BSD-3-Clause
"""Layer pipelines: plans (plan.py), the costs of layers (costs.py), charts (gantt.py), runs."""

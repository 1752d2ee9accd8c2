# SPDX-License-Identifier: BSD-3-Clause
"""Callbacks for trainers that make the optimizer themselves (docs/recipes.md). Each module
imports its framework, and nothing of optfuse imports the module."""

# SPDX-License-Identifier: BSD-3-Clause
"""Wants none of its optimizers fused."""

import os

os.environ["OPTFUSE_DISABLE"] = "1"

import plain  # noqa: E402

assert "_optfuse_link" not in vars(plain.optimizer)

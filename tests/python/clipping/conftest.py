# SPDX-License-Identifier: BSD-3-Clause
from small_gradients import small_gradients_go_at_once, small_gradients_wait  # noqa: F401

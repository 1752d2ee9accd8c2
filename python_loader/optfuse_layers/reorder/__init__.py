# SPDX-License-Identifier: BSD-3-Clause
"""Out-of-order backprop."""

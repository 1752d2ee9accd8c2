# SPDX-License-Identifier: BSD-3-Clause
"""Arguments of the public functions."""

# SPDX-License-Identifier: BSD-3-Clause
"""The compiled library: where it is, its functions, its messages, the releases that it serves."""

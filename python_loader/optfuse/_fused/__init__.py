# SPDX-License-Identifier: BSD-3-Clause
"""The optimizer that fuse() makes of the user's own: its class, or the step() in its place."""

# SPDX-License-Identifier: BSD-3-Clause
"""Everything of PyTorch that is replaced, and what goes past the dispatcher."""

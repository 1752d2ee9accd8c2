# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that are DTensors."""

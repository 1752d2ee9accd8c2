# SPDX-License-Identifier: BSD-3-Clause
"""kfac(): K-FAC preconditioning, whose communication and inverses hide (SPD-KFAC)."""

# SPDX-License-Identifier: BSD-3-Clause
"""plain.py, and what its optimizer has done."""

import plain

import optfuse

try:
    print(optfuse.summary(plain.optimizer))
except optfuse.Error as error:
    print(error)

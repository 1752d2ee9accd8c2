# SPDX-License-Identifier: BSD-3-Clause
"""How the interpreter was started."""

import sys

print(sys.flags, sys._xoptions, sys.warnoptions, sys.argv)

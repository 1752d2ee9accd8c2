# SPDX-License-Identifier: BSD-3-Clause
"""Lets a module in any folder of tests be imported by its name, from wherever a test runs."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
# A package is imported by way of its own name.
FOLDERS = [path.parent for path in sorted(HERE.glob("*/*.py")) if path.name != "__init__.py"]
for folder in dict.fromkeys(FOLDERS):
    if not (folder / "__init__.py").exists() and str(folder) not in sys.path:
        sys.path.append(str(folder))

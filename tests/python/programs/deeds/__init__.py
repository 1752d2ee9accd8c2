# SPDX-License-Identifier: BSD-3-Clause
"""The deeds, one file for each topic. Importing this package fills the table."""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")

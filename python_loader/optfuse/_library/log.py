# SPDX-License-Identifier: BSD-3-Clause
"""The library's messages, in Python's logging: the logger is "optfuse", and its level decides.

OPTFUSE_LOG sets that level. Where logging has no handler, messages go to stderr."""

from __future__ import annotations

import logging
import os
import sys
import warnings

_LOGGER = logging.getLogger("optfuse")
_NAMES = ("error", "warning", "info", "debug")  # the library's levels, in its order
_LEVELS = {name: getattr(logging, name.upper()) for name in _NAMES}


def receive(level: int, text: str) -> None:
    """Takes a message of the library; on the main thread."""
    name = _NAMES[level]
    if _LOGGER.hasHandlers():
        _LOGGER.log(_LEVELS[name], text)
    elif _LOGGER.isEnabledFor(_LEVELS[name]) and sys.stderr is not None:
        sys.stderr.write(f"optfuse: {name}: {text}\n")


def configure() -> None:
    """Sets the logger's level as OPTFUSE_LOG says."""
    asked = os.environ.get("OPTFUSE_LOG", "")
    if asked in _LEVELS:
        _LOGGER.setLevel(_LEVELS[asked])
    elif asked:
        receive(1, f"OPTFUSE_LOG={asked} is not one of {', '.join(_NAMES)}")


def warn(text: str, category: type[Warning], stacklevel: int) -> None:
    """A warning of Python's, which a log that someone keeps has, too."""
    warnings.warn(f"optfuse: {text}", category, stacklevel=stacklevel + 1)
    if _LOGGER.hasHandlers():
        _LOGGER.warning(text)

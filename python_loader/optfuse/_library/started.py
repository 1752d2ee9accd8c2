# SPDX-License-Identifier: BSD-3-Clause
"""How this Python was started. It imports nothing of the package, which may not be loadable."""

from __future__ import annotations

import re
import sys

_JOINED = re.compile("-[A-Za-ln-z]*moptfuse")  # with other flags before the m


def as_command() -> bool:
    """Whether Python is looking for the package to run it as `python -m optfuse`."""
    arguments = getattr(sys, "argv", [])
    if arguments[:1] != ["-m"]:  # which it is until the module is found
        return False
    word = sys.orig_argv[-len(arguments)]
    return word == "optfuse" or _JOINED.fullmatch(word) is not None


def interpreter_flags(arguments: list[str]) -> list[str] | None:
    """The words before -m in `python FLAGS -m optfuse ARGUMENTS`; None: it was started
    otherwise."""
    own = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    if sys.orig_argv[1 + len(own) :] != arguments or not own:
        return None
    last = own.pop()
    if last == "optfuse" and own:
        last = own.pop()
    elif _JOINED.fullmatch(last):
        last = last.removesuffix("optfuse")
    if not (last.startswith("-") and last.endswith("m")) or last.startswith("--"):
        return None
    others = last[:-1]  # of -um
    return own + ([others] if others != "-" else [])

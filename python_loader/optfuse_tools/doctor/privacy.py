# SPDX-License-Identifier: BSD-3-Clause
"""Takes out of a text what says who runs it, and where."""

from __future__ import annotations

import getpass
import os
import re
import socket


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # it has no name
        return ""


def without_names(text: str) -> str:
    """Paths under the home directory begin with ~; a part of a path that is the name of the user
    or of the machine is replaced."""
    home = os.path.expanduser("~")
    for folder in sorted({home, os.path.realpath(home)}, key=len, reverse=True):
        if folder != "/":
            text = re.sub(rf"{re.escape(folder)}(?=/|\W|$)", "~", text)
    for name, shown in ((_user(), "USER"), (socket.gethostname(), "HOST")):
        if name:
            text = re.sub(rf"(?<=/){re.escape(name)}(?=/|\W|$)", shown, text)
    return text

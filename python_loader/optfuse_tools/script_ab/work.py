# SPDX-License-Identifier: BSD-3-Clause
"""The work of `python -m optfuse ab`, once its arguments are known to be right."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from optfuse_tools.ab.progress import Progress
from optfuse_tools.run.command import fuse_settings
from optfuse_tools.script_ab.child import NoRoom, Script
from optfuse_tools.script_ab.compare import compare
from optfuse_tools.script_ab.page import page
from optfuse_tools.script_ab.result import Comparison
from optfuse_tools.script_ab.runs import CannotCompare

INTERRUPTED = 130  # as a shell says of SIGINT


def work(script: Script, options: argparse.Namespace) -> int:
    """The exit status."""
    progress = Progress(None)
    try:
        compared = compare(script, options.modes, options.rounds, fuse_settings(options), progress)
    except (CannotCompare, NoRoom) as error:
        progress.clear()
        print(f"optfuse ab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        progress.clear()
    print(compared)
    if not _write(compared, options):
        return 2
    return {"differ": 1, "not compared": 2}.get(compared.weights, 0)


def _write(compared: Comparison, options: argparse.Namespace) -> bool:
    """Whether all that was asked for is there."""
    kept = True
    if options.json is not None:
        kept = keep(options.json, json.dumps(compared.to_dict(), indent=1) + "\n")
    if options.report is not None:
        kept = keep(options.report, page(compared)) and kept
    return kept


def keep(path: Path, text: str) -> bool:
    """Writes all of it, or says why not and leaves no part of it."""
    opened = False
    try:
        with path.open("w", encoding="utf-8") as stream:
            opened = True
            stream.write(text)
    except OSError as error:
        if opened and path.is_file() and not path.is_symlink():
            path.unlink()
        print(
            f"optfuse ab: {path} can't be written ({error.strerror}): make room there, or name "
            "another file, and start ab again; what is printed above holds",
            file=sys.stderr,
        )
        return False
    return True

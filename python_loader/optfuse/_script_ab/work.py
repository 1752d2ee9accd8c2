# SPDX-License-Identifier: BSD-3-Clause
"""The work of `python -m optfuse ab`, once its arguments are known to be right."""

from __future__ import annotations

import argparse
import json
import sys

from optfuse._ab.progress import Progress
from optfuse._run.command import fuse_settings
from optfuse._script_ab.child import Script
from optfuse._script_ab.compare import compare
from optfuse._script_ab.page import page
from optfuse._script_ab.result import Comparison
from optfuse._script_ab.runs import CannotCompare

INTERRUPTED = 130  # as a shell says of SIGINT


def work(script: Script, options: argparse.Namespace) -> int:
    """The exit status."""
    progress = Progress(None)
    try:
        compared = compare(script, options.modes, options.rounds, fuse_settings(options), progress)
    except CannotCompare as error:
        progress.clear()
        print(f"optfuse ab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        progress.clear()
    print(compared)
    _write(compared, options)
    return {"differ": 1, "not compared": 2}.get(compared.weights, 0)


def _write(compared: Comparison, options: argparse.Namespace) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(compared.to_dict(), indent=1) + "\n")
    if options.report is not None:
        options.report.write_text(page(compared), "utf-8")

# SPDX-License-Identifier: BSD-3-Clause
"""Runs a script as it is written, with the flags whose bits fusion has, and fused, and reports."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from optfuse._library.loader import load
from optfuse._library.started import interpreter_flags
from optfuse_tools.run.command import (
    add_fuse_options,
    add_target,
    at_least,
    environment_is_ignored,
    target_of,
)
from optfuse_tools.script_ab.child import Script

MODES = ("forward", "backward")
FEWEST_STEPS = 8


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "ab",
        help="time an unmodified script as it is and fused, and compare its weights",
        description="Runs an unmodified script several times, in fresh processes from the same "
        "seed: as written, with fused=True, and fused by optfuse. Exit status 0: compared, 1: "
        "weights differ although the script is reproducible, 2: it can't be compared, "
        "or a FILE can't be written.",
        usage="python -m optfuse ab [options] (SCRIPT | -m MODULE) [arguments of the script]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rounds", type=at_least(1, int), default=3, metavar="N", help="timed runs of each"
    )
    parser.add_argument(
        "--steps",
        type=at_least(FEWEST_STEPS, int),
        metavar="N",
        help="end the script after so many steps",
    )
    parser.add_argument(
        "--modes", type=_modes, default=MODES, metavar="MODE,...", help="forward,backward"
    )
    parser.add_argument("--seed", type=at_least(0, int), default=0, metavar="N")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write all figures there")
    parser.add_argument("--report", type=_file, metavar="FILE", help="write a page with plots")
    add_fuse_options(parser)
    add_target(parser)
    parser.set_defaults(work=_work, parser=parser)


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(dict.fromkeys(text.split(",")))
    if not set(modes) <= set(MODES):
        raise argparse.ArgumentTypeError(f"{text!r} is not of {','.join(MODES)}")
    return modes


def _file(text: str) -> Path:
    """Found out before hours of work are done."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} can't be written to; name another file")
    return path


def _why_not() -> str | None:
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        return (
            f"this is one of {os.environ['WORLD_SIZE']} processes of a launcher (WORLD_SIZE), and "
            "ab compares training in one process; start ab without a launcher"
        )
    if os.environ.get("OPTFUSE_DISABLE", "") not in ("", "0"):
        return "OPTFUSE_DISABLE leaves optimizers as they are; unset it"
    return environment_is_ignored()


def _script(options: argparse.Namespace) -> Script:
    flags = interpreter_flags(sys.argv[1:])
    if flags is None:
        options.parser.error("start it as `python -m optfuse ab`")
    name = options.script if options.is_module else os.path.basename(options.script)
    return Script(name, (*flags, *target_of(options)), options.seed, options.steps, FEWEST_STEPS)


def _work(options: argparse.Namespace) -> int:
    reason = _why_not()
    if reason is not None:
        options.parser.error(reason)
    script = _script(options)
    try:
        load()  # else the script's processes say one after the other that it can't be
        from optfuse_tools.script_ab import work
    except ImportError as error:  # of torch, or of the library, which says what to do
        print(f"optfuse: {error}", file=sys.stderr)
        return 2
    return work.work(script, options)

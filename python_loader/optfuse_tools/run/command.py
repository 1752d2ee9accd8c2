# SPDX-License-Identifier: BSD-3-Clause
"""Starts the script: the very command `python train.py`, in this process' place, with two
variables in the environment. PYTHONPATH leads Python to site/sitecustomize.py, in the children
of the script, too, and OPTFUSE_RUN says what to do there."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from optfuse._library.started import interpreter_flags

VARIABLE = "OPTFUSE_RUN"
HERE = Path(__file__).resolve().parent
SITE = str(HERE / "site")
HOME = str(HERE.parent.parent)  # where the package is


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="run an unmodified script with its optimizers fused",
        description="Runs an unmodified script, and fuses each optimizer that it makes.",
        usage="python -m optfuse run [options] (SCRIPT | -m MODULE) [arguments of the script]",
        allow_abbrev=False,
    )
    parser.add_argument("--mode", choices=("forward", "backward"), default="forward")
    parser.add_argument(
        "--max-grad-norm", type=at_least(0, float), metavar="X", help="step() first clips to this"
    )
    add_fuse_options(parser)
    said = parser.add_mutually_exclusive_group()
    said.add_argument("-q", "--quiet", action="store_true", help="say nothing on stderr")
    said.add_argument("-v", "--verbose", action="store_true", help="a line for each optimizer")
    add_target(parser)
    parser.set_defaults(work=_work, parser=parser)


def add_fuse_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of fuse() for any mode, and classes to be registered."""
    parser.add_argument(
        "--accumulate", type=at_least(1, int), default=1, metavar="N", help="backward passes a step"
    )
    parser.add_argument("--bucket-bytes", type=at_least(0, int), default=0, metavar="N")
    parser.add_argument(
        "--side-stream", action="store_true", help="backward mode's updates on a CUDA stream"
    )
    parser.add_argument("--no-fold", dest="fold", action="store_false")
    parser.add_argument(
        "--products", choices=("auto", "off"), help="whether gradients may be promises"
    )
    parser.add_argument(
        "--strict", action="store_true", help="fuse nothing that is not built with fused=True"
    )
    parser.add_argument(
        "--register",
        action="append",
        default=[],
        metavar="CLASS",
        help="register this class, such as lion_pytorch.lion_pytorch.Lion or __main__.MyAdam",
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the script and its arguments."""
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    parser.add_argument("script", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def target_of(options: argparse.Namespace) -> list[str]:
    """The script and its arguments, as its Python gets them."""
    script = ["-m", options.script] if options.is_module else [options.script]
    return [*script, *options.arguments]


def at_least(least: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    """The type of an argument."""

    def number(text: str) -> float:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{value} is not at least {least}")
        return value

    return number


def fuse_settings(options: argparse.Namespace) -> dict[str, Any]:
    """How optimizers are fused, but for the mode."""
    named = ("accumulate", "bucket_bytes", "side_stream", "fold", "strict", "products")
    chosen = {name: getattr(options, name) for name in named}
    return {"options": chosen, "register": options.register}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the script's processes."""
    settings = fuse_settings(options)
    settings["options"]["max_grad_norm"] = options.max_grad_norm
    return {
        **settings,
        "session": "optfuse_tools.run.session",
        "mode": options.mode,
        "said": 0 if options.quiet else 2 if options.verbose else 1,
        "home": HOME,
        "prefix": sys.prefix,
        "process": os.getpid(),  # which remains the same
    }


def environment_for(settings: dict[str, Any] | None) -> dict[str, str]:
    """None: nothing is to be fused."""
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    others = os.pathsep.join(path for path in paths if path != SITE)
    if settings is not None:
        environment[VARIABLE] = json.dumps(settings)
        environment["PYTHONPATH"] = SITE + (os.pathsep + others if others else "")
    return environment


def environment_is_ignored() -> str | None:
    """Why the script's Python would not find sitecustomize.py."""
    if not (sys.flags.ignore_environment or sys.flags.no_site):
        return None
    return (
        "this Python was told to ignore the environment or site-packages (-E, -I or -S), by "
        "which the script's Python learns what to fuse; leave that flag out"
    )


def _why_not(options: argparse.Namespace, disabled: bool) -> str | None:
    ignored = environment_is_ignored()
    if ignored is not None:
        return ignored
    if options.side_stream and options.mode != "backward":
        return "--side-stream goes with --mode backward"
    if options.max_grad_norm is not None and options.mode == "backward":
        return (
            "--max-grad-norm needs all gradients at once, and backward mode updates before they "
            "are there; use --mode forward"
        )
    if options.max_grad_norm is not None and disabled:
        return (
            "OPTFUSE_DISABLE leaves optimizers as they are, so nothing would clip to "
            "--max-grad-norm; unset OPTFUSE_DISABLE"
        )
    return None


def _work(options: argparse.Namespace) -> NoReturn:
    disabled = os.environ.get("OPTFUSE_DISABLE", "") not in ("", "0")
    flags = interpreter_flags(sys.argv[1:])
    reason = _why_not(options, disabled)
    if flags is None:
        reason = (
            "start it as `python -m optfuse run`; another tool goes inside, as in "
            "`python -m optfuse run -m cProfile train.py`"
        )
    if reason is not None:
        options.parser.error(reason)
    if disabled and not options.quiet:
        print("optfuse: OPTFUSE_DISABLE is set: no optimizer is fused", file=sys.stderr)
    environment = environment_for(None if disabled else settings_of(options))
    command = [sys.executable, *(flags or []), *target_of(options)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, environment)

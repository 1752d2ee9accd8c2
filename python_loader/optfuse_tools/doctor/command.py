# SPDX-License-Identifier: BSD-3-Clause
"""Prints what is here and what was checked, as one block of text for a report. Whatever can't
be loaded is a finding."""

from __future__ import annotations

import argparse
import getpass
import os
import re
import socket
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from optfuse._library import loader
from optfuse_tools.doctor.facts import environment, libraries, versions
from optfuse_tools.doctor.finding import Finding, in_words

_ADVICE = (
    "What to do stands behind each problem. To ask for help, paste the block above: it has no "
    "name of a user or of a machine."
)


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what is installed, and check that it works",
        description="Checks that optfuse works here. Exit status 0: it does, 1: it does not.",
        allow_abbrev=False,
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="with details in brackets")
    parser.set_defaults(work=_work)


def _checks() -> Iterator[Finding]:
    try:
        loader.load()  # which says what is wrong with torch or the library
        from optfuse_tools.doctor import assumptions, bits, gpus, wide_layer
    except Exception as error:
        yield Finding("loading", in_words(error), is_problem=True)
        return
    yield from assumptions.findings()
    yield from gpus.findings()
    yield from bits.findings()
    yield from wide_layer.findings()


def _findings() -> Iterator[Finding]:
    yield from versions()
    yield from libraries()
    yield from environment()
    try:
        yield from _checks()
    except Exception as error:
        yield Finding("checks", f"ended by {in_words(error)}", is_problem=True)


def _print(findings: Iterable[Finding], verbose: bool) -> int:
    """Each as soon as it is known; how many problems there are."""
    problems = 0
    for finding in findings:
        problems += finding.is_problem
        mark = "PROBLEM: " if finding.is_problem else ""
        details = f" [{finding.details}]" if verbose and finding.details else ""
        text = without_names(" ".join((finding.text + details).split()))
        print(f"{finding.name + ':':<15}{mark}{text}", flush=True)
    return problems


def _work(options: argparse.Namespace) -> int:
    began = time.perf_counter()
    print("---- optfuse doctor ----")
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # versions() says so
    problems = _print(_findings(), options.verbose)
    verdict = {0: "optfuse works here", 1: "1 problem"}.get(problems, f"{problems} problems")
    print(f"{'verdict:':<15}{verdict}, after {time.perf_counter() - began:.1f} s")
    print("---- end ----")
    if problems:
        print(_ADVICE)
    return int(problems > 0)


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

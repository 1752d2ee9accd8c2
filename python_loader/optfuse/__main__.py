# SPDX-License-Identifier: BSD-3-Clause
"""`python -m optfuse`: its commands. Neither torch nor the library is loaded here."""

from __future__ import annotations

import argparse
import sys

from optfuse import _names


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m optfuse",
        description="Optimizer fusion for PyTorch (docs/using.md).",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _names.commands():
        command.add_to(commands)
    options = parser.parse_args(arguments)
    return int(options.work(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

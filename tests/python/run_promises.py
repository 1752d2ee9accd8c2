#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Random linear layers whose gradients are promises, beside stock; see promises/generated.py.

python tests/python/run_promises.py --programs 3000 --seed 1
python tests/python/run_promises.py --programs 3000 --seed 1 --hooks --large"""

import argparse
import os
import sys

import common  # noqa: F401 - lets folders be imported


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="of the first program")
    parser.add_argument("--hooks", action="store_true", help="hooks of all kinds, and graphs")
    parser.add_argument("--large", action="store_true", help="with --hooks: nothing is forced")
    options = parser.parse_args()
    os.environ["OPTFUSE_PRODUCTS"] = "auto" if options.large else "force"
    from promises.generated import play

    for name, n in sorted(play(options.seed, options.programs, options.hooks).items()):
        if name:
            print(f"{n:8} {name}")


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Random training programs with stock and with fused optimizers; see programs/.

python tests/python/run_programs.py --programs 20000 --seed 1

With OPTFUSE_TEST_ON=cuda whatever they make is made on a GPU."""

import argparse
import sys

import on_device

on_device.use()

from programs import hazards  # noqa: E402 - imports optfuse
from programs.deed import DEEDS  # noqa: E402
from programs.play import MODES  # noqa: E402
from programs.runner import explain, prepare, run  # noqa: E402

ENDS = ("equal", "raised", "outside", "autograd")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="of the first program")
    parser.add_argument("--actions", action="store_true", help="print the counts of each deed")
    parser.add_argument(
        "--hazards", action="store_true", help="print outcomes into docs/hazards.md"
    )
    parser.add_argument("--shrink", type=int, default=5, help="how many failures to shrink")
    return parser.parse_args()


def print_ends(tally):
    print(f"{tally.programs} programs")
    for mode in MODES:
        counts = ", ".join(f"{tally.ends[mode, end]} {end}" for end in ENDS)
        print(f"{mode:9} {counts}")


def print_actions(tally):
    print(f"\n{'deed':32} " + "".join(f"{mode + ': went on':>20} {'ended':>7}" for mode in MODES))
    for name in ("setup", *sorted(DEEDS)):
        row = f"{name:32} "
        for mode in MODES:
            ended = sum(tally.ended[mode, name, end] for end in ENDS)
            row += f"{tally.played[mode, name]:>20} {ended:>7}"
        print(row)


def progress(tally):
    print(f"\r{tally.programs} programs, {len(tally.failures)} failures", end="", file=sys.stderr)


def main():
    options = arguments()
    if options.hazards:
        return hazards.print_page()
    prepare()
    tally = run(options.seed, options.programs, progress)
    print(file=sys.stderr)
    print_ends(tally)
    if options.actions:
        print_actions(tally)
    for failure in tally.failures[: options.shrink]:
        print(f"\n{explain(failure)}", flush=True)
    for failure in tally.failures[options.shrink :]:
        print(f"seed {failure.seed}, {failure.mode}: {failure.what}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())

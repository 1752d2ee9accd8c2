# SPDX-License-Identifier: BSD-3-Clause
"""The releases of PyTorch: those that optfuse is tested with, and for which of them an
update is known to have stock's bits.

The one place for both. It imports nothing of ours: tests/bootstrap.py reads it by itself, and
tests/structure compares it with the build and the documents."""

import platform

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")

#: The first release whose fused=True of Adam and AdamW takes bfloat16 state of float32 parameters
#: on a GPU.
TAKES_MIXED = "2.12"

#: By rule and dtype, the last release that rounds like our update; of others TESTED[-1].
#: (docs/numerics.md, "Releases")
_LAST: dict[tuple[str, str], str] = {
    ("adagrad", "bfloat16"): "2.13",
    ("adagrad", "float16"): "2.13",
    ("sgd", "bfloat16"): "2.13",
    ("sgd", "float16"): "2.13",
}


def release_of(version: str) -> str:
    """The release of a version such as 2.13.0+cpu."""
    return ".".join(version.split("+")[0].split(".")[:2])


def is_too_old(release: str) -> bool:
    return _numbers(release) < _numbers(TESTED[0])


def takes_mixed(release: str) -> bool:
    return _numbers(release) >= _numbers(TAKES_MIXED)


def holds(rule: str, dtype: str, release: str, machine: str = platform.machine()) -> bool:
    """Whether this rule's update is known to have the bits of that release. On another processor
    than x86-64 none is: its build of PyTorch rounds in ways of its own."""
    last = _LAST.get((rule, dtype), TESTED[-1])
    known = release in TESTED and _numbers(release) <= _numbers(last)
    return known and machine == "x86_64"


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))

# SPDX-License-Identifier: BSD-3-Clause
"""One line of what doctor prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    name: str
    text: str
    is_problem: bool = False
    details: str = ""  # for --verbose


def in_words(error: BaseException) -> str:
    """The loader's errors are sentences; of others the type matters, too."""
    text = str(error)
    return text if text.startswith("optfuse") else f"{type(error).__name__}: {text}"

# SPDX-License-Identifier: BSD-3-Clause
"""The machine, for whoever reads a report later. It imports neither torch nor the library."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else 'unknown'}, {os.cpu_count()} logical cores"


def date() -> str:
    return datetime.now().astimezone().isoformat(" ", "minutes")

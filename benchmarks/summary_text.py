# SPDX-License-Identifier: BSD-3-Clause
"""The text of a summary in results/. Needs nothing but Python."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any


def as_text(value: Any) -> str:
    """JSON with five digits. On one line: a list of numbers, an object that has only numbers and
    such lists, and what has one level of these in it."""
    text = json.dumps(value, indent=1, default=asdict)
    text = re.sub(r"-?\d+\.\d{5,}(e-?\d+)?", lambda m: f"{float(m[0]):.5g}", text)
    listing = r"\[[^{}\[\]]*\]"
    holding = r"\{(?:[^{}\[\]]|\[[^{}\[\]\n]*\])*\}"
    flat = r"[{\[](?:[^{}\[\]]|\{[^{}\[\]\n]*\})*[}\]]"
    for pattern in (listing, holding, flat):
        text = re.sub(pattern, lambda m: " ".join(m[0].split()), text)
    return text

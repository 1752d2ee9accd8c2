# SPDX-License-Identifier: BSD-3-Clause
"""The text of a summary in results/. Needs nothing but Python."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any


def as_text(value: Any) -> str:
    """JSON with five digits, and what has at most one level of others in it on one line."""
    text = json.dumps(value, indent=1, default=asdict)
    text = re.sub(r"-?\d+\.\d{5,}(e-?\d+)?", lambda m: f"{float(m[0]):.5g}", text)
    flat = r"[{\[](?:[^{}\[\]]|\{[^{}\[\]\n]*\})*[}\]]"
    for pattern in (r"\{[^{}\[\]]*\}", flat):
        text = re.sub(pattern, lambda m: " ".join(m[0].split()), text)
    return text

# SPDX-License-Identifier: BSD-3-Clause
"""The models of the GPU benchmark have the sizes of their papers, and take its
batches. On the meta device, which needs neither memory nor time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
IMAGES, WORDS = "torch.zeros(2, 3, 224, 224)", "torch.zeros(2, 128, dtype=torch.int64)"
#: Name, batch and parameters; of the image models with ten classes instead of a thousand.
MODELS = {
    "MobileNetV2": (IMAGES, 2_236_682),
    "ResNet-50": (IMAGES, 23_528_522),
    "ViT-S": (IMAGES, 21_669_514),
    "GPT-2": (WORDS, 124_439_808),
}
CODE = """
import sys, torch
from cells import MODELS

for name, batch in zip(sys.argv[1::2], sys.argv[2::2]):
    with torch.device("meta"):
        model = MODELS[name]()
        model(eval(batch)).sum().backward()
    parameters = dict(model.named_parameters())
    missing = [n for n, p in parameters.items() if p.grad is None]
    print(name, sum(p.numel() for p in parameters.values()), *missing)
"""


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    named = [text for name, (batch, _) in MODELS.items() for text in (name, batch)]
    command = [sys.executable, "-c", CODE, *named]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_its_size_and_trains(name: str, found: dict[str, list[str]]) -> None:
    count, *missing = found[name]
    assert int(count) == MODELS[name][1]
    assert not missing, f"no gradient reaches {missing}"

# SPDX-License-Identifier: BSD-3-Clause
"""The rows of docs/works-with.md: a package, what pip installs for it, and the script that trains
with it. A script is in this folder, or one of docs/recipes.md."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "python" / "recipes"))


@dataclass(frozen=True)
class Remedy:
    """With which backward mode trains where it raises without."""

    says: str
    words: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """packages: what pip installs; the version of the first is written down
    differs: why backward mode trains otherwise"""

    title: str
    packages: str = ""
    script: str = ""
    words: tuple[str, ...] = ()
    remedy: Remedy | None = None
    recipe: str = ""
    differs: str = ""


DIGITS = "scikit-learn"
TRAINER = ("--output_dir=out", "--max_steps=12", "--report_to=none", "--use_cpu")
UNCLIPPED = Remedy("without `clip_grad`", ("--clip", "0"))
ROWS = [
    Row("pytorch/examples", DIGITS, "examples.py", recipe="pytorchexamples"),
    Row(
        "nanoGPT's loop",
        "",
        "nanogpt.py",
        remedy=Remedy("`Backward(accumulate=2)`, no clipping", ("--clip", "0"), {"accumulate": 2}),
        recipe="nanogpt",
    ),
    Row(
        "HF Trainer",
        "transformers accelerate",
        "with_trainer.py",
        (*TRAINER, "--disable_tqdm=1"),
        recipe="hugging-face-trainer",
    ),
    Row(
        "Accelerate",
        f"accelerate {DIGITS}",
        "with_accelerate.py",
        remedy=Remedy("`Backward(accumulate=2)`, no clipping", ("--clip", "0"), {"accumulate": 2}),
        recipe="accelerate",
    ),
    Row(
        "Lightning",
        f"lightning {DIGITS}",
        "with_lightning.py",
        recipe="lightning",
    ),
    Row("timm", f"timm torchvision {DIGITS}", "with_timm.py", recipe="timm"),
    Row("torchvision references", f"torchvision {DIGITS}", "with_torchvision.py"),
    Row("PEFT, LoRA", "peft transformers", "with_peft.py"),
    Row("TRL", "trl", "with_trl.py"),
    Row(
        "torchtune's loop",
        "torchtune torchao==0.15.0",
        "with_torchtune.py",
        remedy=Remedy(
            "`Backward(accumulate=2)`, no scaling by tokens", ("--clip", "0"), {"accumulate": 2}
        ),
    ),
    Row("skorch", f"skorch {DIGITS}", "with_skorch.py"),
    Row("Stable-Baselines3, PPO", "stable-baselines3", "with_sb3.py"),
    Row("Stable-Baselines3, SAC", "stable-baselines3", "with_sb3_sac.py"),
    Row("Ultralytics", "ultralytics", "with_ultralytics.py"),
    Row(
        "TabNet",
        f"pytorch-tabnet pandas {DIGITS}",
        "with_tabnet.py",
        remedy=Remedy("`clip_value=None`", ("--clip", "0")),
    ),
    Row("GPyTorch", "gpytorch", "with_gpytorch.py"),
    Row(
        "BoTorch",
        "botorch",
        "with_botorch.py",
        differs="a fit ends with a `backward()` that no `step()` follows",
    ),
    Row("Pyro", "pyro-ppl", "with_pyro.py"),
    Row("normflows", "normflows", "with_normflows.py"),
    Row("Opacus", f"opacus {DIGITS}", "with_opacus.py"),
    Row("gsplat", "gsplat", "with_gsplat.py"),
    Row("MMEngine", f"mmengine {DIGITS}", "with_mmengine.py", remedy=UNCLIPPED),
    Row("fairscale, OSS", f"fairscale {DIGITS}", "with_fairscale.py"),
    Row("fastai", f"fastai {DIGITS}", "with_fastai.py"),
    Row("PyTorch Geometric", "torch-geometric", "with_geometric.py"),
    Row("MONAI's trainer", "monai pytorch-ignite", "with_monai.py"),
    Row(
        "DeepSpeed",
        f"deepspeed {DIGITS}",
        "with_deepspeed.py",
    ),
]


def code_of(row: Row) -> str:
    from script_variants import SCRIPTS

    return SCRIPTS.get(row.script) or (ROOT / "tests" / "works_with" / row.script).read_text(
        "utf-8"
    )

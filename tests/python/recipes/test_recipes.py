# SPDX-License-Identifier: BSD-3-Clause
"""The scripts of docs/recipes.md, as they stand there and without the lines that say optfuse: the
same losses, weights and optimizer state, bit by bit."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from common import HAS_PYTHON_H
from script_variants import SCRIPTS, variant
from several import run_script

HERE = Path(__file__).parent
TORCHVISION = Path(sys.prefix) / "torchvision"  # as tests/bootstrap.py installs it
TRAINER = ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2")


@dataclass
class Result:
    updates: list
    losses: list
    trained: dict


def skip_without(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if "timm" in packages and not TORCHVISION.is_dir():
        missing.append("torchvision")
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; tests/run does so, where there is PyPI")


class Recipe:
    """The runs of a script, all by one process."""

    def __init__(self, script, directory, *modules):
        skip_without(*(module.partition(".")[0] for module in modules))
        self.script, self.directory, self.modules, self.jobs = script, directory, modules, {}

    def add(self, name, mode, *arguments, **options):
        """A run, in a directory of this name."""
        where = self.directory / name
        where.mkdir()
        for script, code in SCRIPTS.items():
            mine = variant(code, mode, **options) if script == self.script else code
            (where / script).write_text(mine, "utf-8")
        job = {"script": str(where / self.script), "arguments": arguments}
        self.jobs[name] = {**job, "result": str(where / "result.pickle")}

    def run(self):
        told = self.directory / "jobs.json"
        told.write_text(json.dumps({"jobs": [*self.jobs.values()], "modules": self.modules}))
        beside = f"sys.path.insert(1, {str(TORCHVISION)!r})" if "timm" in self.modules else ""
        done = run_script([HERE / "drive.py", told], first=beside, timeout=300, HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stdout + done.stderr
        for name, job in self.jobs.items():
            found = Result(**pickle.loads(Path(job["result"]).read_bytes()))
            assert found.losses and found.trained, "nothing was trained"
            setattr(self, name, found)
        return self


def check(stock, fused, mode, tail=False):
    """tail: this run has gone on from a checkpoint."""
    assert [found[0] for found in stock.updates] == ["stock"]
    ((found, created, in_step),) = fused.updates
    assert found == mode and created > 0
    assert in_step < created // 2, "most updates ran in step()"
    assert_same(stock, fused, tail)


def assert_same(stock, other, tail=False):
    losses = stock.losses[-len(other.losses) :] if tail else stock.losses
    assert len(other.losses) < len(stock.losses) or not tail
    assert losses == other.losses, "losses differ"
    assert stock.trained.keys() == other.trained.keys()
    wrong = [name for name, value in stock.trained.items() if other.trained[name] != value]
    assert not wrong, f"other bits: {wrong}"


def test_each_script_has_two_lines_more_than_stock():
    assert len(SCRIPTS) == 7
    for name, code in SCRIPTS.items():
        lines = [line for line in code.splitlines() if "optfuse" in line.lower()]
        assert len(lines) == (0 if name == "digits.py" else 2), name
        compile(variant(code, "stock"), name, "exec")


def test_a_difference_is_found():
    bits = Result([], [b"1", b"2"], {"weight": b"3"})
    assert_same(bits, Result([], [b"2"], {"weight": b"3"}), tail=True)
    with pytest.raises(AssertionError, match="losses differ"):
        assert_same(bits, Result([], [b"1", b"3"], {"weight": b"3"}))
    with pytest.raises(AssertionError, match="other bits: .*weight"):
        assert_same(bits, Result([], [b"1", b"2"], {"weight": b"4"}))


def test_a_loop(tmp_path):
    recipe = Recipe("examples.py", tmp_path, "sklearn.datasets")
    for mode in ("stock", "forward", "backward"):
        recipe.add(mode, mode)
    recipe.run()
    check(recipe.stock, recipe.forward, "forward")
    check(recipe.stock, recipe.backward, "backward")


def test_nanogpt(tmp_path):
    recipe = Recipe("nanogpt.py", tmp_path)
    recipe.add("stock", "stock")
    recipe.add("forward", "forward")
    checkpoint = tmp_path / "forward" / "nanogpt.pt"
    for name, mode in (("resumed", "forward"), ("resumed_by_stock", "stock")):
        recipe.add(name, mode, "--resume")
        (tmp_path / name / "nanogpt.pt").symlink_to(checkpoint)
    recipe.add("stock_unclipped", "stock", "--clip", "0", "--dtype", "bfloat16")
    recipe.add("backward", "backward", "--clip", "0", "--dtype", "bfloat16", accumulate=2)
    recipe.add("stock_scaled", "stock", "--dtype", "float16")
    recipe.add("scaled", "forward", "--dtype", "float16")
    recipe.run()
    check(recipe.stock, recipe.forward, "forward")
    check(recipe.stock, recipe.resumed, "forward", tail=True)
    assert_same(recipe.stock, recipe.resumed_by_stock, tail=True)
    check(recipe.stock_unclipped, recipe.backward, "backward")
    check(recipe.stock_scaled, recipe.scaled, "forward")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_PYTHON_H, reason="inductor needs Python's headers: install python3-dev")
def test_nanogpt_compiled(tmp_path):
    recipe = Recipe("nanogpt.py", tmp_path)
    for mode in ("stock", "forward"):
        recipe.add(mode, mode, "--steps", "4", "--compile")
    recipe.run()
    check(recipe.stock, recipe.forward, "forward")


def test_trainer(tmp_path):
    recipe = Recipe("with_trainer.py", tmp_path, "accelerate", "transformers", *TRAINER)
    words = ["--output_dir=out", "--max_steps=10", "--save_steps=5", "--report_to=none"]
    words += ["--use_cpu", "--disable_tqdm=1", "--gradient_accumulation_steps=2"]
    checkpoint = ("--resume_from_checkpoint", str(tmp_path / "forward" / "out" / "checkpoint-5"))
    recipe.add("stock", "stock", *words)
    recipe.add("forward", "forward", *words)
    recipe.add("resumed", "forward", *words, *checkpoint)
    recipe.add("resumed_by_stock", "stock", *words, *checkpoint)
    words += ["--max_grad_norm=0", "--bf16=1"]
    recipe.add("stock_bfloat16", "stock", *words)
    recipe.add("bfloat16", "forward", *words)
    recipe.run()
    check(recipe.stock, recipe.forward, "forward")
    check(recipe.stock, recipe.resumed, "forward", tail=True)
    assert_same(recipe.stock, recipe.resumed_by_stock, tail=True)
    check(recipe.stock_bfloat16, recipe.bfloat16, "forward")


def test_accelerate(tmp_path):
    recipe = Recipe("with_accelerate.py", tmp_path, "accelerate", "sklearn.datasets")
    recipe.add("stock", "stock")
    recipe.add("forward", "forward")
    recipe.add("stock_unclipped", "stock", "--clip", "0", "--precision", "bf16")
    recipe.add("backward", "backward", "--clip", "0", "--precision", "bf16", accumulate=2)
    recipe.run()
    check(recipe.stock, recipe.forward, "forward")
    check(recipe.stock_unclipped, recipe.backward, "backward")
    saved = [tmp_path / mode / "accelerated" / "optimizer.bin" for mode in ("stock", "forward")]
    assert saved[0].read_bytes() == saved[1].read_bytes()


def test_lightning(tmp_path):
    recipe = Recipe("with_lightning.py", tmp_path, "lightning.pytorch", "sklearn.datasets")
    checkpoint = tmp_path / "forward_half" / "checkpoints" / "epoch=0-step=15.ckpt"
    recipe.add("stock", "stock", "--clip", "0.5")
    recipe.add("forward", "forward", "--clip", "0.5")
    recipe.add("forward_half", "forward", "--clip", "0.5", "--epochs", "1")
    recipe.add("resumed", "forward", "--clip", "0.5", "--resume", str(checkpoint))
    recipe.add("resumed_by_stock", "stock", "--clip", "0.5", "--resume", str(checkpoint))
    for name, mode in (("stock_bfloat16", "stock"), ("backward_bfloat16", "backward")):
        recipe.add(name, mode, "--precision", "bf16-mixed")
    recipe.run()
    check(recipe.stock, recipe.forward, "forward")
    check(recipe.stock, recipe.resumed, "forward", tail=True)
    assert_same(recipe.stock, recipe.resumed_by_stock, tail=True)
    check(recipe.stock_bfloat16, recipe.backward_bfloat16, "backward")


def test_timm(tmp_path):
    recipe = Recipe("with_timm.py", tmp_path, "timm", "sklearn.datasets")
    for mode in ("stock", "forward", "backward"):
        recipe.add(mode, mode)
    recipe.run()
    check(recipe.stock, recipe.forward, "forward")
    check(recipe.stock, recipe.backward, "backward")


@pytest.mark.parametrize("package", ["accelerate", "lightning", "transformers"])
def test_wrappers_and_callbacks(package):
    skip_without(package)
    done = run_script([HERE / "wrappers.py", package])
    assert done.returncode == 0 and done.stdout.endswith("as stock\n"), done.stdout + done.stderr

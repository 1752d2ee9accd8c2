# SPDX-License-Identifier: BSD-3-Clause
"""Kernels for GPUs are in a library of their own. One whose options are in another order
than the core's is refused when it is loaded."""

import os
from pathlib import Path

import pytest
from common import python

OPTIONS = b" lr beta1 beta2 eps weight_decay"
SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import gpu
gpu.load()
import torch, optfuse
p = torch.ones(4, device=gpu.NAME, requires_grad=True)
optimizer = optfuse.fuse(torch.optim.AdamW([p], fused=True))
p.grad = torch.ones_like(p)
optimizer.step()
print("updated", float(p.detach().cpu()[0]) != 1.0)
"""


def update_with(library):
    script = SCRIPT.format(folder=str(Path(__file__).parent))
    return python(script, OPTFUSE_CUDA_LIBRARY=str(library))


@pytest.mark.parametrize("swapped", [False, True])
def test_a_swapped_option_is_refused(swapped, tmp_path):
    code = Path(os.environ["OPTFUSE_CUDA_LIBRARY"]).read_bytes()
    row = b"adam:FUSED:COUNTED: exp_avg exp_avg_sq max_exp_avg_sq:" + OPTIONS
    assert row in code, "the library has no such row"
    changed = tmp_path / "kernels.so"
    other = row.replace(b"beta1 beta2", b"beta2 beta1") if swapped else row
    changed.write_bytes(code.replace(row, other))
    done = update_with(changed)
    if swapped:
        assert done.returncode != 0
        assert "has another table of optimizers" in done.stderr, done.stderr
        assert "lr beta2 beta1" in done.stderr and "rebuild both together" in done.stderr
    else:
        assert done.stdout.strip() == "updated True", done.stderr

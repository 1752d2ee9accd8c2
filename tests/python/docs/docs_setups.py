# SPDX-License-Identifier: BSD-3-Clause
"""The lines that come before each Python block of the docs, by the first line of the block. Names
that are in none of them a block defines itself."""

#: For every block.
ALL = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import optfuse

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())))
optimizer = opt = torch.optim.AdamW(model.parameters())
x = images = torch.randn(8, 16)
loss_fn = lambda y: y.square().mean()
"""

_ONE_PROCESS = "from torch.nn.parallel import DistributedDataParallel\nNet = lambda: model\n"
_READY = "opt = optfuse.fuse(opt)\nloss_fn(model(x)).backward()\n"
_SCALER = "scaler = torch.amp.GradScaler('cpu')\nloss = loss_fn(model(x))\n"
_PIPELINE = """
import torch.distributed as dist
dist.init_process_group("gloo")
loss_fn = nn.MSELoss()
inputs, targets = ([torch.randn(8, 16) for _ in range(4)] for _ in range(2))
"""
_BATCHES = """
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

def make_batches():
    while True:
        yield torch.randn(8, 64), torch.randint(4, (8,))
"""
_ANY = """
class AnyOptimizer(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])
"""
_BLOCKS = """
from torch.distributed.fsdp import fully_shard
model.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
"""

_NAMED = """
model = nn.Sequential()
model.fc1, model.head = nn.Linear(16, 16), nn.Linear(16, 4)
"""

SETUPS = {
    "opt = torch.optim.AdamW(model.parameters(), lr=3e-4)": "",
    "opt = optfuse.fuse(torch.optim.AdamW(model.parameters()))": "",
    "optfuse.clip_grad_norm_(opt, 1.0)": _READY,
    "scaler.scale(loss).backward()": _READY + _SCALER,
    "opt = optfuse.fuse(opt, optfuse.Backward(accumulate=4))": "",
    "change = grad.sub(previous) if t > 1 else torch.zeros_like(grad)": "grad, previous, "
    "exp_avg_diff = torch.randn(3, 5)\nt, beta2 = 2, 0.9\n",
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)": "",
    "import optfuse": "layers = list(model)\n",
    "delay = {model[0]: 4, model[2]: 2}": "",
    'reordering = optfuse.reorder(model, "reverse_first", k=8)': "",
    "optfuse.reorder(model, side_stream=True)": "",
    'optfuse.reorder(model, "last", side_stream=["head", "fc1"])': _NAMED,
    "opt = optfuse.fuse(AnyOptimizer(model.parameters(), lr=1e-3))": _ANY,
    "def build(wrap):": _BATCHES,
    "model = DistributedDataParallel(Net())": _ONE_PROCESS,
    "opt = optfuse.fuse(torch.optim.AdamW(model.parameters()), optfuse.Forward(ddp=model))": (
        _ONE_PROCESS + "model = DistributedDataParallel(model)\n"
    ),
    "for block in model.blocks:": _BLOCKS,
}
#: Started by torchrun, on each of two processes.
ON_TWO = {'plan = optfuse.pipeline.plan(model, images, 2, "layerpipe")': _PIPELINE}
#: Blocks, or pages of blocks, that run elsewhere, and where.
ELSEWHERE = {
    "import torch": "tests/python/distributed/test_example.py",
    "docs/recipes.md": "tests/python/recipes",
}
#: Blocks whose paragraphs are examples of their own.
APART = ("optfuse.clip_grad_norm_(opt, 1.0)", "optfuse.reorder(model, side_stream=True)")

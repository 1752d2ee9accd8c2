# SPDX-License-Identifier: BSD-3-Clause
"""Runs under emulation: 20 steps of an MLP, a conv net and a transformer by four optimizers, in
both modes, beside stock with the flags whose bits fusion has. Fails if a bit differs, or if no
kernel of ours ran."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import optfuse
from optfuse_tools.ab.result import equal_bits

STEPS = 20
Make = Callable[[list[nn.Parameter]], Optimizer]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(40, 24), nn.Embedding(12, 24)
        self.block = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
        self.out = nn.Linear(24, 40)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        y: Tensor = self.out(self.block(x))
        return y


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(19, 37), nn.ReLU(), nn.Linear(37, 21), nn.Tanh(), nn.Linear(21, 5)
    )


def conv() -> nn.Module:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), head)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(7, 19)),
    "conv": (conv, lambda: torch.randn(4, 3, 9, 9)),
    "gpt": (Transformer, lambda: torch.randint(40, (3, 11))),
}
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, foreach=False),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-3, foreach=False),
}


def trained(model: str, make: Make, mode: str | None) -> tuple[list[Tensor], str]:
    """Parameters and state, and the instruction set of the kernels."""
    torch.manual_seed(0)
    build, batch = MODELS[model]
    net = build()
    optimizer = make(list(net.parameters()))
    if mode is not None:
        optimizer = optfuse.fuse(optimizer, mode=mode)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(batch()).square().mean().backward()
        optimizer.step()
    optfuse.flush()
    isa = "" if mode is None else optfuse.summary(optimizer).isa.get("float32", "")
    state = [optimizer.state[p][key] for p in net.parameters() for key in optimizer.state[p]]
    return [*(p.detach() for p in net.parameters()), *filter(torch.is_tensor, state)], isa


def main() -> int:
    print(torch.__version__, torch.backends.cpu.get_cpu_capability(), flush=True)
    failed = 0
    for model in MODELS:
        for name, make in OPTIMIZERS.items():
            stock, _ = trained(model, make, None)
            for mode in ("forward", "backward"):
                fused, isa = trained(model, make, mode)
                equal = equal_bits(fused, stock)
                failed += not (equal and isa)
                verdict = "equal" if equal else "DIFFERENT"
                print(f"{model} {name} {mode}: {verdict}, {isa or 'NO KERNELS'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())

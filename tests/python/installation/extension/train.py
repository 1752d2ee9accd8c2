# SPDX-License-Identifier: BSD-3-Clause
"""Programs of test_extension.py, one function a process: Python's optfuse and an extension in C++
that includes optfuse.hpp. The first argument is the function, the second the extension."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

EXTENSION = sys.argv[2]


def libraries() -> list[str]:
    maps = Path("/proc/self/maps").read_text()
    return sorted({line.split()[-1] for line in maps.splitlines() if "liboptfuse_torch" in line})


def load() -> None:
    torch.ops.load_library(EXTENSION)


def params() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, requires_grad=True) for n in (40, 7)]


def backward(some: list[torch.Tensor]) -> None:
    sum((p.sin() * p).sum() for p in some).backward()


class InCxx:
    """The extension's optimizer."""

    def __init__(self, some: list[torch.Tensor], lr: float, mode: str = "forward") -> None:
        self.it = torch.ops.both.fuse(some, lr, mode == "backward")

    def step(self) -> None:
        torch.ops.both.step(self.it)

    def zero_grad(self) -> None:
        torch.ops.both.zero_grad(self.it)

    def pending(self) -> int:
        return torch.ops.both.pending(self.it)


def adamw(some: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(some, lr=lr, fused=True)


def refused(what: str, work) -> None:
    try:
        work()
    except RuntimeError as error:
        assert what in str(error), error
    else:
        raise AssertionError(f"nothing says {what}")


def train(first, second, shared: list[torch.Tensor]) -> list[torch.Tensor]:
    """Two optimizers over the same parameters, which step in turns."""
    for _ in range(6):
        for optimizer in (first, second):
            optimizer.zero_grad()
            backward(shared)
            optimizer.step()
    return [p.detach().clone() for p in shared]


def check_both() -> None:
    import optfuse

    assert len(libraries()) == 1, libraries()
    expected, shared = params(), params()
    stock = train(adamw(expected, 1e-2), adamw(expected, 3e-3), expected)
    python, cxx = optfuse.fuse(adamw(shared, 1e-2)), InCxx(shared, 3e-3)
    assert all(map(torch.equal, train(python, cxx, shared), stock)), "the bits of two stock ones"
    for launch in (shared[0].data_ptr, optfuse.flush):
        backward(shared)
        cxx.step()
        assert cxx.pending() == 2, "updates of C++ are pending after step()"
        launch()
        assert cxx.pending() == 0, f"Python's {launch.__name__}() launches them"


def python_first() -> None:
    import optfuse

    path = optfuse._library.loader.here()
    load()
    assert libraries() == [str(path.resolve())], libraries()
    check_both()
    in_both_worlds()


def extension_first() -> None:
    load()
    (before,) = libraries()
    check_both()
    assert libraries() == [before]


def alone() -> None:
    """Without Python's part, errors are those of C++, and a raw access is refused."""
    load()
    shared = params()
    cxx = InCxx(shared, 1e-2)
    for _ in range(2):
        backward(shared)
        cxx.step()
    refused("Cannot access data pointer of Storage", shared[0].data_ptr)
    later = InCxx(shared, 1e-2, "backward")
    backward(shared)
    refused("after backward() with optfuse::Mode::forward", lambda: shared[0].grad.sum())
    later.step()


def in_both_worlds() -> None:
    import optfuse

    message = "parameter 0 of group 0 of shape {} already belongs to another optimizer in backward"
    shared = params()
    python = optfuse.fuse(adamw(shared, 1e-2), mode="backward")
    refused(message.format("[40]"), lambda: InCxx(shared, 1e-2, "backward"))
    optfuse.unfuse(python)
    cxx = InCxx(shared, 1e-2, "backward")
    refused(message.format("(40,)"), lambda: optfuse.fuse(adamw(shared, 1e-2), mode="backward"))
    backward(shared)
    refused("has already applied it", lambda: shared[0].grad.sum())
    cxx.step()
    torch.ops.both.free(cxx.it)
    optfuse.fuse(adamw(shared, 1e-2), mode="backward")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("done")

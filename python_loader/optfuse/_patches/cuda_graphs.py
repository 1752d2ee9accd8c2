# SPDX-License-Identifier: BSD-3-Clause
"""CUDA graphs record and replay raw memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from optfuse._library.bindings import guard
from optfuse._patches.listed import GRAPH_HANDLES
from optfuse._patches.replacing import replace


def install(flush_all: Callable[[], None], drain_all: Callable[[], None]) -> None:
    """Once per process. What is pending is launched before a graph is captured
    or replayed; what is still running when a capture begins is waited for,
    because a graph can't depend on it."""
    graphs = [getattr(torch.accelerator, "Graph", None)]  # from torch 2.12 on
    if torch.backends.cuda.is_built():
        graphs.append(torch.cuda.CUDAGraph)
    for graph in filter(None, graphs):
        wrap(graph, "capture_begin", drain_all)
        wrap(graph, "capture_end", flush_all, anyway=True)
        wrap(graph, "replay", flush_all)
        watch_handles(graph, flush_all)


_handed_out = False  # a graph's handle, ever


def watch_handles(graph: type, flush_all: Callable[[], None]) -> None:
    """Watches for graphs whose handle is given away: its holder can launch the graph by CUDA's own
    functions."""

    def note() -> None:
        global _handed_out
        _handed_out = True
        flush_all()

    for name in GRAPH_HANDLES:
        if hasattr(graph, name):
            wrap(graph, name, note)


def replays_are_unseen() -> bool:
    """Then nothing may be left pending."""
    return _handed_out


def wrap(owner: type, name: str, before: Callable[[], None], anyway: bool = False) -> None:
    """Puts a call before a method of a class. anyway: the method is called even
    if the call raises; else the stream would be captured for ever."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def launch_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if guard("graphs"):
                before()
        except BaseException:
            if anyway:
                method(self, *args, **kwargs)
            raise
        return method(self, *args, **kwargs)

    replace(owner, name, launch_first)

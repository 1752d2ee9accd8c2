# SPDX-License-Identifier: BSD-3-Clause
"""optfuse: the optimizer's update inside backward or the next forward pass.

    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    opt = optfuse.fuse(opt)              # or mode="backward"

Everything else in the training loop stays as it is."""

from typing import TYPE_CHECKING

from optfuse import _names
from optfuse._library.started import as_command

if not as_command():  # whose commands import what they need, and may find that it can't be loaded
    from optfuse._library.loader import here

    here()  # says what to do where torch can't be used; the modules just import it
    from optfuse._library.bindings import Error

if TYPE_CHECKING:
    from optfuse import optim, pipeline
    from optfuse._accumulate import accumulate
    from optfuse._arguments.modes import Backward, DDPModel, Delay, Forward
    from optfuse._clipping.clip_norm import clip_grad_norm_
    from optfuse._fuse import flush, fuse, unfuse
    from optfuse._masters import masters
    from optfuse._process import keep_memory
    from optfuse._random_bits import random_bits
    from optfuse._registered import register
    from optfuse._summary import Summary, explain, summary
    from optfuse_layers.delay.delayed_updates import drain
    from optfuse_layers.kfac.kfac import KFAC, KFACSummary, kfac
    from optfuse_layers.reorder.reorder import Reordering, reorder
    from optfuse_tools.ab.ab import ab
else:
    __getattr__ = _names.resolver_of(__name__)

__version__ = "0.1.0"
__all__ = [
    "KFAC",
    "Backward",
    "DDPModel",
    "Delay",
    "Error",
    "Forward",
    "KFACSummary",
    "Reordering",
    "Summary",
    "ab",
    "accumulate",
    "clip_grad_norm_",
    "drain",
    "explain",
    "flush",
    "fuse",
    "keep_memory",
    "kfac",
    "masters",
    "optim",
    "pipeline",
    "random_bits",
    "register",
    "reorder",
    "summary",
    "unfuse",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

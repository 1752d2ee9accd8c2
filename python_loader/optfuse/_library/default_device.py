# SPDX-License-Identifier: BSD-3-Clause
"""torch.set_default_device() is for one thread. Updates run in others, too, as autograd's for a
GPU, and what they make is to lie where step() would have made it."""

from __future__ import annotations

import contextlib

import torch


class DefaultDevice:
    """That of the thread which makes this one, if it is a GPU."""

    def __init__(self) -> None:
        device = torch.get_default_device()
        self._device = None if device.type in ("cpu", "meta") else device

    def here(self) -> contextlib.AbstractContextManager[object]:
        """Makes it this thread's."""
        if self._device is None or torch.get_default_device() == self._device:
            return contextlib.nullcontext()
        return self._device

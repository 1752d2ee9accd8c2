# SPDX-License-Identifier: BSD-3-Clause
"""Ends as it is told: by an exception of a constructor, by a status or by a signal."""

import os
import signal
import sys

import torch

(how,) = sys.argv[1:]
optimizer = torch.optim.Adam(
    [torch.nn.Parameter(torch.ones(3))], lr=-1.0 if how == "raise" else 1.0
)
if how == "kill":
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(int(how))

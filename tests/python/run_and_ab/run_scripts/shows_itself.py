# SPDX-License-Identifier: BSD-3-Clause
"""How the script and its process look."""

import os
import sys

# Before torch is imported, as it has to be set.
assert "torch" not in sys.modules and "optfuse" not in sys.modules
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

import __main__  # noqa: E402

print(sys.argv, sys.path[0], __name__, __file__, __spec__ and __spec__.name)
print(__main__.__dict__ is globals(), sorted(globals()), torch.get_num_threads())
print([path for path in sys.path if "_run" in path], sys.flags)
print(sys.stdin.read())

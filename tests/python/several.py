# SPDX-License-Identifier: BSD-3-Clause
"""Programs that PyTorch's launchers start as several processes."""

import subprocess

# Now and then a process that has finished its work, without optfuse, too, ends so while the
# threads of its process group are taken down.
TAKEN_DOWN = "terminate called without an active exception"


def finished(command, tries=5, **options):
    """subprocess.run() of the command, once more where its processes were taken down so."""
    for _ in range(tries):
        done = subprocess.run(command, capture_output=True, text=True, **options)
        if done.returncode == 0 or TAKEN_DOWN not in done.stderr:
            break
    return done

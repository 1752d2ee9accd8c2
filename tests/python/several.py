# SPDX-License-Identifier: BSD-3-Clause
"""Programs that PyTorch's launchers start as several processes, and what they print without."""

import os
import socket
import subprocess

import forked_python

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


# As `python SCRIPT ...`, in an interpreter that has imported torch already.
PLAIN = """
import runpy, sys
sys.argv, sys.path[0] = {arguments!r}, {folder!r}
{first}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Rank 1 of two is a child of rank 0, which ends when both have.
AS_TWO = """
import atexit, os
child = os.fork()
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if child else "1"
if child:
    atexit.register(os.waitpid, child, 0)
"""


def printed(arguments, folder, first="", **variables):
    """The output of a script, where its start is not what is tested."""
    code = PLAIN.format(arguments=list(arguments), folder=str(folder), first=first)
    usual = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = forked_python.run(code, folder, {**os.environ, **usual, **variables}, 180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed_by_two(arguments, folder, **variables):
    """Its output as two ranks, without a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return printed(arguments, folder, AS_TWO, **ranks, **variables)

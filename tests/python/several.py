# SPDX-License-Identifier: BSD-3-Clause
"""Programs that PyTorch's launchers start as several processes, and what they print without."""

import os
import socket
import subprocess

import forked_python

# Now and then a process that has finished its work, without optfuse, too, ends so while the
# threads of its process group are taken down.
TAKEN_DOWN = "terminate called without an active exception"


def again(run, tries=5):
    """The CompletedProcess that it returns; of another run where processes were taken down so."""
    for _ in range(tries):
        done = run()
        if done.returncode == 0 or TAKEN_DOWN not in done.stderr:
            break
    return done


def finished(command, **options):
    """subprocess.run() of the command."""
    return again(lambda: subprocess.run(command, capture_output=True, text=True, **options))


def torchrun(*words, cwd, timeout=600, **variables):
    """`torchrun WORDS`: a CompletedProcess. The launcher and the processes that it starts are
    interpreters that look as if they had been started."""
    usual = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment = {**os.environ, **usual, **variables}
    command = ["-m", "torch.distributed.run", *words]
    return forked_python.run(forked_python.started(command, cwd, environment), timeout)


def launched(*words, **options):
    """torchrun(), once more where its processes were taken down so."""
    return again(lambda: torchrun(*words, **options))


# Rank 1 of two is a child of rank 0, which ends when both have.
AS_TWO = """
import atexit, os
child = os.fork()
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if child else "1"
if child:
    atexit.register(os.waitpid, child, 0)
"""


# Scripts whose start is not what is tested, nor their end but for started().


def started(output, script, *arguments):
    """A forked_python.Child, which writes into this file, and errors into another beside it."""
    code = forked_python.script(script, *arguments)
    request = forked_python.coded(code, os.getcwd(), dict(os.environ))
    return forked_python.into(request, output, f"{output}.errors")


def run_script(arguments, cwd=".", first="", timeout=600, **variables):
    """The script's subprocess.CompletedProcess."""
    code = forked_python.script(*arguments, first=first)
    asked = forked_python.coded(code, cwd, {**os.environ, **variables}, ends_soon=True)
    return forked_python.run(asked, timeout)


def printed(arguments, folder, first="", **variables):
    """The output of a script."""
    usual = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = run_script(arguments, folder, first, **usual, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed_by_two(arguments, folder, **variables):
    """Its output as two ranks, without a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return printed(arguments, folder, AS_TWO, **ranks, **variables)

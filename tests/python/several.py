# SPDX-License-Identifier: BSD-3-Clause
"""Programs that PyTorch's launchers start as several processes, and what they print without."""

import os
import socket
import subprocess
import sys

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


USUAL = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def python(arguments, cwd, timeout=180, fresh=False, stdin="", **variables):
    """The CompletedProcess of `python ARGUMENTS`: of an interpreter that looks as one that was
    started, as those that it starts do. fresh: one that was: where flags or the start matter."""
    env = {**os.environ, **USUAL, **variables}
    if fresh:
        command = [sys.executable, *arguments]
        return finished(command, cwd=cwd, env=env, input=stdin, timeout=timeout)
    return forked_python.run(forked_python.started(arguments, cwd, env), timeout)


def torchrun(*words, cwd, timeout=600, **variables):
    """`torchrun WORDS`: a CompletedProcess."""
    return python(["-m", "torch.distributed.run", *words], cwd, timeout, **variables)


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
    done = run_script(arguments, folder, first, **USUAL, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed_by_two(arguments, folder, **variables):
    """Its output as two ranks, without a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return printed(arguments, folder, AS_TWO, **ranks, **variables)

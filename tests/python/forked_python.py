# SPDX-License-Identifier: BSD-3-Clause
"""Interpreters that have torch imported already: forks of one process that does
nothing but fork. Importing it takes longer than most of what is run in them.

Each is an interpreter of its own, which imports optfuse itself and exits as any
other, but has not read the environment when it imported torch. As a program it is
the process that forks: a request a line on stdin, and on stdout the id of the
child and, when it has ended, its status."""

import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import types
import warnings


@functools.cache
def server():
    return subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def run(code, cwd, env, timeout):
    """As subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        request = {"code": code, "cwd": str(cwd), "env": env, "out": out.name, "err": err.name}
        server().stdin.write(json.dumps(request).encode() + b"\n")
        server().stdin.flush()
        child = int(server().stdout.readline())
        ended, _, _ = select.select([server().stdout], [], [], timeout)
        if not ended:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(int(server().stdout.readline()))
        texts = out.read(), err.read()
    if not ended:
        raise subprocess.TimeoutExpired(code, timeout, *texts)
    return subprocess.CompletedProcess(code, status, *texts)


def serve():
    """Returns in a child, with what it has to run, or with nothing at the end."""
    for line in sys.stdin.buffer:
        child = os.fork()
        if child == 0:
            return json.loads(line)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)
    return None


def become(request):
    """A fresh __main__; its namespace."""
    for descriptor, path in enumerate((os.devnull, request["out"], request["err"])):
        file = os.open(path, os.O_RDWR)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0], sys.argv = "", ["-c"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    return vars(main)


if __name__ == "__main__":
    gc.disable()
    import torch  # noqa: F401
    import torch._dynamo  # noqa: F401 - optfuse does

    gc.freeze()  # a child that collects garbage would copy the pages of all that was imported
    gc.enable()

    # From Python 3.12 on, in children that fork, too: that it works is what they show.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    if request := serve():
        exec(compile(request["code"], "<string>", "exec"), become(request))

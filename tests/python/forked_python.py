# SPDX-License-Identifier: BSD-3-Clause
"""Interpreters that have torch imported already: forks of one process that does
nothing but fork. Importing it takes longer than most of what is run in them.

Each is an interpreter of its own, which imports optfuse itself and exits as any
other, but has not read the environment when it imported torch. As a program it is
the process that forks: a request a line on stdin, and on stdout the id of the
child and, when it has ended, its id and its status."""

import atexit
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings

# As `python SCRIPT ...`, and as `python -m MODULE ...`.
SCRIPT = """
import runpy, sys
sys.argv, sys.path[0] = {arguments!r}, {folder!r}
{first}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MODULE = """
import os, runpy, sys
sys.argv, sys.path[0] = {arguments!r}, os.getcwd()
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@functools.cache
def server():
    made = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # or select() would not see what is in the buffer
    )
    atexit.register(end, made, os.getpid())
    return made


def end(made, starter):
    """At the end of the process that has started it, not of one that was forked from that."""
    if os.getpid() == starter:
        made.terminate()
        made.wait()


def script(path, *arguments, first=""):
    """The code that runs a script. first: code that is run before it."""
    words = [str(path), *map(str, arguments)]
    return SCRIPT.format(arguments=words, folder=os.path.dirname(words[0]), first=first)


def module(name, *arguments):
    """The code that runs a module."""
    return MODULE.format(arguments=[name, *map(str, arguments)])


class Child:
    """As subprocess.Popen([sys.executable, "-c", code]), its output in files."""

    statuses: dict[int, int] = {}  # of those that have ended, by their ids

    def __init__(self, code, cwd, env, out, err):
        request = {"code": code, "cwd": str(cwd), "env": env, "out": str(out), "err": str(err)}
        self.code, self.returncode = code, None
        server().stdin.write(json.dumps(request).encode() + b"\n")
        self.pid = None
        while self.pid is None:
            self.pid = self._hear(None)

    def _hear(self, timeout):
        """Waits so long for a word of the server. The id of a child that was started, or None."""
        if select.select([server().stdout], [], [], timeout)[0]:
            child, *status = map(int, server().stdout.readline().split())
            if not status:
                return child
            self.statuses[child] = os.waitstatus_to_exitcode(*status)
        return None

    def poll(self):
        if self.returncode is None:
            while select.select([server().stdout], [], [], 0)[0]:
                self._hear(0)
            self.returncode = self.statuses.pop(self.pid, None)
        return self.returncode

    def wait(self, timeout=None):
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(self.code, timeout)
            self._hear(left)
        return self.returncode

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def run(code, cwd, env, timeout):
    """As subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        child = Child(code, cwd, env, out.name, err.name)
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise subprocess.TimeoutExpired(code, timeout, out.read(), err.read()) from None
        return subprocess.CompletedProcess(code, child.returncode, out.read(), err.read())


def serve():
    """Returns in a child, with what it has to run, or with nothing at the end."""
    running = {}  # children by descriptors that can be read when they have ended
    while True:
        ready, _, _ = select.select([sys.stdin, *running], [], [])
        for ended in running.keys() & set(ready):
            _, status = os.waitpid(child := running.pop(ended), 0)
            os.close(ended)
            print(child, status, flush=True)
        if sys.stdin not in ready:
            continue
        line = sys.stdin.buffer.readline()  # the only one: its sender waits for an answer
        if not line:
            return None
        child = os.fork()
        if child == 0:
            for other in running:
                os.close(other)
            return json.loads(line)
        running[os.pidfd_open(child)] = child
        print(child, flush=True)


def become(request):
    """A fresh __main__; its namespace."""
    for descriptor, path in enumerate((os.devnull, request["out"], request["err"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)  # both may be one
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

# SPDX-License-Identifier: BSD-3-Clause
"""Interpreters that have torch imported already: forks of one process that does
nothing but fork. Importing it takes longer than most of what is run in them.

Each is an interpreter of its own, which imports optfuse itself and exits as any
other, but has not read the environment when it imported torch. One that is to look as if
it had just been started is made so by as_started.py. Python takes its modules apart at its end,
which costs as much as many a script: end_soon() does without. As a program it is the process
that forks: each connection brings one request and the files of the child, and gets
the child's id and, when it has ended, its status and the seconds of processors that it took.
A child may fork in its turn: tests/run has one for each section's tests (tests/warm.py), whose
address is in the environment."""

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings

if __name__ == "__main__":
    import as_started

# As `python SCRIPT ...`.
SCRIPT = """
import runpy, sys
sys.argv, sys.path[0] = {arguments!r}, {folder!r}
{first}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MOST = 2**17  # bytes of a request
GIVEN = "FORKED_PYTHON"  # names a process that forks already
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # read when torch is imported


def begin(name, python, environment):
    """Starts a process that forks; it listens, and ends when its input does."""
    command = [str(python), __file__, name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    made = subprocess.Popen(command, env=environment, **pipes)
    made.stdout.readline()
    return made


def address_of(name):
    return f"\0{name}"  # of no file


@functools.cache
def server():
    """The address of the process that forks."""
    if given := os.environ.get(GIVEN):
        return address_of(given)
    name = f"{__name__}-{os.getpid()}"
    made = begin(name, sys.executable, os.environ | ONE_THREAD)
    atexit.register(end, made, os.getpid())
    return address_of(name)


def end(made, starter):
    """At the end of the process that has started it, not of one that was forked from that."""
    if os.getpid() == starter:
        made.terminate()
        made.wait()


def script(path, *arguments, first=""):
    """The code that runs a script. first: code that is run before it."""
    words = [str(path), *map(str, arguments)]
    return SCRIPT.format(arguments=words, folder=os.path.dirname(words[0]), first=first)


def end_soon(run):
    """Runs it and ends the process, as Python does but for taking its modules apart."""
    status = 0
    try:
        run()
    except SystemExit as stop:
        status = stop.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


class Child:
    """As subprocess.Popen(), of files."""

    def __init__(self, request, files, address=None):
        """request: of coded(), started() or serving(). files: stdin, stdout and stderr."""
        self.args, self.returncode, self.seconds = request, None, 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address or server())
        socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        self.pid = int(self._socket.recv(MOST))

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            status, seconds = self._socket.recv(MOST).split()
            self.returncode, self.seconds = os.waitstatus_to_exitcode(int(status)), float(seconds)
            self._socket.close()
        return self.returncode

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def coded(code, cwd, env, ends_soon=False):
    """As `python -c CODE`, with torch imported. ends_soon: by end_soon()."""
    return {"code": code, "cwd": str(cwd), "env": env, "ends_soon": ends_soon}


def started(arguments, cwd, env):
    """As `python ARGUMENTS`, by all that it can see itself (as_started.py). No flags. It ends by
    end_soon()."""
    words = [str(word) for word in arguments]
    asked = {"arguments": words, "cwd": str(cwd), "env": env, "parent": os.getpid()}
    return {**asked, "unbuffered": False, "session": False}


def serving(name, cwd, env):
    """A process that forks, as begin()'s."""
    return {"name": name, "cwd": str(cwd), "env": env}


def into(request, out, err):
    """A Child whose output is appended to these files, which may be one."""
    with open(os.devnull) as stdin, open(out, "a") as stdout, open(err, "a") as stderr:
        return Child(request, [file.fileno() for file in (stdin, stdout, stderr)])


def run(request, timeout):
    """As subprocess.run(..., capture_output=True, text=True)."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        child = into(request, out.name, err.name)
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise subprocess.TimeoutExpired(request, timeout, out.read(), err.read()) from None
        return subprocess.CompletedProcess(request, child.returncode, out.read(), err.read())


def serve(address):
    """Returns in a child, with what it has to run and its files, or with nothing at the end."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen(64)
    print(flush=True)
    running = {}  # by descriptors that can be read when they have ended: child and connection
    while True:
        ready, _, _ = select.select([sys.stdin, listening, *running], [], [])
        if sys.stdin in ready:  # whoever has started it is gone
            return None
        for ended in running.keys() & set(ready):
            child, connection = running.pop(ended)
            _, status, usage = os.wait4(child, 0)
            tell(connection, f"{status} {usage.ru_utime + usage.ru_stime}")
            connection.close()
            os.close(ended)
        if listening not in ready:
            continue
        connection, _ = listening.accept()
        request, files, _, _ = socket.recv_fds(connection, MOST, 3)
        child = os.fork()
        if child == 0:
            for descriptor, (_, other) in running.items():
                os.close(descriptor)
                other.close()
            listening.close()
            connection.close()
            return json.loads(request), files
        for file in files:
            os.close(file)
        running[os.pidfd_open(child)] = child, connection
        tell(connection, child)


def tell(connection, what):
    with contextlib.suppress(OSError):  # nobody waits for it any more
        connection.send(str(what).encode())


def become(request, files):
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])


def fresh_main():
    """The namespace of a new __main__."""
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
    request = {"name": sys.argv[1]}
    while "name" in request:
        address = address_of(request["name"])
        asked = serve(address)
        if not asked:
            os._exit(0)
        request, files = asked
        become(request, files)
    if "code" in request:
        sys.path[0], sys.argv = "", ["-c"]
        code, main = compile(request["code"], "<string>", "exec"), fresh_main()
        if request["ends_soon"]:
            end_soon(lambda: exec(code, main))
        exec(code, main)
    else:
        end_soon(lambda: as_started.run(request, address))

# SPDX-License-Identifier: BSD-3-Clause
import functools
import os
import subprocess
import types

import forked_python
import pytest


class Rank:
    """Stands for subprocess.Popen() of a rank, in an interpreter that has torch imported."""

    def __init__(self, folder, command, env, stdout, text):
        self._files = folder / f"out-{command[2]}", folder / f"errors-{command[2]}"
        request = forked_python.started(command[1:], os.getcwd(), env)
        self._child = forked_python.into(request, *self._files)

    def communicate(self):
        self.wait()
        return tuple(file.read_text() for file in self._files)

    def wait(self):
        status = self._child.wait()
        if status:
            print(self._files[1].read_text())
        return status


@pytest.fixture
def forked_ranks(benchmarks, monkeypatch, tmp_path):
    """Ranks of two_processes.py are forked: their start is not what is tested."""
    import two_processes

    popen = functools.partial(Rank, tmp_path)
    there = types.SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(two_processes, "subprocess", there)

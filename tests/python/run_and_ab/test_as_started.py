# SPDX-License-Identifier: BSD-3-Clause
"""Forked interpreters, which most tests here run scripts in, look as those that were started."""

import os
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest

SCRIPTS = Path(__file__).parent / "run_scripts"
CODE = "import os, sys; print(sys.argv, sys.orig_argv, sys.path, sorted(os.environ.items()))"
SITE = 'import sys\nprint("sitecustomize", sys.argv, "torch" in sys.modules)\n'


@pytest.mark.parametrize(
    "arguments",
    [
        ("shows_itself.py", "a b", "--mode"),
        ("-m", "shows_itself", "-v"),
        ("-c", CODE, "x"),
        ("there_is_none.py",),
        ("-m", "there_is_none"),
    ],
)
def test_a_script_sees_the_same(arguments, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    asked = forked_python.started(arguments, SCRIPTS, environment)
    ours = forked_python.run(asked, timeout=60)
    theirs = subprocess.run(
        [sys.executable, *arguments],
        cwd=SCRIPTS,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (ours.stdout, ours.returncode) == (theirs.stdout, theirs.returncode), ours.stderr
    assert ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]

# SPDX-License-Identifier: BSD-3-Clause
"""Forked interpreters, which most tests here run scripts in, look as those that were started."""

import os
from pathlib import Path

import pytest
from several import python

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
    ours = python(arguments, SCRIPTS, PYTHONPATH=path)
    theirs = python(arguments, SCRIPTS, fresh=True, PYTHONPATH=path)
    assert (ours.stdout, ours.returncode) == (theirs.stdout, theirs.returncode), ours.stderr
    assert ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]

# SPDX-License-Identifier: BSD-3-Clause
"""Python runs this file when it starts and finds the folder in PYTHONPATH, which `python -m
optfuse run` puts there. The sitecustomize.py that it would have run otherwise comes after it."""

import importlib
import importlib.util
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def start() -> None:
    """Has watch.py look for optimizers, unless this is the Python of another environment, which
    a script may start."""
    settings = json.loads(os.environ.get("OPTFUSE_RUN", "{}"))
    if settings.get("prefix") != sys.prefix:
        return
    path = os.path.join(os.path.dirname(HERE), "watch.py")
    spec = importlib.util.spec_from_file_location("optfuse_tools.run.watch", path)
    assert spec is not None and spec.loader is not None
    watch = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = watch
    spec.loader.exec_module(watch)
    watch.start(settings)


def run_the_other() -> None:
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]
    this = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


start()
run_the_other()

# SPDX-License-Identifier: BSD-3-Clause
"""The library's messages arrive in Python's logging, whatever thread they come from."""

import logging
import threading
import time

import pytest
from common import adamw, loss_of, net, python, python_ok, train

import optfuse

ANOTHER = "another thread used a pending parameter: from now on step() updates at once"
SCRIPT = """
import logging
{setup}
import threading, torch, optfuse
p = torch.nn.Parameter(torch.ones(4))
optimizer = optfuse.fuse(torch.optim.SGD([p], lr=0.1))
p.sum().backward()
optimizer.step()
threading.Thread(target=lambda: p.sum()).start()
"""


def told(caplog, text):
    """The main thread gets messages between two of its instructions."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        found = [r for r in caplog.records if r.name == "optfuse" and text in r.getMessage()]
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"nobody said {text!r}")


def test_levels_are_those_of_logging(caplog):
    caplog.set_level(logging.INFO, "optfuse")
    optimizer = optfuse.fuse(adamw(net().parameters()))
    (record,) = told(caplog, "plan for adam, forward fusion, float32 kernel ")
    assert record.levelno == logging.INFO
    caplog.clear()
    caplog.set_level(logging.WARNING, "optfuse")
    optfuse.fuse(adamw(net().parameters()), mode="backward")
    assert optfuse.summary(optimizer) and not caplog.records


def test_a_message_of_another_thread_arrives_on_the_main_thread(caplog):
    """The thread's operator has let go of the GIL when the library sees it."""
    caplog.set_level(logging.INFO, "optfuse")
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    train(model, optimizer, 0)
    thread = threading.Thread(target=lambda: loss_of(model, 1))
    thread.start()
    thread.join()
    (record,) = told(caplog, ANOTHER)
    assert record.thread == threading.main_thread().ident


FAILS = """
import folders, logging, sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
from common import loss_of, net, train
from own_classes import Flaky
import optfuse
optfuse.register(Flaky)
model = net()
optimizer = optfuse.fuse(Flaky(model.parameters()), mode="backward")
for i in range(2):
    train(model, optimizer, i)
optimizer.zero_grad()
try:
    (loss_of(model, 2) * float("inf")).backward()
    optimizer.step()
except ValueError:
    pass
"""


def test_an_error_under_the_lock_of_an_update_arrives():
    """In a process of its own, which may end with an optimizer that has failed."""
    said = python_ok(FAILS)
    assert said.startswith("ERROR optfuse an update could not be launched"), said
    assert "ValueError" in said


def test_what_a_handler_raises_stays_out_of_the_training(caplog, monkeypatch, capsys):
    class Breaks(logging.Handler):
        said = ""

        def handle(self, record):
            self.said += record.getMessage()
            raise RuntimeError("no space left")

    handler = Breaks()
    monkeypatch.setattr(logging.getLogger("optfuse"), "handlers", [handler])
    caplog.set_level(logging.INFO, "optfuse")
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    train(model, optimizer, 0)
    assert "plan for adam" in handler.said


WHERE = {
    "nothing asked": ("", None, ""),
    "OPTFUSE_LOG": ("", "info", f"optfuse: info: {ANOTHER}"),
    "logging": ("logging.basicConfig(level='INFO')", None, f"INFO:optfuse:{ANOTHER}"),
    "both": ("logging.basicConfig()", "info", f"INFO:optfuse:{ANOTHER}"),
    "of warnings": ("logging.basicConfig()", None, ""),
    "no such level": ("", "loud", "optfuse: warning: OPTFUSE_LOG=loud is not one of error"),
}


@pytest.mark.parametrize("where", WHERE)
def test_where_messages_go(where, monkeypatch):
    """The script ends at once: what is said last is not lost."""
    setup, level, expected = WHERE[where]
    monkeypatch.delenv("OPTFUSE_LOG", raising=False)
    if level:
        monkeypatch.setenv("OPTFUSE_LOG", level)
    done = python(SCRIPT.format(setup=setup))
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert expected in done.stderr and (expected or not done.stderr), done.stderr

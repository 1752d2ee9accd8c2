# SPDX-License-Identifier: BSD-3-Clause
"""A script loads what it uses, and of the packages beside optfuse nothing."""

import json
import os

import forked_python
import pytest

IMPORTED = "import torch, optfuse"
TRAINED = """
net = torch.nn.Linear(4, 4)
optimizer = optfuse.fuse(torch.optim.AdamW(net.parameters(), fused=True), {mode!r})
for _ in range(2):
    optimizer.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
optfuse.flush()
"""
SAID = """
import json, sys
ours = {name: m for name, m in sys.modules.items() if name.startswith("optfuse")}
print(json.dumps({name: len(open(m.__file__).readlines()) for name, m in ours.items()}))
"""


def run(code):
    return forked_python.run(forked_python.coded(code, "/", dict(os.environ)), timeout=120)


def lines_of(code):
    """The lines of our modules that a script has loaded."""
    done = run(code + SAID)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_loads_the_library_and_no_feature():
    lines = lines_of(IMPORTED)
    assert lines["optfuse._library.bindings"] > 100 and "optfuse._fuse" not in lines
    assert sum(lines.values()) <= 850, lines


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_training_loads_the_road_of_an_optimizer(mode):
    lines = lines_of(IMPORTED + TRAINED.format(mode=mode))
    assert "optfuse._fuse" in lines and sum(lines.values()) <= 9700, sorted(lines.items())
    assert {name.partition(".")[0] for name in lines} == {"optfuse"}


@pytest.mark.parametrize(
    ("name", "package"), [("kfac", "optfuse_layers"), ("ab", "optfuse_tools"), ("fuse", "optfuse")]
)
def test_a_name_loads_the_package_that_has_it(name, package):
    loaded = lines_of(f"{IMPORTED}\nassert callable(optfuse.{name})")
    assert package in loaded and not {"optfuse_layers", "optfuse_tools"} - {package} & loaded.keys()


def test_names_are_listed_and_others_refused():
    code = f"{IMPORTED}\nassert {{'kfac', 'pipeline'}} <= {{*dir(optfuse)}}\noptfuse.kfacs"
    done = run(code)
    assert "AttributeError: module 'optfuse' has no attribute 'kfacs'" in done.stderr

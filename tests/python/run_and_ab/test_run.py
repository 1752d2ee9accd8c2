# SPDX-License-Identifier: BSD-3-Clause
"""`python -m optfuse run` beside `python`: scripts that were not written for it print the same,
end the same, and have their optimizers fused. They ask for fused=True themselves, so that stock's
bits are the reference's."""

import functools
import os
import re
import signal
from pathlib import Path

import pytest
import several
from several import launched, printed, printed_by_two

SCRIPTS = Path(__file__).parent / "run_scripts"
MODES = ("forward", "backward")
RUN = ("-m", "optfuse", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def python(*arguments, **variables):
    return several.python(arguments, SCRIPTS, **variables)


fresh_python = functools.partial(python, fresh=True)


def succeeded(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@functools.cache
def stock(*arguments):
    """The output of `python SCRIPT ...`."""
    return printed(arguments, SCRIPTS)


def same(mode, *arguments, options=(), python=python, **variables):
    """The stderr of a run whose output is stock's."""
    done = succeeded(python(*RUN, "-v", "--mode", mode, *options, *arguments, **variables))
    assert done.stdout == stock(*arguments), done.stderr
    return done.stderr


def fused(stderr, mode):
    """The classes of the optimizers that were fused, in their order."""
    return re.findall(rf"^optfuse: .*: fused (\w+) in {mode} mode$", stderr, re.MULTILINE)


def last(stderr):
    return stderr.splitlines()[-1]


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_loop(mode):
    said = same(mode, "plain.py", "--steps", "6", "--mode", "its own", python=fresh_python)
    assert said == (
        f"optfuse: plain.py:16: fused AdamW in {mode} mode\n"
        f"optfuse: fused 1 optimizer (AdamW) in {mode} mode\n"
    )


def test_updates_are_created_where_the_mode_says():
    """And not in step(), by PyTorch."""
    for mode in MODES:
        printed = succeeded(python(*RUN, "-q", "--mode", mode, "look.py")).stdout
        assert f"AdamW, {mode} fusion, 4 parameters" in printed, printed
        assert "updates: 20 created" in printed, printed


def test_gradients_may_be_promises_where_that_is_asked_for():
    for products, n in ("auto", 1), ("off", 0):
        done = succeeded(python(*RUN, "-q", "--products", products, "wide.py"))
        assert done.stdout == f"{n}\n", done.stderr


@pytest.mark.parametrize("mode", ["backward"])
def test_classes_without_kernels_are_recorded(mode):
    said = same(mode, "subclass.py")
    assert fused(said, mode) == ["Named", "Signs", "HalvedAdam"]
    # Another one of the same class got the same parameters.
    assert fused(said, "forward") == [n for n in ("Named", "Signs", "HalvedAdam") for _ in range(2)]
    assert "stays as it is" not in said


@pytest.mark.parametrize("mode", ["backward"])
def test_classes_that_were_registered(mode):
    registered = ("--register", "__main__.Named", "--register", "__main__.HalvedAdam")
    said = same(mode, "subclass.py", options=registered)
    assert {*fused(said, mode)} == {"Named", "Signs", "HalvedAdam"}, said
    assert "stays as it is" not in said


@pytest.mark.parametrize("mode", ["backward"])
def test_optimizers_by_name_and_from_one_another(mode):
    said = same(mode, "factory.py")
    assert fused(said, mode) == ["Adam", "SGD", "RMSprop", "Adam", "SGD", "RMSprop"]
    assert last(said) == f"optfuse: fused 6 optimizers (Adam, RMSprop, SGD) in {mode} mode"


@pytest.mark.parametrize("mode", ["forward"])
def test_an_optimizer_in_another_one(mode):
    """That which it makes is its own matter; one that it is given is the script's."""
    said = same(mode, "wrapper.py")
    assert fused(said, mode) == ["Lookahead", "Adam", "Adam"]
    assert last(said) == f"optfuse: fused 3 optimizers (Adam, Lookahead) in {mode} mode"


@pytest.mark.parametrize("mode", ["forward"])
def test_a_class_that_evaluates_the_loss_itself(mode):
    said = same(mode, "unsupported.py")
    assert fused(said, mode) == ["Adam", "LBFGS", "LBFGS"]


@pytest.mark.parametrize(
    ("mode", "method"),
    [("forward", "fork"), ("backward", "spawn"), ("forward", "forkserver"), ("backward", "exec")],
)
def test_children_fuse_as_well(mode, method):
    """Those of multiprocessing are started as it starts them, whatever their parent is."""
    start = fresh_python if method == "exec" else python
    done = succeeded(start(*RUN, "-v", "--mode", mode, "children.py", method))
    assert done.stdout == stock("children.py", "fork"), done.stderr  # whatever the method
    assert fused(done.stderr, mode) == ["AdamW", "AdamW"]


def torchrun(*arguments):
    """A launcher outside of the run; its own start is not what is tested."""
    return launched(*TORCHRUN[2:], *arguments, cwd=SCRIPTS)


@functools.cache
def two_ranks(*arguments):
    """The output of a script that torchrun starts twice."""
    return printed_by_two(arguments, SCRIPTS)


@pytest.mark.parametrize(
    ("mode", "order"),
    [pytest.param("forward", "after", marks=pytest.mark.full), ("backward", "before")],
)
def test_torchrun_and_a_model_that_is_made_before_or_after(mode, order):
    done = succeeded(torchrun(*RUN, "-v", "--mode", mode, "parallel.py", order))
    assert done.stdout == two_ranks("parallel.py", order), done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("optfuse: fused")]
    assert said == [f"optfuse: fused 1 optimizer (AdamW) in {mode} mode"] * 2, done.stderr


def test_a_model_that_backward_mode_cant_follow():
    arguments = ("parallel.py", "after", "find_unused_parameters")
    done = succeeded(torchrun(*RUN, "--mode", "backward", *arguments))
    assert done.stdout == two_ranks(*arguments), done.stderr
    assert "AdamW is fused in forward mode: backward mode can't update behind" in done.stderr
    assert "optfuse: fused 1 optimizer (AdamW) in forward mode" in done.stderr


def test_the_launcher_inside_of_the_run():
    """The launcher starts the ranks as `python parallel.py`."""
    done = succeeded(python(*RUN, "--mode", "backward", *TORCHRUN, "parallel.py", "before"))
    assert done.stdout == two_ranks("parallel.py", "before"), done.stderr
    assert done.stderr.count("fused 1 optimizer (AdamW) in backward mode") == 2, done.stderr


def test_a_script_that_fuses_by_itself_is_obeyed():
    said = same("forward", "itself.py")
    assert fused(said, "forward")[:2] == ["AdamW", "Adagrad"]
    assert "fused 1 optimizer (Adagrad) in forward mode" in last(said)


@pytest.mark.parametrize("how", [("shows_itself.py",), ("-m", "shows_itself")])
def test_the_script_sees_what_python_shows_it(how):
    arguments = (*how, "-v", "--", "a b", "--mode")
    ours = succeeded(fresh_python(*RUN, *arguments, stdin="text"))
    assert ours.stdout == succeeded(fresh_python(*arguments, stdin="text")).stdout
    assert ours.stderr == "optfuse: this process made no optimizer\n"


def test_flags_of_the_interpreter_are_kept():
    """Those in sys.flags and -X, in any form."""
    flags = ("-O", "-X", "utf8", "-W", "error::ImportWarning", "-Bum")
    ours = succeeded(fresh_python(*flags, "optfuse", "run", "-q", "flags.py", "x")).stdout
    assert ours == succeeded(fresh_python(*flags[:-1], "-Bu", "flags.py", "x")).stdout


def test_a_tool_that_runs_scripts_may_stand_on_either_side():
    tool = ("-m", "cProfile")
    # Outside of it the tool is left by an exec, and is not to profile the import of torch inside.
    for start, how in ((fresh_python, (*tool, *RUN)), (python, (*RUN, *tool))):
        done = succeeded(start(*how, "plain.py"))
        assert done.stdout.startswith(stock("plain.py"))
        assert "fused 1 optimizer (AdamW)" in done.stderr


def test_endings_are_kept():
    for how, status in (("0", 0), ("7", 7), ("raise", 1), ("kill", -signal.SIGTERM)):
        done = python(*RUN, "fails.py", how)
        assert done.returncode == status, done.stderr  # as Python's documentation has them
    assert python(*RUN, "there_is_none.py").returncode == python("there_is_none.py").returncode


def test_a_traceback_is_that_of_the_script_and_two_lines_of_ours():
    ours, theirs = (fresh_python(*how, "fails.py", "raise").stderr for how in ((*RUN, "-q"), ()))
    lines = [line for line in ours.splitlines() if not set(line) <= set(" ^~")]
    at = next(i for i, line in enumerate(lines) if "watch.py" in line)
    without = lines[:at] + lines[at + 2 :]
    assert without == [line for line in theirs.splitlines() if not set(line) <= set(" ^~")]


@pytest.mark.parametrize("off", ["variable", "path"])
def test_without_the_hook_nothing_is_fused(off):
    """The negative control: the same script, and what tells that it is fused says so no more."""
    if off == "variable":
        done = succeeded(python(*RUN, "-v", "look.py", OPTFUSE_DISABLE="1"))
        assert done.stderr == "optfuse: OPTFUSE_DISABLE is set: no optimizer is fused\n"
    else:  # the script's Python isn't led to sitecustomize.py
        done = succeeded(python("look.py", OPTFUSE_RUN='{"mode": "forward"}'))
        assert not done.stderr
    assert "this one is not fused" in done.stdout or "disabled fusion" in done.stdout


def test_a_script_that_sets_the_variable_itself_is_obeyed():
    done = succeeded(python(*RUN, "disables.py"))
    assert done.stderr == "optfuse: fused no optimizer\n"


def test_the_other_sitecustomize_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the other')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = succeeded(python(*RUN, "plain.py", PYTHONPATH=path))
    # One line by the command's Python, and one by the script's.
    assert done.stdout == "the other\n" * 2 + stock("plain.py")
    assert "fused 1 optimizer" in done.stderr


def test_quiet_is_quiet():
    assert succeeded(python(*RUN, "-q", "unsupported.py")).stderr == ""


def test_clipping_where_the_loop_cant_be_edited():
    done = succeeded(python(*RUN, "--max-grad-norm", "0.01", "plain.py"))
    assert done.stdout == stock("clipped.py") != stock("plain.py")


def test_a_library_that_cant_be_loaded_stops_the_first_constructor(tmp_path):
    done = python(*RUN, "plain.py", OPTFUSE_LIBRARY=str(tmp_path / "none.so"))
    assert done.returncode == 1 and not done.stdout
    assert "ImportError: OPTFUSE_LIBRARY names" in last_error(done.stderr)


def last_error(stderr):
    return [line for line in stderr.splitlines() if not line.startswith("optfuse:")][-1]


STARTED_OTHERWISE = """
import runpy, sys
sys.argv[1:] = ["run", "plain.py"]
runpy.run_module("optfuse", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-E", *RUN, "plain.py"), "-E, -I or -S"),
        ((*RUN, "--side-stream", "plain.py"), "--side-stream goes with --mode backward"),
        ((*RUN, "--mode", "backward", "--max-grad-norm", "1", "plain.py"), "use --mode forward"),
        ((*RUN, "--mode", "sideways", "plain.py"), "invalid choice: 'sideways'"),
        ((*RUN, "--accumulate", "0", "plain.py"), "0 is not at least 1"),
        ((*RUN, "--max-grad-norm", "nan", "plain.py"), "nan is not at least 0"),
        (RUN, "required: script"),
        (("-c", STARTED_OTHERWISE), "python -m optfuse run -m cProfile train.py"),
    ],
)
def test_refusals(arguments, says):
    done = fresh_python(*arguments) if arguments[0] == "-E" else python(*arguments)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert not done.stdout


def test_nothing_would_clip_if_it_is_disabled():
    done = python(*RUN, "--max-grad-norm", "1", "plain.py", OPTFUSE_DISABLE="1")
    assert done.returncode == 2 and "unset OPTFUSE_DISABLE" in done.stderr


def test_the_commands_are_listed():
    done = succeeded(python("-m", "optfuse", "--help"))
    assert re.search(r"^ +run +", done.stdout, re.MULTILINE)
    assert re.search(r"^ +doctor +", done.stdout, re.MULTILINE)

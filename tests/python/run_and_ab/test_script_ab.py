# SPDX-License-Identifier: BSD-3-Clause
"""`python -m optfuse ab`: what it says of scripts as they are. Times are not judged."""

import json
import math
import os
import pty
import re
import resource
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest
import torch
from html_pages import Page, has_matplotlib
from several import python
from torch import nn

from optfuse_tools.script_ab import child, probe
from optfuse_tools.script_ab.weights import first_difference
from optfuse_tools.script_ab.work import keep

HERE = Path(__file__).parent
rare = pytest.mark.full  # each starts some eight processes, for little more than others check
AB = ("-m", "optfuse", "ab")


def ab(*arguments, folder="ab_scripts", **variables):
    """The CompletedProcess of Pythons that look as if they had been started, without the lines that
    say where it is. Run with one thread and, if nothing else is said, in one round."""
    done = python(arguments, HERE / folder, 600, **variables)
    done.stderr = re.sub(r"^optfuse ab: .* \(after \d+ s\)\n", "", done.stderr, flags=re.MULTILINE)
    return done


def compared(*arguments, status=0, **variables):
    """The output of ab."""
    done = ab(*AB, "--rounds", "1", "--modes", "forward", *arguments, **variables)
    assert done.returncode == status and not done.stderr, done.stdout + done.stderr
    return done.stdout


def verdict(printed):
    first = printed.splitlines()[0]
    assert first.startswith("verdict: "), printed
    return first.removeprefix("verdict: ")


def cant(*arguments, **variables):
    """Why it can't be compared."""
    done = ab(*AB, *arguments, **variables)
    assert done.returncode == 2 and not done.stdout, done.stdout + done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A comparison with all that it can write: what is printed, the JSON and the page."""
    folder = tmp_path_factory.mktemp("ab")
    files = ("--json", str(folder / "ab.json"), "--report", str(folder / "ab.html"))
    done = ab(*AB, "--rounds", "2", "--seed", "3", *files, "mlp.py")
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "ab.json").read_text()), folder / "ab.html"


def test_a_reproducible_script_is_equal_to_the_reference(whole):
    printed, _, _ = whole
    assert verdict(printed).startswith(
        "weights equal those of fused=True bit by bit after each of 12 steps; "
    )
    table = printed.splitlines()[2:7]
    assert [re.split("  +", line)[0] for line in table] == [
        "variant", "as written", "fused=True", "forward fusion", "backward fusion"
    ]  # fmt: skip
    # PyTorch's own implementations differ from each other.
    assert re.search("differ from step [12] on$", table[1]), printed
    assert all(line.endswith("equal") for line in table[2:]), printed
    assert "Optimizers: AdamW (mlp.py:17, 12 steps)." in printed
    assert f"1 threads, torch {torch.__version__}, python mlp.py." in printed


def test_the_json_has_all_figures(whole):
    printed, found, _ = whole
    assert f"verdict: {found['verdict']}" == printed.splitlines()[0]
    assert (found["weights"], found["reference"], found["steps"]) == ("equal", "fused=True", 12)
    assert found["differs_from_itself"] is None
    settings = found["settings"]
    assert (settings["rounds"], settings["seed"], settings["threads"]) == (2, 3, 1)
    assert settings["warm_up"] + settings["timed_steps"] == 11
    assert settings["torch"] == torch.__version__
    assert [row["mode"] for row in found["rows"]] == ["", "", "forward", "backward"]
    for row in found["rows"]:
        assert not row["note"] and not row["said"]
        assert len(row["rounds_ms"]) == 2 and len(row["steps_ms"]) == 11
        for name in ("ms", "speed", "speed_as_written"):
            interval = row[name]
            assert 0 < interval["low"] <= interval["median"] <= interval["high"] < math.inf
        assert 50 < row["peak_mb"] < 5000 and row["peak_gpu_mb"] is None
    assert found["rows"][1]["speed"]["median"] == 1.0
    assert found["rows"][0]["speed_as_written"]["median"] == 1.0


def test_the_page_is_one_file_that_loads_nothing(whole):
    text = whole[2].read_text("utf-8")
    parsed = Page(text)
    assert not parsed.open and not parsed.loads
    assert parsed.tags.count("tr") == 5
    assert "weights equal those of fused=True" in text
    for name in ("date 20", "cpu ", "threads 1", f"torch {torch.__version__}", "python mlp.py"):
        assert name in text, name
    assert parsed.tags.count("svg") == (3 if has_matplotlib() else 0)
    assert ("pip install matplotlib" in text) is not has_matplotlib()


@rare
def test_a_script_that_draws_from_the_clock_is_not_reproducible():
    said = verdict(compared("mlp.py", "noise"))
    assert said.startswith(
        "not reproducible: two runs of mlp.py as written differ from step 4 on, so weights can't "
    )


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A comparison of weights that differ: what is printed, and what a terminal was shown."""
    ours, theirs = pty.openpty()
    words = [*AB, "--rounds", "1", "--modes", "forward", "mlp.py", "other weights"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    asked = forked_python.started(words, HERE / "ab_scripts", environment)
    out = tmp_path_factory.mktemp("shown") / "out"
    with open(os.devnull) as stdin, open(out, "w") as stdout:
        done = forked_python.Child(asked, [stdin.fileno(), stdout.fileno(), theirs])
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    done.wait()
    printed = out.read_text()
    assert done.returncode == 1, printed + seen.decode()
    return printed, seen


def test_other_weights_are_found_at_their_step(shown):
    """The negative control: the script changes one weight by one bit where it is fused."""
    assert verdict(shown[0]).startswith(
        "weights of forward fusion differ from those of fused=True from step 6 on; "
    )


def test_wrong_weights_have_their_step_parameter_and_size():
    said = verdict(compared("mlp.py", "wrong weights", status=1))
    assert said.startswith(
        "WEIGHTS ARE WRONG under forward fusion: after step 6 parameter 2 of group 0 of shape (5, "
        "64) is 0."
    ), said
    assert "of its size away from fused=True's (PyTorch's implementations are " in said


@rare
def test_weights_that_are_nan_have_their_step_and_parameter():
    said = verdict(compared("mlp.py", "nan", status=1))
    assert "after step 6 parameter 2 of group 0 of shape (5, 64) has NaN or infinities" in said


@rare
def test_a_variant_that_ends_early_differs():
    said = verdict(compared("mlp.py", "other end", status=1))
    assert "differ from those of fused=True from step 10 on" in said


def test_the_seed_is_that_of_the_command():
    """And scripts draw other numbers from another one."""
    folder = HERE / "ab_scripts"
    found = {}
    for seed in (0, 1):
        settings = {"session": "optfuse_tools.script_ab.probe", "alone": True, "seed": seed}
        found[seed] = drawn(folder, settings), drawn(folder, settings)
    assert found[0][0] == found[0][1] != found[1][0] == found[1][1]


def drawn(folder, settings):
    from optfuse_tools.run.command import HOME, environment_for

    settings = {**settings, "home": HOME, "prefix": sys.prefix, "process": None, "said": 0}
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1))"
    command = [sys.executable, "-c", code]  # a fork has NumPy's generator of its parent
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment_for(settings),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Loops


def test_backward_mode_is_left_out_with_its_reason():
    """And the other mode is compared."""
    printed = compared("--modes", "forward,backward", "mlp.py", "clips")
    assert verdict(printed).startswith("weights equal those of fused=True")
    (left_out,) = [line for line in printed.splitlines() if " left out: " in line]
    assert left_out.startswith("backward fusion left out: ended with exit status 1: mlp.py:")
    assert "clipping" in left_out and 'mode="forward"' in left_out


@rare
def test_two_optimizers_with_a_reference_of_flags():
    """RMSprop has no fused=True; the iterations are those of the one that steps more often."""
    printed = compared("--modes", "forward,backward", "two.py")
    assert verdict(printed).startswith("weights equal those of foreach=False bit by bit after")
    assert re.search(
        r"Optimizers: RMSprop \(two.py:\d+, 10 steps\), Adam \(two.py:\d+, 20 steps\)\.", printed
    )


@rare
def test_a_loop_like_nanogpts():
    """It sets learning rates, clips, evaluates, saves and draws from three generators."""
    printed = compared("gpt.py", "--accumulate", "1")
    assert "weights equal those of fused=True bit by bit after each of 20 steps" in printed


@rare
def test_accumulation_in_backward_mode():
    arguments = ("--modes", "backward", "--accumulate", "3", "gpt.py")
    printed = compared(*arguments, "--accumulate", "3", "--clip", "0")
    assert "backward fusion" in printed and verdict(printed).startswith("weights equal"), printed


@rare
def test_a_module_and_its_arguments():
    printed = compared("-m", "mlp", "few and more")
    assert verdict(printed).startswith("weights equal those of fused=True")


@rare
def test_a_script_is_ended_after_some_steps():
    printed = compared("--steps", "9", "mlp.py")
    assert "after each of 9 steps" in verdict(printed)


@rare
def test_a_script_that_catches_what_ends_it_is_ended_all_the_same():
    printed = compared("--steps", "9", "stubborn.py")
    assert verdict(printed).startswith("weights equal those of the script as written bit by bit")


# Scripts that can't be compared


def test_an_error_of_the_script_is_shown():
    said = cant("mlp.py", "fails")
    assert said.startswith(
        "optfuse ab: mlp.py as written ended with exit status 1 after 7 steps. Its last lines:\n"
    )
    assert "ValueError: of the script" in said


@rare
def test_an_error_of_all_that_is_fused_is_shown():
    said = cant("--modes", "forward", "mlp.py", "fails if fused")
    assert said == (
        "optfuse ab: mlp.py can't be fused. forward fusion: ended with exit status 1: "
        "ValueError: of the script\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("mlp.py", "few"), "mlp.py took 5 steps of an optimizer; ab needs 8"),
        (("mlp.py", "leaves"), "mlp.py made no torch.optim.Optimizer (or ended by os._exit())"),
        (("there_is_none.py",), "there_is_none.py as written ended with exit status 2"),
    ],
)
def test_what_cant_be_compared(arguments, says):
    assert says in cant(*arguments)


@rare
def test_a_script_that_trains_in_a_child():
    for method in ("fork", "spawn"):
        assert "trains in processes that it starts" in cant(
            "children.py", method, folder="run_scripts"
        )


@rare
def test_a_script_that_fuses_by_itself():
    said = cant("--modes", "forward", "--steps", "8", "itself.py", folder="run_scripts")
    assert "itself.py calls optfuse.fuse() itself" in said or "itself.py took" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--rounds", "0", "mlp.py"), "0 is not at least 1"),
        (("--steps", "7", "mlp.py"), "7 is not at least 8"),
        (("--modes", "sideways", "mlp.py"), "'sideways' is not of forward,backward"),
        (("--json", "no/such/folder/x.json", "mlp.py"), "is not a file in a folder that exists"),
        (("--report", "..", "mlp.py"), "is not a file in a folder that exists"),
        ((), "required: script"),
    ],
)
def test_refusals_before_anything_runs(arguments, says):
    assert says in cant(*arguments)


def test_refusals_of_the_environment():
    assert "start ab without a launcher" in cant("mlp.py", WORLD_SIZE="2")
    assert "unset it" in cant("mlp.py", OPTFUSE_DISABLE="1")
    command = [sys.executable, "-E", *AB, "mlp.py"]
    done = subprocess.run(command, cwd=HERE / "ab_scripts", capture_output=True, text=True)
    assert done.returncode == 2 and "-E, -I or -S" in done.stderr


def test_a_file_without_room_is_said_and_not_left_in_part(tmp_path, capsys):
    path = tmp_path / "x.json"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))  # ends a file as a full disk does
    try:
        kept = keep(path, "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert not kept and f"{path} can't be written (File too large): make room" in said
    assert not path.exists()
    assert not keep(Path("/dev/full"), "x") and Path("/dev/full").exists()
    assert "No space left on device" in capsys.readouterr().err
    assert keep(path, "x") and path.read_text() == "x"


def test_a_full_disk_of_temporary_files_is_not_the_scripts_error(monkeypatch):
    script = child.Script("x.py", ("-c", "raise SystemExit(3)"), seed=0, steps=None, fewest_steps=1)
    assert child.run(script, child.Variant("as written"), looks=False).status == 3
    monkeypatch.setattr(child, "LEAST_ROOM", 2**62)  # which no disk has
    with pytest.raises(child.NoRoom, match="is full, where x.py's output .* by TMPDIR"):
        child.run(script, child.Variant("as written"), looks=False)


def test_a_library_that_cant_be_loaded(tmp_path):
    said = cant("mlp.py", OPTFUSE_LIBRARY=str(tmp_path / "none.so"))
    assert said.startswith("optfuse: OPTFUSE_LIBRARY names"), said


# Progress


def test_a_terminal_shows_where_it_is_and_nothing_stays(shown):
    lines = shown[1].decode().split("\r\x1b[K")
    assert "optfuse ab: comparing weights, as written, again" in lines
    assert any(re.fullmatch(r"optfuse ab: round 1 of 1, .*, about \d+ s left", x) for x in lines)
    assert lines[-1] == "" and b"\n" not in shown[1]


# The parts


def test_the_first_difference_is_counted_by_the_optimizer_that_stepped():
    one = [[0, "a"], [1, "b"], [0, "c"], [1, "d"]]
    assert first_difference(one, list(one)) is None
    assert first_difference(one, [*one[:2], [0, "x"], one[3]]) == 2
    assert first_difference(one, [[0, "a"], [1, "x"], *one[2:]]) == 1
    assert first_difference(one[:3], one) == first_difference(one, one[:3]) == 2
    assert first_difference([], one) == 1


def test_a_digest_sees_every_bit_and_layout_is_no_value():
    weight = torch.randn(4, 6)
    wanted = probe.digest([weight, torch.ones(0)])
    assert probe.digest([weight.t().contiguous().t(), torch.ones(0)]) == wanted
    for changed in (weight.clone(), torch.zeros(4, 6)):
        changed[2, 3] = -0.0
        other = changed.clone()
        other[2, 3] = 0.0
        assert probe.digest([changed]) != probe.digest([other])
    assert probe.digest([weight.to(torch.bfloat16)]) != wanted


def test_the_peak_is_that_of_this_program():
    """And not that of the process that started it, which getrusage() has."""
    code = "from optfuse_tools.script_ab import probe; print(probe.peak_rss_mb())"
    held = torch.ones(200 * 2**20)  # 800 MB
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and float(done.stdout) < 0.5 * probe.peak_rss_mb(), done.stdout
    assert held.sum() > 0


def test_a_clock_leaves_the_scheduler_its_count():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    session = probe.Session(
        {"parent": os.getppid(), "flags": [], "looks": False, "steps": None}, None
    )
    session.made(optimizer, "here")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weight.grad = torch.ones(3)
    optimizer.step()
    scheduler.step()  # warns if it knows of no step, which is an error here
    assert session._found()["optimizers"] == [{"name": "SGD", "where": "here", "steps": 1}]
    assert session._found()["ms"] == [[]]


def test_sketches_are_as_far_apart_as_parameters():
    random = torch.Generator().manual_seed(0)
    for n in (1, 7, 1000):
        a = torch.randn(n, generator=random)
        for size in (1e-6, 0.1):
            b = a.double() + size * torch.randn(n, generator=random)
            before = b.clone()
            apart = math.dist(probe.sketch(a.double()), probe.sketch(b))
            assert 0.3 < apart / (a - b).norm().item() < 3
            assert b.equal(before), "a look changes nothing"
    assert probe.sketch(torch.zeros(0)) == [0.0] * 8
    assert [s for s in range(1, 140) if probe.is_sketched(s)] == [
        *range(1, 32), *range(32, 64, 2), *range(64, 128, 4), 128, 136
    ]  # fmt: skip


def test_a_log_has_lines_while_a_script_runs():
    seen = []
    script = child.Script("x.py", ("-c", "import time; time.sleep(2.5)"), 0, None, 1)
    child.run(script, child.Variant("as written"), False, lambda: seen.append(1))
    assert len(seen) >= 2

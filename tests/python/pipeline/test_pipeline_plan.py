# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.pipeline.plan(): layers and their costs, places, tasks, the state of a plan; the figures
of docs/layerpipe.md."""

import copy
import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common import assert_same, python_ok
from several import started
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm

import optfuse
from optfuse import pipeline
from optfuse.pipeline import PipelinePlan, PlannedLayer, Task
from optfuse_layers.pipeline.costs import MULTIPLY_ADDS_A_SECOND
from optfuse_layers.pipeline.plan import FORWARDING, KINDS, STRATEGIES, SYNCHRONOUS, placed

ROOT = Path(__file__).parents[3]
FREE = (0.0, 0.0)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(64 * 16, 128),
        nn.Sequential(nn.ReLU(), nn.Linear(128, 10)),
    )


IMAGES = torch.zeros(4, 3, 8, 8)


def planned(strategy="layerpipe", processes=3, model=None, **options):
    options = {"network": FREE, "costs": "analytic"} | options
    return pipeline.plan(model or net(), IMAGES, processes, strategy, **options)


def test_analytic_costs_are_the_multiply_adds_of_linear_and_conv2d():
    layers = planned().layers
    rate = MULTIPLY_ADDS_A_SECOND
    work = [4 * 64 * 32 * 27, 0, 0, 4 * 64 * 64 * 288, 0, 0, 0, 0, 4 * 1024 * 128, 4 * 1280]
    parameters = [32 * 28, 64, 0, 64 * 289, 0, 0, 0, 0, 1025 * 128, 1290]
    assert [la.forward for la in layers] == pytest.approx([w / rate for w in work])
    assert [la.parameters for la in layers] == parameters
    for i, (layer, once, count) in enumerate(zip(layers, work, parameters, strict=True)):
        assert layer.input_gradient == pytest.approx(once / rate if i else 0)
        assert layer.weight_gradient == pytest.approx(once / rate)
        assert layer.update == pytest.approx(count / rate)
    assert [la.name for la in layers] == [str(i) for i in range(10)]
    assert [la.in_elements for la in layers[1:]] == [la.out_elements for la in layers[:-1]]
    assert (layers[0].in_elements, layers[-1].out_elements) == (IMAGES.numel(), 40)


def test_only_plain_linear_and_conv2d_are_movable():
    class Mine(nn.Linear):
        pass

    frozen = nn.Linear(16, 16).requires_grad_(False)
    model = nn.Sequential(
        nn.Linear(16, 16),
        Mine(16, 16),
        frozen,
        spectral_norm(nn.Linear(16, 16)),
        nn.Unflatten(1, (4, 2, 2)),
        nn.Conv2d(4, 8, 1, groups=2),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(8, 4, 1),
    )
    made = pipeline.plan(model, torch.zeros(2, 16), 2, network=FREE, costs="analytic")
    assert [la.channels for la in made.layers] == [16, 0, 0, 0, 0, 0, 0, 8]
    assert [la.movable for la in made.layers] == [bool(la.channels) for la in made.layers]
    assert made.layers[2].parameters == 0 and made.layers[2].input_gradient > 0
    assert made.layers[2].weight_gradient == 0


@pytest.mark.parametrize("costs", ["analytic", "measured"])
def test_a_plan_leaves_parametrized_weights_alone(costs):
    """They are made from buffers, which a look at them moves on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    before = copy.deepcopy(model.state_dict())
    made = pipeline.plan(model, torch.randn(4, 8), 2, network=FREE, costs=costs)
    assert_same("buffers", dict(model.state_dict()), dict(before))
    rate = MULTIPLY_ADDS_A_SECOND
    assert costs == "measured" or made.layers[1].forward == pytest.approx(4 * 64 / rate)


def test_measured_costs_are_seconds_of_what_there_is():
    model = net()
    model.train()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    layers = planned(model=model, costs="measured").layers
    for layer in layers:
        assert 0 < layer.forward < 10
        assert layer.input_gradient > 0 or layer is layers[0]
        assert (layer.update > 0) == (layer.parameters > 0)
        assert layer.weight_gradient == 0 or layer.parameters
    assert layers[0].input_gradient == 0 and layers[3].weight_gradient > 0
    assert torch.equal(random, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} has changed"
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_with_more_work_measures_longer():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 16), nn.Linear(16, 16))
    layers = pipeline.plan(model, torch.zeros(256, 512), 2, network=FREE).layers
    for what in ("forward", "weight_gradient", "update"):
        assert getattr(layers[0], what) > getattr(layers[2], what), what


def test_given_costs_are_taken():
    costs = [(1.0, 2, 3.0, 4.0)] * 10
    layers = planned(costs=costs).layers
    assert layers[3].forward == 1 and layers[3].input_gradient == 2 and layers[3].update == 4
    assert layers[0].input_gradient == 0 and layers[2].weight_gradient == layers[2].update == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("processes", (1, 2, 5))
def test_every_task_runs_once_and_where_the_plan_says(strategy, processes):
    options = {"micro_batches": 2} if strategy in SYNCHRONOUS else {}
    plan = planned(strategy, processes, **options)
    batches, found = 7, {}
    for process in range(processes):
        for task in plan.tasks(process, batches):
            assert task not in found and isinstance(task, Task)
            found[task] = process
    for i, (layer, place) in enumerate(zip(plan.layers, plan.places, strict=True)):
        for b in range(batches):
            on = place.forward + b % place.replicas
            expected = {"forward": on}
            if i:
                expected["input_gradient"] = on if place.replicas > 1 else place.input_gradient
            if i and place.split:
                expected["second_input_gradient"] = place.second_input_gradient
            if layer.parameters:
                expected["weight_gradient"] = on if place.replicas > 1 else place.weight_gradient
            if layer.parameters and (plan.micro_batches == 1 or b % 2 or b == batches - 1):
                expected["update"] = on
            assert {
                k: found.pop(Task(k, i, b)) for k in KINDS if Task(k, i, b) in found
            } == expected
        for b in range(batches, -(-batches // place.replicas) * place.replicas):
            if layer.parameters:  # replicas without a batch in the last group
                assert found.pop(Task("update", i, b)) == place.forward + b % place.replicas
    assert not found


def test_forwards_see_the_updates_that_the_delays_say():
    plan = planned("1f1b")
    stages = [place.forward for place in plan.places]
    assert plan.delays == tuple(max(stages) - stage for stage in stages)
    for process in range(3):
        tasks = plan.tasks(process, 9)
        for i, place in enumerate(plan.places):
            if place.forward != process or not plan.layers[i].parameters:
                continue
            for b in range(9):
                before = tasks[: tasks.index(Task("forward", i, b))]
                seen = {t.batch for t in before if t.kind == "update" and t.layer == i}
                assert seen == set(range(b - plan.delays[i]))


def even(processes):
    """A stage a process, each with a second of F, dX and dW: the first layer, which has no dX,
    takes no time."""
    times = [(0.0, 0.0, 0.0)] + [(1.0, 1.0, 1.0)] * processes
    return [PlannedLayer(str(i), *t, 0.0, 8, 8, 8, False, 0) for i, t in enumerate(times)]


@pytest.mark.parametrize(("in_flight", "seconds"), [(4, 29), (5, 27), (8, 27)])
def test_fast_forward_fills_bubbles_with_weight_gradients(in_flight, seconds):
    plan = placed(even(4), "fast_forward", 4, FREE, 8, in_flight=in_flight)
    found = plan.simulated(8)
    assert found.makespan == seconds and found.in_flight <= in_flight
    gpipe = placed(even(4), "gpipe", 4, FREE, 8).simulated(8)
    assert gpipe.makespan == 30 and gpipe.in_flight == 8
    tasks = plan.tasks(3, 8)
    for b in range(8):
        assert tasks.index(Task("input_gradient", 4, b)) < tasks.index(
            Task("weight_gradient", 4, b)
        )


def test_modulo_deals_chunks_of_layers_in_turns():
    plan = planned("modulo", 3, chunk=2)
    assert [place.forward for place in plan.places] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]
    assert plan.delays == (0,) * 10


def wide():
    """One layer that is worth dividing."""
    layers = [
        PlannedLayer(str(i), 1.0, 1.0 * (i > 0), 1.0, 0.0, 8, 8, 8, True, 64) for i in range(4)
    ]
    return [*layers[:1], replace(layers[1], input_gradient=6.0), *layers[2:]]


def test_layerpipe_divides_a_large_input_gradient_in_sixteens():
    plans = {s: placed(wide(), s, 4, FREE) for s in ("1f1b", "intra", "layerpipe")}
    divided = [place for place in plans["layerpipe"].places if place.split]
    assert divided and all(p.split % 16 == 0 and 0 < p.split < 64 for p in divided)
    assert all(p.second_input_gradient != p.input_gradient for p in divided)
    assert not any(place.split for place in plans["intra"].places)
    periods = [plan.simulated(100).period for plan in plans.values()]
    assert periods == sorted(periods, reverse=True) and periods[2] < periods[1] < periods[0]


def test_layers_that_are_not_movable_stay_whole():
    fixed = [replace(layer, movable=False, channels=0) for layer in wide()]
    for place in placed(fixed, "layerpipe", 4, FREE).places:
        assert place.forward == place.input_gradient == place.weight_gradient
        assert place.split is None and place.second_input_gradient is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_is_the_plan(strategy):
    options = {"micro_batches": 3} if strategy in SYNCHRONOUS else {}
    options |= {"in_flight": 2} if strategy in FORWARDING else {}
    options |= {"chunk": 1} if strategy == "modulo" else {}
    plan = placed(wide(), strategy, 3, (1e-5, 1e-9), **options)
    assert PipelinePlan.from_state(plan.state()) == plan
    assert PipelinePlan.from_state(json.loads(json.dumps(plan.state()))) == plan
    assert plan.tasks(1, 6) == PipelinePlan.from_state(plan.state()).tasks(1, 6)
    assert replace(plan, delays=(9, 9, 9, 9)) != plan


def test_a_table_says_who_does_what():
    plan = placed(wide(), "layerpipe", 4, FREE)
    lines = str(plan).splitlines()
    assert len(lines) == 6 and lines[0].split()[:5] == ["layer", "F", "dX", "dW", "D"]
    assert lines[1].split()[:4] == ["0", "0", "-", "0"]  # the first layer has no dX
    i = next(i for i, place in enumerate(plan.places) if place.split)
    assert f"[0, {plan.places[i].split}), {plan.places[i].second_input_gradient}" in lines[i + 1]
    assert "layerpipe on 4 processes, simulated: " in lines[-1]
    shared = str(placed(wide(), "pipedream_replicated", 4, FREE))
    assert "0-3" in shared


def test_simulated_messages_take_time():
    free, slow = (placed(wide(), "1f1b", 2, network).simulated(40) for network in (FREE, (1, 0.1)))
    assert slow.makespan > free.makespan and slow.bytes == free.bytes > 0
    assert free.messages == 2 and 0 < free.busy <= 1


def test_a_gantt_chart_is_drawn_or_says_what_is_missing(tmp_path):
    plan = placed(wide(), "layerpipe", 4, FREE)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        with pytest.raises(optfuse.Error, match="pip install matplotlib"):
            plan.gantt(tmp_path / "plan.svg")
        return
    for name, start in (("plan.svg", b"<?xml"), ("plan.png", b"\x89PNG")):
        plan.gantt(tmp_path / name, batches=5)
        assert (tmp_path / name).read_bytes().startswith(start)


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Cut(nn.Module):
    def forward(self, x):
        return x.detach()


def tied():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def pruned():
    return nn.Sequential(
        nn.Linear(4, 4), prune.l1_unstructured(nn.Linear(4, 4), name="weight", amount=0.5)
    )


REFUSED = {
    "entries '0' and '2' that share a parameter; take a strategy": lambda: tied(),
    "entry '1' that returns tuple": lambda: nn.Sequential(nn.Linear(4, 4), Pair()),
    "entry '1' that .* can't copy: Only Tensors created explicitly": lambda: pruned(),
    "without layers": lambda: nn.Sequential(),
    "entry '1' whose output needs no gradient": lambda: nn.Sequential(nn.Linear(4, 4), Cut()),
}


@pytest.mark.parametrize("why", REFUSED)
def test_models_that_are_no_pipeline_are_refused(why):
    with pytest.raises(optfuse.Error, match=why):
        pipeline.plan(REFUSED[why](), torch.zeros(2, 4), 2, network=FREE)


WRONG = {
    "model": (None, nn.Linear(3, 3), [nn.Linear(3, 3)], nn.ModuleList([nn.Linear(3, 3)])),
    "example": (None, 3, [1.0], (torch.zeros(2),)),
    "processes": (None, 0, -1, 2.5, "2", True, 2**40),
    "strategy": (None, "", "PipeDream", 3, ["1f1b"]),
    "network": (3, (1,), (-1, 0), (0, math.nan), "fast"),
    "costs": (None, 3, "guessed", [1, 2], [(1, 2, 3)], [(1, 2, 3, -4)], [(1, 2, 3, math.inf)]),
    "micro_batches": (0, -1, 2.5, "2", True),
    "in_flight": (-1, 2.5, "2", True),
    "chunk": (0, -1, 2.5, "2", True),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    right = {"model": net(), "example": IMAGES, "processes": 2, "strategy": "gpipe"}
    right |= {"network": FREE, "costs": "analytic"}
    for value in WRONG[name]:
        with pytest.raises(optfuse.Error, match=rf"plan\(\) got {name}="):
            pipeline.plan(**{**right, name: value})


def test_calls_that_do_not_fit_are_refused():
    with pytest.raises(optfuse.Error, match="costs of 2 layers; the model has 10 entries"):
        planned(costs=[(1, 1, 1, 1)] * 2)
    with pytest.raises(optfuse.Error, match="only gpipe, .* have micro-batches"):
        planned("1f1b", micro_batches=2)
    with pytest.raises(optfuse.Error, match="keep to a number of batches in flight"):
        planned("1f1b_flush", in_flight=2)
    with pytest.raises(optfuse.Error, match="only modulo deals layers in chunks"):
        planned("fast_forward", chunk=2)
    with pytest.raises(optfuse.Error, match="there is one; give network="):
        planned(network=None)
    for batches in (0, -1, 2.5, None):
        with pytest.raises(optfuse.Error, match="batches="):
            planned().tasks(0, batches)
    assert planned("gpipe").micro_batches == planned("modulo").micro_batches == 12
    assert planned("fast_forward").in_flight == 6 and planned("gpipe").in_flight == 0
    assert planned("modulo").chunk == 1


def test_a_state_that_cannot_be_is_refused():
    plan = placed(wide(), "1f1b", 2, FREE)
    moved = replace(plan, places=(replace(plan.places[0], forward=5), *plan.places[1:]))
    with pytest.raises(optfuse.Error, match="layer 0 of a pipeline is placed on a process"):
        PipelinePlan.from_state(moved.state()).tasks(0, 3)


RANKS = """
import os, sys, torch, torch.distributed as dist
import optfuse
from optfuse import pipeline
rank = int(sys.argv[1])
dist.init_process_group("gloo", f"file://{sys.argv[2]}", rank=rank, world_size=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 8 + rank), torch.nn.Linear(8 + rank, 4))
plan = pipeline.plan(model, torch.zeros(2, 8), 2, "layerpipe")
told = [None, None]
dist.all_gather_object(told, plan.state())
assert told[0] == told[1] and told[0]["layers"][0]["out_elements"] == 16
assert min(plan.network) >= 0 < max(plan.network)  # measured
wrong = torch.zeros(2, 8 if rank else 7)
try:
    pipeline.plan(model, wrong, 2, "layerpipe", network=(0, 0))
except Exception as error:
    assert (type(error) is optfuse.Error) == (rank == 1) and "7" in str(error), error
else:
    raise SystemExit("the error of the first process is not known here")
dist.destroy_process_group()
"""


def test_the_plan_of_the_first_process_is_everybodys(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    outputs = [tmp_path / f"output-{rank}" for rank in range(2)]
    ranks = [started(out, script, i, tmp_path / "store") for i, out in enumerate(outputs)]
    for rank, out in zip(ranks, outputs, strict=True):
        assert rank.wait(timeout=120) == 0, Path(f"{out}.errors").read_text()


@pytest.fixture(scope="module")
def benchmarks():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield


def test_the_models_have_the_layers_of_their_papers(benchmarks):
    from pipeline_plan import totals

    assert totals("VGG-16") == {
        "layers": 16,
        "multiply_adds": 15_470_264_320,
        "parameters": 138_357_544,
    }
    found = totals("ResNet-50")
    assert (found["layers"], found["multiply_adds"]) == (54, 4_089_184_256)
    assert found["parameters"] == 25_557_032
    assert totals("AlexNet")["parameters"] == 61_100_840
    assert totals("AlexNet")["multiply_adds"] == 714_188_480
    assert totals("GPT-2 small")["layers"] == 61


def test_the_results_in_the_tree_are_those_of_today(benchmarks):
    from pipeline_plan import SETTINGS, lines, means

    stored = json.loads((ROOT / "benchmarks" / "results" / "pipeline-plan.json").read_text())
    gains = {(m["model"], m["setting"]): m["gains"] for m in stored["models"]}
    for model in ("VGG-16", "AlexNet"):  # the others take longer
        for setting in SETTINGS:
            rows = lines(model, setting)
            for strategy, of in gains[model, setting.name].items():
                assert means(rows, strategy) == pytest.approx(of, rel=1e-4)


def test_no_plan_gains_more_than_the_best_placement_and_that_than_any_schedule(benchmarks):
    from pipeline_plan import SETTINGS, lines

    for model in ("VGG-16", "AlexNet"):
        for row in lines(model, SETTINGS[0]):
            assert row["layerpipe"] <= row["best placement"] * (1 + 1e-9), row
            assert row["best placement"] <= row["any schedule"] * (1 + 1e-9), row
            assert row["pipedream_replicated"] <= row["any schedule"] * (1 + 1e-9), row
            if model == "VGG-16":
                assert row["layerpipe"] > 0.988 * row["best placement"], row
                assert row["any schedule"] < 1.62, row


def every_load(row, at=0, process=0, load=0.0, most=0.0):
    """The largest load of each way to put the tasks of layers one behind the other: every order,
    each task on the same process or the next, dX cut anywhere."""
    if at == len(row):
        yield process, max(most, load)
        return
    layer = row[at]
    seconds = {"F": layer.forward + layer.update, "W": layer.weight_gradient}
    cuts = range(16, layer.channels, 16) if at else ()
    ways = [{**seconds, "X": layer.input_gradient * (at > 0)}]
    for cut in cuts:
        part = layer.input_gradient * cut / layer.channels
        ways.append({**seconds, "X": part, "Y": layer.input_gradient - part})
    for way in ways:
        for order in itertools.permutations(way):
            for steps in itertools.product((0, 1), repeat=len(order)):
                found = put(order, steps, way, process, load, most)
                if found is not None:
                    yield from every_load(row, at + 1, *found)


def put(order, steps, seconds, process, load, most):
    on = {}
    for kind, step in zip(order, steps, strict=True):
        if step:
            process, most, load = process + 1, max(most, load), 0.0
        on[kind] = process
        load += seconds[kind]
    return None if on.get("Y", -1) == on["X"] else (process, load, most)


@pytest.mark.parametrize("seed", range(6))
def test_the_best_placement_is_the_best_of_all(benchmarks, seed):
    from pipeline_bound import best_placement

    draw = random.Random(seed)
    row = [
        PlannedLayer(str(i), *(draw.uniform(1, 9) for _ in range(4)), 8, 8, 8, True, 48)
        for i in range(2)
    ]
    found = list(every_load(row))
    for processes in (1, 2, 3, 4):
        least = min(load for process, load in found if process < processes)
        assert best_placement(row, processes) == pytest.approx(least, rel=1e-9)


def test_importing_optfuse_imports_no_matplotlib():
    python_ok("import sys, optfuse; assert 'matplotlib' not in sys.modules")

# SPDX-License-Identifier: BSD-3-Clause
"""A trial takes steps from the state that an optimizer has when it is fused. Where a script takes
it back to what came before, or changes its options, another trial comes first."""

import copy
import math

import pytest
import torch
from common import loss_of, net, refused, same
from torch.optim import Optimizer

import optfuse
from optfuse._updaters import ledger

MODES = ("forward", "backward")
COUPLED_STEPS = 3


class Early(Optimizer):
    """In the first steps the norm of all gradients of a group is a divisor of each. steps(): of a
    parameter, as the class below counts them."""

    def __init__(self, params, lr=1e-2, couples=False):
        super().__init__(params, {"lr": lr, "couples": couples})

    @torch.no_grad()
    def step(self, closure=None):
        self.count_all()
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            for p in given:
                self.count(p, self.state[p])
            norm = 1.0
            if group["couples"] or any(self.steps(group, p) <= COUPLED_STEPS for p in given):
                norm = 1 + torch.stack([p.grad.norm() for p in given]).norm()
            for p in given:
                p.sub_(p.grad / norm, alpha=group["lr"])

    def count_all(self):
        pass

    def count(self, p, state):
        pass


class ByNumber(Early):
    def count(self, p, state):
        state["t"] = state.get("t", 0) + 1

    def steps(self, group, p):
        return self.state[p]["t"]


class ByTensor(Early):
    def count(self, p, state):
        if not state:
            state["t"] = torch.zeros(())
        state["t"] += 1

    def steps(self, group, p):
        return int(self.state[p]["t"])


class ByTensorOfOne(ByTensor):
    def count(self, p, state):
        if not state:
            state["t"] = torch.zeros(1)
        state["t"] += 1


class ByOption(Early):
    def count_all(self):
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1

    def steps(self, group, p):
        return group["t"]


class ByAttribute(Early):
    t = 0

    def count_all(self):
        self.t = self.t + 1

    def steps(self, group, p):
        return self.t


REGISTERED = [ByNumber, ByTensor, ByTensorOfOne, ByOption, ByAttribute]


class TracedByNumber(ByNumber):
    pass


class TracedByTensor(ByTensor):
    pass


class TracedByOption(ByOption):
    pass


CLASSES = [*REGISTERED, TracedByNumber, TracedByTensor, TracedByOption]
TENSORS = (ByTensor, ByTensorOfOne, TracedByTensor)


@pytest.fixture(autouse=True, scope="module")
def registered():
    for cls in REGISTERED:
        optfuse.register(cls)
    yield
    for cls in REGISTERED:
        optfuse.register(cls, per_parameter=False)


def train(model, optimizer, i):
    optimizer.zero_grad()
    loss_of(model, i).backward()
    optimizer.step()


def late(make, mode, steps=6):
    """Fused where parameters no longer depend on each other; and its state of the first step."""
    model = net()
    optimizer = make(model.parameters())
    for i in range(steps):
        train(model, optimizer, i)
        if i == 0:
            early = copy.deepcopy(optimizer.state_dict())
            optimizer.early = dict(vars(optimizer)).get("t")
    optfuse.fuse(optimizer, mode=mode)
    for i in range(steps, steps + 3):
        train(model, optimizer, i)
    return model, optimizer, early


def load(optimizer, early):
    optimizer.load_state_dict(early)


def put_back(optimizer, early):
    """By hand, whatever the class counts in."""
    for group, then in zip(optimizer.param_groups, early["param_groups"], strict=True):
        if "t" in group:
            group["t"] = then["t"]
    if optimizer.early is not None:
        optimizer.t = optimizer.early
    for entry in optimizer.state.values() if len(early["state"][0]) else ():
        entry["t"] = torch.ones_like(entry["t"]) if torch.is_tensor(entry["t"]) else 1


def clear(optimizer, early):
    optimizer.state.clear()


def write(optimizer, early):
    for entry in optimizer.state.values():
        entry["t"].zero_()


WAYS = {"load_state_dict": load, "by hand": put_back, "cleared": clear, "in place": write}
REFUSED = [
    (make, way)
    for make in CLASSES
    for way in WAYS
    if way == "by hand"
    or (way == "load_state_dict" and make is not ByAttribute)
    or (way == "cleared" and make in (ByNumber, TracedByNumber, *TENSORS))
    or (way == "in place" and make in TENSORS)
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make, way", REFUSED)
def test_going_back_to_steps_that_couple_is_refused(make, way, mode):
    model, optimizer, early = late(make, mode)
    WAYS[way](optimizer, early)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        words = "independently"
        refused(lambda: train(model, optimizer, 9), words, way_out="unfuse")
        assert all(map(torch.equal, before, model.parameters())), "nothing was updated"
    optfuse.unfuse(optimizer)
    train(model, optimizer, 10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [ByNumber, TracedByNumber])
def test_an_option_that_couples_is_refused(make, mode):
    model, optimizer, _ = late(make, mode)
    optimizer.param_groups[0]["couples"] = True
    refused(lambda: train(model, optimizer, 9), "independently", way_out="unfuse")
    optimizer.zero_grad()
    optimizer.param_groups[0]["couples"] = False
    train(model, optimizer, 10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [ByNumber, TracedByNumber, TracedByOption])
def test_a_copy_was_tried_where_the_original_was(make, mode):
    model, optimizer, early = late(make, mode)
    optimizer.load_state_dict(early)
    words = "independently"

    def copied():
        train(*copy.deepcopy((model, optimizer)), 9)

    if make is ByNumber:  # a class that is not recorded is tried as it is copied
        refused(copied, words, way_out="as it is")
    else:
        refused(copied, words, way_out="unfuse")


class BySettings(Early):
    """An attribute, and a list."""

    def __init__(self, params):
        super().__init__(params)
        self.coupling = False
        self.param_groups[0]["flags"] = [False]

    def steps(self, group, p):
        return 1 if self.coupling or group["flags"][0] else COUPLED_STEPS + 1


class TracedBySettings(BySettings):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["attribute", "list"])
@pytest.mark.parametrize("make", [BySettings, TracedBySettings])
def test_attributes_and_lists_that_couple_are_refused(make, what, mode):
    optfuse.register(BySettings)
    model = net()
    optimizer = optfuse.fuse(make(model.parameters()), mode=mode)
    train(model, optimizer, 0)
    if what == "attribute":
        optimizer.coupling = True
    else:
        optimizer.param_groups[0]["flags"][0] = True
    refused(lambda: train(model, optimizer, 1), "independently", way_out="unfuse")
    optfuse.register(BySettings, per_parameter=False)


class ByLimits(Early):
    """A number that means: no limit."""

    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0] |= {"most": math.inf, "norm": -1.0, "pair": (2.0, 1), "every": -9}

    def steps(self, group, p):
        limited = group["most"] < math.inf or group["norm"] > 0 or group["every"] > 0
        return 1 if limited or group["pair"][0] < 0.75 else COUPLED_STEPS + 1


class TracedByLimits(ByLimits):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("option", "value"), [("most", 2.0), ("norm", 2.0), ("pair", (0.5, 1)), ("every", 3)]
)
@pytest.mark.parametrize("make", [ByLimits, TracedByLimits])
def test_a_number_on_the_other_side_of_one_in_the_code_is_tried(make, option, value, mode):
    optfuse.register(ByLimits)
    model = net()
    optimizer = optfuse.fuse(make(model.parameters()), mode=mode)
    for i in range(4):  # more of them are not tried, if they are on the same side
        train(model, optimizer, i)
        optimizer.param_groups[0]["every"] += 1 if option == "every" else 0
    optimizer.param_groups[0][option] = value
    refused(lambda: train(model, optimizer, 4), "independently", way_out="unfuse")
    optfuse.register(ByLimits, per_parameter=False)


class ByOthers(Early):
    """Compares its options with each other."""

    def __init__(self, params):
        torch.optim.Optimizer.__init__(self, params, dict(self.OPTIONS))

    OPTIONS = {"couples": False, "lr": 0.1, "momentum": 0.5, "limit": 0.75, "pair": (0.25, 2.5)}  # noqa: RUF012

    def steps(self, group, p):
        limited = group["momentum"] > group["limit"] or group["pair"][0] > group["momentum"]
        return 1 if limited else COUPLED_STEPS + 1


class TracedByOthers(ByOthers):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("option", "value"),
    [("momentum", 0.8), ("limit", 0.4), ("momentum", 0.2), ("pair", (0.6, 2.5))],
)
@pytest.mark.parametrize("make", [ByOthers, TracedByOthers])
def test_an_option_on_the_other_side_of_another_one_is_tried(make, option, value, mode):
    optfuse.register(ByOthers)
    model = net()
    optimizer = optfuse.fuse(make(model.parameters()), mode=mode)
    for i in range(4):
        train(model, optimizer, i)
        optimizer.param_groups[0]["momentum"] += 0.01  # on the same side
    optimizer.param_groups[0][option] = value
    refused(lambda: train(model, optimizer, 4), "independently", way_out="unfuse")
    optfuse.register(ByOthers, per_parameter=False)


class WaitsForState(Early):
    """Each group together where a parameter has no state."""

    def count(self, p, state):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            norm = 1.0
            if any(not self.state[p] for p in given):
                norm = 1 + torch.stack([p.grad.norm() for p in given]).norm()
            for p in given:
                self.state[p].setdefault("m", torch.zeros_like(p))
                self.state[p]["m"].mul_(0.9).add_(p.grad / norm)
                p.sub_(self.state[p]["m"], alpha=group["lr"])


class TracedWaitsForState(WaitsForState):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [WaitsForState, TracedWaitsForState])
def test_first_steps_of_all_parameters_together_are_refused(make, mode):
    """Also where they come again after the class was fused in the middle of training."""
    optfuse.register(WaitsForState)
    model = net()
    optimizer = make(model.parameters())
    refused(lambda: optfuse.fuse(optimizer, mode=mode), "independently", way_out="as it is")
    for i in range(5):
        train(model, optimizer, i)
    optfuse.fuse(optimizer, mode=mode)
    train(model, optimizer, 5)
    optimizer.state.clear()
    refused(lambda: train(model, optimizer, 6), "independently", way_out="unfuse")
    optfuse.register(WaitsForState, per_parameter=False)


class Fresh(ByNumber):
    """Its first steps are like all others."""

    def steps(self, group, p):
        return COUPLED_STEPS + 1


class TracedFresh(Fresh):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [Fresh, TracedFresh])
def test_a_class_that_passes_another_trial_goes_on(make, mode):
    def script(wrap):
        optfuse.register(Fresh)
        model = net()
        optimizer = make(model.parameters())
        for i in range(12):
            if i == 4:
                optimizer = wrap(optimizer)
            if i == 1:
                early = copy.deepcopy(optimizer.state_dict())
            if i == 6:
                optimizer.load_state_dict(early)
            if i == 8:
                optimizer.state.clear()
            if i == 10:
                optimizer.param_groups[0]["couples"] = None
            train(model, optimizer, i)
            yield "weights", list(model.parameters())
            yield "state", optimizer.state_dict()

    same(script, mode=mode, prove=False)
    optfuse.register(Fresh, per_parameter=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [Fresh, TracedFresh])
@pytest.mark.parametrize("before", [0, 3])
def test_training_tries_nothing_again(before, make, mode, monkeypatch):
    """Nor do schedulers, a checkpoint of later steps, and notes that the class does not read."""
    optfuse.register(Fresh)
    model = net()
    optimizer = make(model.parameters())
    optimizer.param_groups[0]["epoch_of_script"] = 0
    for i in range(before):
        train(model, optimizer, i)
    optfuse.fuse(optimizer, mode=mode)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: (i % 3) / 2)
    monkeypatch.setattr(ledger, "check_promise", lambda *_: pytest.fail("another trial"))
    for i in range(12):
        train(model, optimizer, i)
        schedule.step()
        optimizer.param_groups[0]["epoch_of_script"] = i
        if i == 6:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optfuse.register(Fresh, per_parameter=False)


def test_a_parameter_without_state_is_tried_beside_those_with_state():
    """One that gets its first gradient later has its first steps then."""
    model = net()
    last = list(model.parameters())[-1]
    last.requires_grad_(False)
    optimizer = ByNumber(model.parameters())
    for i in range(6):
        train(model, optimizer, i)
    last.requires_grad_(True)
    refused(lambda: optfuse.fuse(optimizer), "independently", way_out="as it is")

# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of C++ programs, for the world of deeds: one of Python holds options and state, and
one of torch::optim, fused by optfuse.hpp, trains (tests/cxx/door.cpp). Stock is Python's with
fused=True, whose bits optfuse.hpp promises."""

import copy
import os
from collections.abc import MutableMapping
from pathlib import Path

import torch

import optfuse

AVERAGES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
ADAM = ("lr", "eps", "weight_decay", "amsgrad")
# Options and tensors of the state, by class.
OPTIONS = {
    "AdamW": (ADAM, AVERAGES),
    "Adam": (ADAM, AVERAGES),
    "SGD": (("lr", "momentum", "dampening", "weight_decay", "nesterov"), ("momentum_buffer",)),
    "RMSprop": (
        ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
        ("square_avg", "momentum_buffer", "grad_avg"),
    ),
    "Adagrad": (
        ("lr", "lr_decay", "weight_decay", "eps", "initial_accumulator_value"),
        ("sum",),
    ),
}

# Deeds that are not played through this door, by the reason.
LEFT_OUT = {
    "calls of optfuse, of an optimizer of Python": (
        "flush unfuse_and_fuse_again train_one_round_unfused unfuse_before_step "
        "train_with_an_average change_where_tensors_lie replay_a_graph iteration_in_another_order "
        "clip_an_odd_gradient clip_by_optfuse clipped_by_optfuse clip_near_the_norm "
        "clipped_before_more_is_added "
        "zero_an_older_gradient "
        "evict_the_hooks_of_gradients groups_changed_inside_backward accumulate_with_marks "
        "backward_that_only_adds backward_that_adds_for_one exception_in_a_pass_that_adds "
    ),
    "copies and hooks of an optimizer of Python": (
        "copy_before_step go_on_with_deepcopies resume_from_memory train_beside_a_copy "
        "hook_before_step hook_before_step_on_gradients hook_on_gradients_of_a_loaded_optimizer "
        "step_with_a_hook_that_changes scheduler_from_before_fuse step_of_an_instance_is_wrapped "
        "train_under_a_profiler profiler_that_a_closure_starts clip_under_a_profiler "
        "profiler_that_is_switched_on_again hook_that_a_closure_adds group_that_a_closure_adds "
        "group_that_can_not_be_added gradient_whose_end_changes_the_optimizer "
        "entries_under_other_keys hooks_of_every_kind hooks_from_before_fuse "
        "hook_that_makes_the_state "
        "hook_that_makes_state_when_others_have_some another_optimizer_of_its_class "
        "state_of_what_is_no_parameter step_by_a_compiled_function replace_the_optimizer "
        "load_its_earlier_state"
    ),
    "memory that leaves past operators, before which C++ calls flush()": (
        "give_memory_away give_gradients_away_and_clip gradient_leaves gradient_leaves_before_step "
        "iteration_under_a_profiler"
    ),
    "maximize, scales, DTensors and tensors that exchange their insides": (
        "scale_before_backward scale_before_step overwrite_an_alias_of_a_dtensor "
        "overwrite_an_alias_of_a_dtensor_before_step change_every_option toggle_maximize "
        "toggle_amsgrad_or_nesterov scaled scaled_and_folded "
        "scaled_in_another_dtype "
        "step_with_a_late_scale step_with_scale swap_tensors swap_tensors_before_step "
        "apply_under_swap_mode dtensor_leaves dtensor_leaves_before_step "
        "step_with_dtensors_of_others "
        "overwrite_dtensors_before_step zero_an_older_dtensor"
    ),
}


# Not in random programs: `data =` of a tensor of state, here an alias, exchanges only the alias's.
BY_DATA = ("write", "write_before_step")


def left_out():
    return " ".join(LEFT_OUT.values()).split()


def library_of(library):
    """The door's, of the same build."""
    return library.parents[1] / "tests" / "cxx" / "libcxx_door.so"


def load():
    torch.classes.load_library(str(library_of(Path(os.environ["OPTFUSE_LIBRARY"]))))


def groups_of(optimizer):
    """The parameters and options of each."""
    params, numbers = [], []
    for group in optimizer.param_groups:
        params.append(list(group["params"]))
        its = {name: float(group[name]) for name in OPTIONS[optimizer._cxx][0]}
        if "betas" in group:
            its["beta1"], its["beta2"] = map(float, group["betas"])
        numbers.append(its)
    return params, numbers


def call(function, *arguments):
    try:
        return function(*arguments)
    except RuntimeError as error:
        if "optfuse: " in str(error):
            raise optfuse.Error(str(error)) from None
        raise


NO_STATE = -2  # a counter


class Entry(MutableMapping, dict):
    """The state of a parameter. Nothing of it but the counter is held here: an update would not run
    in backward() where somebody else holds a tensor of it."""

    def __init__(self, state, p):
        super().__init__()
        self.state, self.p = state, p

    def now(self):
        door, step = self.state.door, self.state.door.counter(self.p)
        if step == NO_STATE:
            return {}
        counter = {"step": self.state.counter(self.p, step)} if step >= 0 else {}
        named = zip(self.state.names, door.tensors(self.p), strict=True)
        found = {name: value for name, value in named if value is not None}
        return {**counter, **found, **self.state.notes.get(self.p, {})}

    def put(self, items):
        known = {"step", *self.state.names}
        self.state.notes[self.p] = {k: v for k, v in items.items() if k not in known}
        tensors = [items.get(name) for name in self.state.names]
        self.state.door.set_state(self.p, tensors, int(items.get("step", -1)))

    def __getitem__(self, name):
        return self.now()[name]

    def __setitem__(self, name, value):
        self.put({**self.now(), name: value})

    def __delitem__(self, name):
        self.put({k: v for k, v in self.now().items() if k != name})

    def __iter__(self):
        return iter(self.now())

    def __len__(self):
        return len(self.now())

    def __deepcopy__(self, memo):
        return copy.deepcopy(self.now(), memo)

    def __reduce__(self):
        return dict, (self.now(),)


class State(MutableMapping, dict):
    """The state of an optimizer, in stock's order, which is that of first updates."""

    def __init__(self, door, names):
        super().__init__()
        self.door, self.names = door, names
        self.order, self.counters, self.known, self.notes = {}, {}, {}, {}

    def counter(self, p, step):
        """A tensor, as Python has it; a script may write to it."""
        self.known.setdefault(p, step)
        return self.counters.setdefault(p, torch.tensor(float(step)))

    def tell(self, p):
        if p in self.counters and int(self.counters[p]) != self.known[p]:
            self.door.set_state(p, self.door.tensors(p), int(self.counters[p]))

    def learn(self, p):
        step = self.door.counter(p)
        if step >= 0:
            self.counter(p, step).fill_(step)
            self.known[p] = step

    def __getitem__(self, p):
        return Entry(self, p)

    def __setitem__(self, p, items):
        self.counters.pop(p, None)
        if isinstance(items.get("step"), torch.Tensor):
            self.counters[p], self.known[p] = items["step"], int(items["step"])
        Entry(self, p).put(items)
        self.order.setdefault(p)

    def __delitem__(self, p):
        self.door.drop_state(p)
        self.counters.pop(p, None)
        self.order.pop(p, None)

    def pop(self, p, *default):
        """A copy, since an Entry shows what is there."""
        kept = self[p].now()
        if p in self:
            del self[p]
        return kept or default[0]

    def __iter__(self):
        return iter([p for p in self.order if p in self])

    def __len__(self):
        return len(list(iter(self)))

    def __contains__(self, p):
        return self.door.counter(p) != NO_STATE


class ByDoor:
    """The optimizer's class, before its own."""

    def tell(self):
        """Options, groups and state that have changed here."""
        params, numbers = groups_of(self)
        self._door.tell(params, numbers)
        if not isinstance(self.state, State):  # it has been loaded or replaced
            items, self.state = self.state, self._state
            self.state.clear()
            self.state.update(items)
        for p in list(self.state):
            self.state.tell(p)

    def learn(self, in_order=False):
        """Counters; and, after step(), whose state is new."""
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            self._state.learn(p)
        if in_order:
            self._state.order |= {p: None for p in params if p in self._state}

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.tell()
        call(self._door.step)
        self.learn(in_order=True)
        return loss

    def zero_grad(self, set_to_none=True):
        self.tell()
        call(self._door.zero_grad, set_to_none)


def enter(optimizer, in_backward, passes, bucket_bytes):
    """Gives it to the door."""
    cls = type(optimizer)
    optimizer.__class__ = type(f"{cls.__name__}InCxx", (ByDoor, cls), {})
    optimizer._door = torch.classes.optfuse_door.Door(optimizer._cxx, *groups_of(optimizer))
    optimizer._state = State(optimizer._door, OPTIONS[optimizer._cxx][1])
    optimizer.tell()
    call(optimizer._door.fuse, in_backward, passes, bucket_bytes)
    return optimizer

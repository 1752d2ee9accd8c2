# SPDX-License-Identifier: BSD-3-Clause
"""A step() that leaves something outside of the optimizer is never run more often than it is
recorded: not to learn it, and not in vain."""

import contextlib
import functools
import importlib
import itertools
import math
import os
import random
import sys
import time
import types
import warnings

import counters
import pytest
import torch
from counters import Meter, kept_by_a_call
from counters import more as imported
from replayed import Replayed, compare, learned, played

BY_NUMPY = importlib.import_module("numpy")
DRAWN = BY_NUMPY.random.default_rng(0)


class Counts(Replayed):
    """Late, where no trial comes, steps count outside of the optimizer."""

    total = 0
    kept: list[int] = []

    def later(self, p, grad, state, group, is_late):
        if is_late:
            p.sub_(grad, alpha=0.01 * self.more())

    def more(self):
        return 1


def in_a_list(optimizer):
    counters.items.append(1)
    return len(counters.items)


def in_a_queue(optimizer):
    queue = counters.queue
    queue.append(1)
    return len(queue)


def in_a_table(optimizer):
    counters.table["x"] += 1
    return counters.table["x"]


def in_a_module(optimizer):
    counters.total += 1
    return counters.total


def in_a_variable_that_is_a_module(optimizer):
    module = counters
    module.total += 1
    return module.total


def by_name(optimizer):
    setattr(counters, "total", counters.total + 1)  # noqa: B010
    return counters.total


def by_vars(optimizer):
    vars(counters)["total"] += 1
    return counters.total


def by_dict(optimizer):
    counters.__dict__["total"] += 1
    return counters.total


def by_globals(optimizer):
    globals()["COUNTED"] = globals().get("COUNTED", 0) + 1
    return COUNTED  # noqa: F821


def by_a_table_of_modules(optimizer):
    sys.modules["counters"].total += 1
    return counters.total


def by_importing(optimizer):
    import counters as module

    module.total += 1
    return module.total


def by_importing_a_name(optimizer):
    from counters import items

    items.append(1)
    return len(items)


def by_a_name_of_a_module(optimizer):
    module = importlib.import_module("counters")
    module.total += 1
    return module.total


def in_a_module_of_pythons(optimizer):
    math.total = getattr(math, "total", 0) + 1
    return math.total


def in_a_variable_that_is_a_module_of_pythons(optimizer):
    module = math
    module.total = getattr(module, "total", 0) + 1
    return module.total


def in_torch(optimizer):
    torch.__dict__["total"] = getattr(torch, "total", 0) + 1
    return torch.total


def by_a_function_of_a_module(optimizer):
    return counters.more()


def by_an_imported_function(optimizer):
    return imported()


def by_a_function_with_an_argument(optimizer):
    return counters.bump(counters)


def by_a_function_on_the_class(optimizer):
    return counters.bump(type(optimizer))


def by_a_function_on_another_class(optimizer):
    return counters.bump(Meter)


def by_a_function_that_sets_by_name(optimizer):
    return counters.set_by_name(Meter)


def by_a_class_of_a_module(optimizer):
    return counters.Meter.more()


def by_a_static_method(optimizer):
    return Meter.keep()


def in_a_list_of_another_class(optimizer):
    Meter.kept.append(1)
    return len(Meter.kept)


def by_making_an_object(optimizer):
    Meter()
    return len(Meter.kept)


def by_an_object_of_a_module(optimizer):
    return counters.box()


def by_a_property(optimizer):
    return counters.box.read


def in_a_function(optimizer):
    return counters.with_an_attribute()


def in_what_a_call_has_kept(optimizer):
    kept_by_a_call().append(1)
    return len(kept_by_a_call())


def by_a_call_that_is_kept(optimizer):
    return counters.counted_once(counters.total)


def by_a_context(optimizer):
    with counters.counted() as n:
        return n


def by_a_generator(optimizer):
    return next(counters.generator)


def in_a_context_variable(optimizer):
    counters.context.set(counters.context.get() + 1)
    return counters.context.get()


def in_a_thread(optimizer):
    counters.here.n += 1
    return counters.here.n


def by_a_weak_reference(optimizer):
    counters.weak[counters.box] += 1
    return counters.weak[counters.box]


def in_the_environment(optimizer):
    os.environ["COUNTED"] = str(int(os.environ.get("COUNTED", 0)) + 1)
    return int(os.environ["COUNTED"])


def by_a_number_of_numpy(optimizer):
    return float(DRAWN.integers(5))


def by_a_random_number_of_numpy(optimizer):
    return float(BY_NUMPY.random.rand())


def by_a_random_number(optimizer):
    return random.Random(3).random() + random.uniform(0, 1)


def in_the_class_by_its_own_name(optimizer):
    Counts.total += 1
    return Counts.total


def in_a_list_of_the_class(optimizer):
    type(optimizer).kept.append(1)
    return len(optimizer.kept)


def by_running_text(optimizer):
    exec("counters.total += 1")
    return counters.total


def by_a_lambda(optimizer):
    return (lambda: counters.items.append(1) or len(counters.items))()


PLACES = (in_a_list, in_a_queue, in_a_table, in_a_module, in_a_variable_that_is_a_module)
PLACES += (by_name, by_vars, by_dict, by_globals, by_a_table_of_modules, by_importing)
PLACES += (by_importing_a_name, by_a_name_of_a_module, in_a_module_of_pythons)
PLACES += (in_a_variable_that_is_a_module_of_pythons, in_torch, by_a_function_of_a_module)
PLACES += (by_an_imported_function, by_a_function_with_an_argument, by_a_function_on_the_class)
PLACES += (by_a_function_on_another_class, by_a_function_that_sets_by_name)
PLACES += (by_a_class_of_a_module, by_a_static_method, in_a_list_of_another_class)
PLACES += (by_making_an_object, by_an_object_of_a_module, by_a_property, in_a_function)
PLACES += (in_what_a_call_has_kept, by_a_call_that_is_kept, by_a_context, by_a_generator)
PLACES += (in_a_context_variable, in_a_thread, by_a_weak_reference, in_the_environment)
PLACES += (by_a_number_of_numpy, by_a_random_number_of_numpy, by_a_random_number)
PLACES += (in_the_class_by_its_own_name, in_a_list_of_the_class, by_running_text, by_a_lambda)


def from_0(cls):
    """As it was before the first step; a class of its own, as what is known of one is kept."""
    global DRAWN
    counters.reset()
    random.seed(0)
    BY_NUMPY.random.seed(0)
    DRAWN = BY_NUMPY.random.default_rng(0)
    Counts.total = 0
    Counts.kept.clear()
    os.environ.pop("COUNTED", None)
    for module in (math, torch, sys.modules[__name__]):
        vars(module).pop("COUNTED" if module.__name__ == __name__ else "total", None)
    return type(cls.__name__, (cls,), {"total": 0})


def assert_runs_once(cls):
    traced = compare(lambda params: from_0(cls)(params), "forward", ((31,),))
    assert not traced.untraced and learned(traced._cohorts[0]) == 0


@pytest.mark.parametrize("place", PLACES)
def test_what_a_step_leaves_elsewhere_is_left_once(place):
    assert_runs_once(type("Counts", (Counts,), {"more": place}))


class ByAClassMethod(Counts):
    @classmethod
    def more(cls):
        cls.total += 1
        return cls.total


class ByAProperty(Counts):
    @property
    def count(self):
        return counters.more()

    def more(self):
        return self.count


class ByAMissingAttribute(Counts):
    def __getattr__(self, name):
        if name != "count":
            raise AttributeError(name)
        return counters.more()

    def more(self):
        return self.count


class BySettingAnAttribute(Counts):
    def __setattr__(self, name, value):
        if name == "mark":
            counters.more()
        super().__setattr__(name, value)

    def more(self):
        self.mark = 1
        del self.mark
        return counters.total


class ByADescriptor(Counts):
    class Count:
        n = 0

        def __get__(self, owner, kind):
            return counters.more()

    count = Count()

    def more(self):
        return self.count


class ByAMethodOfAName(Counts):
    def _more_of_it(self):
        return counters.more()

    def more(self):
        return getattr(self, "_more" + "_of_it")()


class ByItsBase(Counts):
    class Base(Counts):
        def more(self):
            return counters.more()

    def more(self):
        return ByItsBase.Base.more(self)


class ByAnAttributeThatIsAClass(Counts):
    def __init__(self, params):
        super().__init__(params)
        self.kind = Meter

    def more(self):
        return self.kind.more()


class ByAnAttributeThatIsAMethod(Counts):
    def __init__(self, params):
        super().__init__(params)
        self.more = types.MethodType(by_an_imported_function, self)


class ByAnAttributeThatIsAFunction(Counts):
    def __init__(self, params):
        super().__init__(params)
        self.of = lambda: imported()

    def more(self):
        return self.of()


class ByAPartOfAFunction(Counts):
    def __init__(self, params):
        super().__init__(params)
        self.more = functools.partial(counters.more)


class ByAnOptionThatIsAFunction(Counts):
    def __init__(self, params):
        super().__init__(params, count=counters.more)

    def more(self):
        return self.param_groups[0]["count"]()


class ByAnIteratorOfIts(Counts):
    def __init__(self, params):
        super().__init__(params)
        self.each = itertools.count(1)

    def more(self):
        return next(self.each)


CLASSES = (ByAClassMethod, ByAProperty, ByAMissingAttribute, BySettingAnAttribute, ByADescriptor)
CLASSES += (ByAMethodOfAName, ByItsBase, ByAnAttributeThatIsAClass)
CLASSES += (ByAnAttributeThatIsAMethod, ByAnAttributeThatIsAFunction, ByAPartOfAFunction)
CLASSES += (ByAnOptionThatIsAFunction, ByAnIteratorOfIts)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_class_that_leaves_something_elsewhere_leaves_it_once(cls):
    assert_runs_once(cls)


def says(optimizer):
    print("said")
    return 1


def warns(optimizer):
    warnings.warn("said", stacklevel=1)
    return 1


def waits(optimizer):
    return 1 if time.monotonic_ns() else 0


@pytest.mark.parametrize("effect", (says, warns, waits))
def test_what_a_step_says_is_said_once(effect):
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        assert_runs_once(type("Counts", (Counts,), {"more": effect}))


class ReadsOnly(Counts):
    """Other names of the same kinds, and code that step() does not reach."""

    def __setstate__(self, state):
        counters.items.append(1)
        super().__setstate__(state)

    def more(self):
        has = hasattr(torch, "_foreach_add_") and type(self) is not Replayed
        return math.sqrt(4.0) if has else 1


def test_code_that_no_step_reaches_does_not_count():
    traced = compare(lambda params: from_0(ReadsOnly)(params), "forward", ((31,),))
    assert played(traced._cohorts[0]) > 20

# SPDX-License-Identifier: BSD-3-Clause
"""The table of deeds. A deed is a function of the world: what a script does at some place of its
training. Its other arguments are drawn when a program is, so that a program is plain data."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

# Where a deed happens.
BETWEEN = "between"  # two iterations: after step(), while updates are pending
ANYWHERE = "anywhere"  # between two calls of any kind, such as backward() and step()
BEFORE_FUSE = "before fuse"
# In the next iteration; the deeds of an iteration are played in it, place by place.
BEFORE_BACKWARD, BEFORE_STEP = "before backward", "before step"
IN_BACKWARD = "in backward"  # in a hook behind each gradient, of world.hooked
BACKWARD, STEP = "backward", "step"  # in the place of this call; BACKWARD is given the loss
ALONE = "alone"  # makes and trains all that it needs
ARMED = (BEFORE_BACKWARD, IN_BACKWARD, BEFORE_STEP, BACKWARD, STEP)
PLACES = (BETWEEN, ANYWHERE, BEFORE_FUSE, *ARMED, ALONE)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a deed in a mode, by its word in docs/hazards.md; words of the message, if it
    raises."""

    what: str
    words: tuple[str, ...] = ()


EQUAL = Outcome("equal")
LAUNCHES = Outcome("launches first")  # the update that is pending; then equal
LEFT = Outcome("left to step()")  # the update, and equal
EITHER = Outcome("equal or raises")  # by its arguments and the kind of optimizer
DIFFERS = Outcome("differs")  # as docs/hazards.md says


def raises(*words):
    """optfuse.Error, with these words."""
    return Outcome("raises", words)


def consumed(*words):
    """Raises where backward() has used the gradients up: optimizers with kernels do."""
    return lambda kind, **_: raises(*words) if kind.way == "native" else EITHER


@dataclass(frozen=True)
class Deed:
    name: str
    function: Callable[..., None]
    where: str = BETWEEN
    choices: dict[str, Sequence | dict] = field(
        default_factory=dict
    )  # argument -> what it is drawn from
    weight: int = 0  # how often random programs have it
    # By modes, and "stock" and "late"; or functions of a kind and the arguments.
    outcomes: dict[str, Outcome | Callable[..., Outcome]] = field(default_factory=dict)
    faults: Sequence[tuple[str, ...]] = ()
    kinds: Sequence[str] | Callable | None = None
    make: Callable | None = None
    models: Sequence[str] = ("mlp",)
    spares: Sequence[str] = ()  # models that random programs don't have with it
    setup: dict = field(default_factory=dict)
    turns: int = 2
    proves: bool = False
    product: bool = False
    every: bool | tuple[str, ...] = False
    goes_on: bool = False

    @property
    def title(self):
        said = (self.function.__doc__ or "").strip().split("\n")[0].rstrip(".")
        return said or self.name.replace("_", " ")

    @property
    def is_gentle(self):
        """Backward mode runs it to its end."""
        return self.outcomes["backward"] in (EQUAL, LEFT)

    def outcome(self, mode, kind, arguments, late=False):
        found = self.outcomes["late" if late and mode == "backward" else mode]
        return found if isinstance(found, Outcome) else found(kind, **arguments)

    def call(self, world, arguments, *given):
        """With the values of a table of choices, of which arguments have the names."""
        meant = {
            name: choices[value] if isinstance(choices := self.choices[name], dict) else value
            for name, value in arguments.items()
        }
        self.function(world, *given, **meant)

    def draw(self, rng):
        return {name: rng.choice(tuple(values)) for name, values in self.choices.items()}

    def variants(self):
        """Arguments: the first of each, and every other one beside the first of the others."""
        lists = {
            name: values[:1] if isinstance(values, range) else tuple(dict.fromkeys(values))
            for name, values in self.choices.items()
        }
        if self.product:
            for chosen in itertools.product(*lists.values()):
                yield dict(zip(lists, chosen, strict=True))
            return
        plain = {name: values[0] for name, values in lists.items()}
        yield plain
        for name, values in lists.items():
            for value in values[1:]:
                yield {**plain, name: value}

    def takes(self, kind):
        if callable(self.kinds):
            return self.kinds(kind)
        return self.kinds is None or kind.name.removesuffix(" in C++") in self.kinds


DEEDS: dict[str, Deed] = {}
GUARDS: dict[str, str] = {}  # the deed that fails without it


def named(choices):
    """Functions by their names, so that a program can be printed."""
    if not isinstance(choices, dict) and all(hasattr(one, "__name__") for one in choices):
        return {one.__name__: one for one in choices}
    return choices


def deed(
    where=BETWEEN,
    *,
    weight=2,
    forward=EQUAL,
    backward=EQUAL,
    late=EITHER,
    stock=EQUAL,
    fault=(),
    kinds=None,
    make=None,
    models=("mlp",),
    spares=(),
    setup=None,
    turns=2,
    proves=True,
    product=False,
    every=False,
    goes_on=False,
    **choices,
):
    """where: one of the places above.
    forward, backward: what comes of it in this mode, or a function of the kind of optimizer and
        the arguments that says so; late: in backward mode between backward() and step();
        stock: EITHER if stock may raise
    fault: the guard without which it fails, and others that are off in both runs, because each
        of them would catch the fault too; or a list of such
    kinds: names of optimizers.KINDS, or a function of a kind; make: an optimizer of the deed's own,
        given parameters
    models: names of models.MODELS; spares: those that random programs don't have with it
    setup: more of World's, as {"accumulate": 2}
    turns: how often test_each plays it in a program; proves: with updates pending in forward mode
    weight: how often random programs have it; 0: never
    product: test_each plays each argument with each of the others; every: each with each kind and
        model; or the names of the kinds
    goes_on: after the error of backward mode step() confirms the update, and training goes on
    choices: its arguments, drawn from these; of a dict, or of functions, a name is drawn, and the
        deed is given what it stands for; of a range, test_each takes the first one only"""

    def register(function):
        name = function.__name__
        assert name not in DEEDS, f"there are two deeds {name}"
        assert where in PLACES, where
        drawn = {key: named(values) for key, values in choices.items()}
        outcomes = {"forward": forward, "backward": backward, "late": late, "stock": stock}
        faults = fault if isinstance(fault, list) else [fault]
        faults = [(guards,) if isinstance(guards, str) else guards for guards in faults if guards]
        GUARDS.update((guards[0], name) for guards in faults)
        often = 0 if make or setup or where == ALONE else weight
        DEEDS[name] = Deed(
            name,
            function,
            where,
            drawn,
            often,
            outcomes,
            faults,
            kinds,
            make,
            models,
            spares,
            setup or {},
            turns,
            proves,
            product,
            every,
            goes_on,
        )
        return function

    return register


def elsewhere(run, *given):
    """Calls run() in another thread, and returns or raises what it does."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run, *given).result()


# Values that arguments are commonly drawn from. An index counts modulo what is there.
INDEX = range(12)
BATCH = range(6)
BOOL = (False, True)

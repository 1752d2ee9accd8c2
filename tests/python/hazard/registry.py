# SPDX-License-Identifier: BSD-3-Clause
"""The table of actions. An action is a function of the world; its arguments are
drawn when a program is generated, so that a program is plain data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    name: str
    function: Callable[..., None]
    choices: dict[str, Sequence]  # argument -> what it is drawn from
    weight: int  # how often it is drawn
    gentle: bool  # fits a program that backward fusion can run to its end
    between: bool  # has a meaning in backward mode between backward and step()

    def draw(self, rng):
        return {name: rng.choice(values) for name, values in self.choices.items()}


ACTIONS: dict[str, Action] = {}


def action(weight=2, gentle=False, between=False, **choices):
    def register(function):
        name = function.__name__
        assert name not in ACTIONS, name
        drawn = {key: tuple(values) for key, values in choices.items()}
        ACTIONS[name] = Action(name, function, drawn, weight, gentle, between)
        return function

    return register


# Values that arguments are commonly drawn from. An index counts modulo what is there.
INDEX = range(12)
BATCH = range(6)
BOOL = (False, True)

# SPDX-License-Identifier: BSD-3-Clause
"""Delta debugging: the fewest actions with which a program still fails."""


def without(actions, start, size):
    return actions[:start] + actions[start + size :]


def shrink(program, fails):
    """fails(program): whether it still does."""
    actions = list(program.actions)
    size = max(1, len(actions) // 2)
    while size:
        start = 0
        smaller = False
        while start < len(actions):
            fewer = without(actions, start, size)
            if fails(program.with_actions(fewer)):
                actions, smaller = fewer, True
            else:
                start += size
        if size > 1 or not smaller:
            size //= 2
    return simplify(program.with_actions(actions), fails)


def simplify(program, fails):
    """A setup with less in it, if it fails too."""
    for part in ("models", "optimizers"):
        while len(program.setup[part]) > 1:
            for i in range(len(program.setup[part])):
                setup = {**program.setup, part: without(program.setup[part], i, 1)}
                candidate = type(program)(program.seed, setup, program.actions)
                if fails(candidate):
                    program = candidate
                    break
            else:
                break
    return program

# SPDX-License-Identifier: BSD-3-Clause
"""A module in which the steps of test_traced_elsewhere.py count."""

import contextlib
import functools
import threading
import weakref
from collections import deque
from contextvars import ContextVar

total = 0
items: list[int] = []
queue: deque[int] = deque()
table = {"x": 0}
here = threading.local()
context: ContextVar[int] = ContextVar("context")


class Meter:
    total = 0
    kept: list[int] = []

    def __init__(self):
        Meter.kept.append(1)

    @classmethod
    def more(cls):
        cls.total += 1
        return cls.total

    @staticmethod
    def keep():
        Meter.kept.append(1)
        return len(Meter.kept)


class Box:
    n = 0

    def __call__(self):
        self.n += 1
        return self.n

    @property
    def read(self):
        return self()


box = Box()
weak: weakref.WeakKeyDictionary[Box, int] = weakref.WeakKeyDictionary()


def more():
    global total
    total += 1
    return total


def bump(what):
    what.total += 1
    return what.total


def set_by_name(what):
    setattr(what, "total", what.total + 1)  # noqa: B010
    return what.total


@functools.lru_cache
def kept_by_a_call():
    return []


@functools.lru_cache
def counted_once(n):
    return more()


@contextlib.contextmanager
def counted():
    yield more()


def numbers():
    while True:
        yield more()


generator = numbers()


def with_an_attribute():
    with_an_attribute.total += 1
    return with_an_attribute.total


with_an_attribute.total = 0


def reset():
    global total, generator
    total, Meter.total, with_an_attribute.total, box.n, generator = 0, 0, 0, 0, numbers()
    for one in (items, queue, Meter.kept):
        one.clear()
    table["x"] = here.n = weak[box] = 0
    context.set(0)
    kept_by_a_call.cache_clear()
    counted_once.cache_clear()

# SPDX-License-Identifier: BSD-3-Clause
"""The script that most tests play (see common.py): train, and do something in between."""

import types

from common import adamw, everything, loss_of, net


def told(name, value):
    """The values that a callback gives to compare: all it yields, or the one it returns."""
    if isinstance(value, types.GeneratorType):
        yield from value
    elif value is not None:
        yield name, value


def trained(
    make=adamw,
    model=net,
    *,
    start=None,
    loss=loss_of,
    iteration=None,
    before_step=None,
    between=None,
    steps=6,
    zeroing=True,
    pending=None,
):
    """A script that trains model() by make(its parameters). Its callbacks are given the model,
    the optimizer and the number of the iteration, and may yield pairs to compare.

    start: given wrap, returns the model and its optimizer, in place of model() and make()
    loss: of the model and the number of the iteration
    iteration: in place of zero_grad(), loss(), backward() and step()
    before_step: with the gradients ready
    between: after step(), while its updates are pending
    zeroing: the argument of zero_grad()
    pending: whether updates must be pending after an iteration; if no other iteration is given"""
    pending = iteration is None if pending is None else pending

    def begin(wrap):
        it = model()
        return it, wrap(make(it.parameters()))

    def script(wrap):
        it, optimizer = start(wrap) if start else begin(wrap)
        for i in range(steps):
            if iteration:
                yield from told("iteration", iteration(it, optimizer, i))
            else:
                optimizer.zero_grad(zeroing)
                value = loss(it, i)
                value.backward()
                if before_step:
                    yield from told("before step", before_step(it, optimizer, i))
                optimizer.step()
                yield "loss", value
                del value
            if pending:
                wrap.pending(optimizer)
            if between:
                yield from told("between", between(it, optimizer, i))
        yield from everything(it, optimizer)

    return script

# SPDX-License-Identifier: BSD-3-Clause
"""Small programs around one deed: each of its arguments once, and each kind of optimizer."""

import contextlib
import functools
import warnings
from collections import defaultdict
from dataclasses import dataclass, replace

from on_device import DEVICE

from programs.deed import (
    ALONE,
    ANYWHERE,
    BEFORE_FUSE,
    BETWEEN,
    DEEDS,
    DIFFERS,
    EITHER,
    EQUAL,
    LAUNCHES,
    LEFT,
    Deed,
)
from programs.draw import LAST, Program
from programs.models import PROMISING
from programs.optimizers import EACH, KINDS, NATIVE, OWN, Kind
from programs.play import Broken, group_for, play, verdict_of

ITS_OWN = "its own"
ZERO_GRAD = ("zero_grad", {"optimizer": 0, "set_to_none": True})


@dataclass(frozen=True)
class Case:
    deed: Deed
    kind: Kind
    arguments: dict
    program: Program
    is_late: bool = False  # between backward() and step()

    def __str__(self):
        drawn = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        late = ", before step()" if self.is_late else ""
        return (
            f"{self.deed.name}({drawn}) of {self.program.setup['models']} by {self.kind.name}{late}"
        )


def iteration(i):
    return "iteration", {"model": 0, "batch": i, "set_to_none": True}


def around(deed, arguments):
    """The actions of its programs, and whether it comes late."""
    it = (deed.name, arguments)
    if deed.where == ALONE:
        yield [it], False
        return
    if deed.where == BEFORE_FUSE:
        yield [it, *map(iteration, range(3)), LAST], False
        return
    turns = [action for i in range(deed.turns) for action in (it, iteration(i + 1))]
    yield [iteration(0), *turns, LAST], False
    if deed.where == ANYWHERE:
        late = [ZERO_GRAD, ("backward", {"model": 0, "batch": 1}), it, ("step", {"optimizer": 0})]
        yield [iteration(0), iteration(3), *late, iteration(2), LAST], True


def fitting(deed):
    if deed.make or deed.where == ALONE:
        return [Kind(ITS_OWN, deed.make, OWN if deed.make else NATIVE)]
    names = EACH if deed.kinds is None or callable(deed.kinds) else deed.kinds
    names = names if isinstance(deed.every, bool) else deed.every
    found = [KINDS[name] for name in names if deed.takes(KINDS[name])]
    return found or [kind for kind in KINDS.values() if deed.takes(kind)]


def setup_of(deed, kind, model):
    one = {"kind": kind if deed.make else kind.name, "options": dict(kind.options[0])}
    one["groups"] = deed.setup.get("groups", 1)
    models, optimizers = ([], []) if deed.where == ALONE else ([model], [one])
    setup = {"models": models, "optimizers": optimizers, "bucket_bytes": 1, "tested": deed.name}
    setup["goes_on"] = deed.goes_on
    return {**setup, **deed.setup}


@functools.cache
def cases(name, among=None):
    """Each kind with the first arguments, and the others with a kind each, in turn. among: names of
    the kinds; all arguments with each of these, then, and with each model."""
    deed, found = DEEDS[name], []
    kinds = [kind for kind in fitting(deed) if not among or kind.name in (*among, ITS_OWN)]
    for n, arguments in enumerate(deed.variants()):
        whole = n == 0 or among or deed.every
        for kind in kinds if whole else [kinds[n % len(kinds)]]:
            for model in deed.models if whole else [deed.models[n % len(deed.models)]]:
                setup = setup_of(deed, kind, model)
                for actions, is_late in around(deed, arguments):
                    found.append(Case(deed, kind, arguments, Program(0, setup, actions), is_late))
    return found


@functools.lru_cache(maxsize=512)
def stock_of(name, n, among, models):
    """models: in place of the deed's."""
    program = cases(name, among)[n].program
    if models:
        program = replace(program, setup={**program.setup, "models": models})
    return play(program, "stock")


def wrong_in_stock(case, stock):
    raised = [what for what, _ in stock.seen if what.endswith("exception")]
    if stock.action == "setup" or (raised and case.deed.outcomes["stock"] is not EITHER):
        return f"stock raised: {stock.error}"
    if not stock.seen:
        return "it looks at nothing"
    return ""


#: Words for what deeds have done, by deed, mode and whether it came late.
ENDS = defaultdict(set)


def words_for(run, failure):
    if run.end == "equal":
        shown = {LAUNCHES.what: run.launched, LEFT.what: run.left, "raises": run.has_refused}
        return {DIFFERS.what if failure else EQUAL.what, *filter(shown.get, shown)}
    return {"raises"} if run.end in ("raised", "autograd") else set()


def wrong(case, mode, stock):
    """The fault of a case in this mode, or nothing."""
    expected = case.deed.outcome(mode, case.kind, case.arguments, case.is_late)
    verdict = verdict_of(case.program, mode, stock)
    run, failure = verdict.run, verdict.failure
    ENDS[case.deed.name, mode, case.is_late] |= words_for(run, failure)
    if expected is DIFFERS:
        return "" if failure and run.end == "equal" else "it is to differ from stock, and does not"
    if failure or expected is EITHER:
        return failure
    if expected in (EQUAL, LAUNCHES, LEFT):
        if run.end != "equal":
            return f"it ended, {run.end}, at {run.action}: {run.error}"
        return unproved(case, mode, run)
    if run.end == "equal":
        return "it is to raise, and does not"
    missing = [word for word in expected.words if word not in run.error]
    if run.stuck:
        return f"training does not go on: {run.stuck}"
    return f"it raised without the words {missing}: {run.error}" if missing else ""


def unproved(case, mode, run):
    """On a device the kernels are those of fused=True, and step() leaves nothing pending."""
    kind = KINDS.get(case.arguments.get("by"), case.kind)
    if kind.way != NATIVE or not case.deed.proves:
        return ""
    if DEVICE and case.kind.reads_strides:
        return ""
    if PROMISING & set(case.program.setup["models"]) and not run.promised:
        return "no gradient was a promise: it proves nothing"
    if run.created == 0:
        return "optfuse made no update: it proves nothing"
    is_late = mode == "forward" and case.deed.where == BETWEEN and not DEVICE
    if is_late and not run.had_pending:
        return "no update was pending: it proves nothing"
    return ""


def failures(name, mode, among=None, **setup):
    """The messages of a deed's cases that fail in this mode. setup: more for each world."""
    found = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for n, case in enumerate(cases(name, among)):
            program = replace(case.program, setup={**case.program.setup, **setup})
            case = replace(case, program=program)
            stack.enter_context(group_for(program))
            try:
                stock = stock_of(name, n, among, setup.get("models"))
                if DEVICE and wrong_in_stock(case, stock):
                    continue  # it needs memory of the host, or what the played GPU can't do
                why = wrong_in_stock(case, stock) or wrong(case, mode, stock)
            except Broken as error:
                why = f"with stock: {error}"
            if why:
                found.append(f"{case}: {why}\n{case.program.code()}")
    return found + ([] if among or DEVICE else unseen(name, mode))


def unseen(name, mode):
    """Words for updates that wait which a deed is said to show, and has not shown."""
    said = {
        case.deed.outcome(mode, case.kind, case.arguments, case.is_late) for case in cases(name)
    }
    seen = ENDS[name, mode, False] | ENDS[name, mode, True]
    return [f"{name}: not {one.what}" for one in said & {LAUNCHES, LEFT} if one.what not in seen]

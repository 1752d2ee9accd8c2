# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers that step parameters together until a group is set up: as heavyball's do, they keep
methods of their own and maps of parameters in attributes, drop gradients, count the steps of a
group in its options, and put that counter into the state of the first parameter with a gradient."""

import torch
from torch.optim import Optimizer


class Grouped(Optimizer):
    """Momentum; its functions run on lists."""

    def __init__(self, params, lr=1e-2, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})
        self.chain = self.update_all
        self.parts, self.owners = {}, {}

    def state_of(self, part):
        if self.address(part) not in self.owners:
            for group in self.param_groups:
                for p in group["params"]:
                    self.divide(p)
        owner, number = self.owners[self.address(part)]
        return self.state[owner].setdefault(number, {})

    @staticmethod
    def address(part):
        return part.data_ptr(), part.numel()

    def view_of(self, p):
        return p

    def divide(self, p):
        self.parts[p] = [self.view_of(p)]
        self.owners[self.address(p)] = p, 0

    def taken(self, group):
        for p in group["params"]:
            if p.grad is not None:
                grad, p.grad = p.grad, None
                self.divide(p)
                yield self.parts[p][0], grad

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if "size" not in group:
                group["size"] = sum(p.numel() for p in group["params"])
            self.step_group(group)

    def counted(self, group):
        """The steps of a group that comes from a file without its counter."""
        if group.get("count") is not None:
            return group["count"]
        entries = [self.state.get(p, {}).get(0, {}) for p in group["params"]]
        return next((entry["t"] for entry in entries if "t" in entry), 0)

    def step_group(self, group):
        count, pairs = self.counted(group), list(self.taken(group))
        if not pairs:
            group["count"] = count + 1
            return
        parts, grads = zip(*pairs, strict=True)
        group["count"] = group["now"] = torch.as_tensor(count) + 1
        group["rate"] = group["lr"]
        self.state_of(parts[0])["t"] = group["now"]
        self.chain(group, parts, grads, [self.state_of(part) for part in parts])
        group["now"] = None

    def update_all(self, group, parts, grads, states):
        if all([self.is_begun(*both) for both in zip(parts, states, strict=True)]):  # noqa: C419
            for part, grad, state in zip(parts, grads, states, strict=True):
                self.update(group, part, grad, state)

    def is_begun(self, part, state):
        state.setdefault("m", torch.zeros_like(part))
        return True

    def update(self, group, part, grad, state):
        state["m"].mul_(group["beta"]).add_(grad)
        part.sub_(state["m"] * (group["lr"] / (1 + group["now"] / group["size"])))


class SkipsFirst(Grouped):
    """Updates nothing in a step in which a parameter gets its state, as Soap does, and keeps views
    of parameters."""

    def view_of(self, p):
        return p.view_as(p)

    def is_begun(self, part, state):
        is_begun = "m" in state
        state.setdefault("done", set()).add(0)  # load_state_dict() casts what is in words
        return super().is_begun(part, state) and is_begun


class WarmsUp(Grouped):
    """The step of all is that of the one which has the fewest, as in Adopt."""

    def update_all(self, group, parts, grads, states):
        fewest = min(state.get("warm", 0) for state in states)
        super().update_all(group, parts, grads, states)
        for state in states if fewest < 2 else ():
            state["warm"] = state.get("warm", 0) + 1

    def update(self, group, part, grad, state):
        super().update(group, part, grad, state)
        if state.get("warm", 0) < 2:
            part.mul_(0.5)


class Waits(Grouped):
    """Updates nothing before all parameters of a group have state, frozen ones too."""

    def update_all(self, group, parts, grads, states):
        for both in zip(parts, states, strict=True):
            self.is_begun(*both)
        if all(self.state.get(p) for p in group["params"]):
            super().update_all(group, parts, grads, states)


class WaitsForFewest(Grouped):
    """The step is that of the group's parameter which has the fewest, a frozen one too."""

    def update_all(self, group, parts, grads, states):
        for state in states:
            state["warm"] = min(3, state.get("warm", 0) + 1)
        entries = [self.state.get(p, {}).get(0, {}) for p in group["params"]]
        fewest = min(entry.get("warm", 3) for entry in entries)
        super().update_all(group, parts, [grad * fewest for grad in grads], states)


class DividesAll(Grouped):
    """Keeps parts of parameters without gradients, too."""

    def taken(self, group):
        for p in group["params"]:
            self.divide(p)
        return super().taken(group)


class ByShape(Grouped):
    """Keeps other state for vectors than for matrices, in lists."""

    def is_begun(self, part, state):
        key = "few" if part.numel() < 10 else "many"
        state.setdefault(key, [torch.zeros_like(part), None])
        return True

    def update(self, group, part, grad, state):
        for key in ("few", "many"):
            if key in state:
                state[key][0].lerp_(grad, 0.1)
                part.sub_(state[key][0].sign() * group["lr"] / group["now"])


class Sums(Grouped):
    """Adds up weights among its options, as schedule-free optimizers do; keeps its gradients, and
    counts in a dict of the optimizer, in place."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.counts = {"steps": 0}

    @torch.no_grad()
    def step(self, closure=None):
        self.counts["steps"] += 1
        super().step(closure)

    def taken(self, group):
        for p in group["params"]:
            if p.grad is not None:
                self.divide(p)
                yield self.parts[p][0], p.grad

    def update_all(self, group, parts, grads, states):
        group["sum"] = group.get("sum", 0) + group["lr"] * group["now"]
        super().update_all(group, parts, grads, states)

    def update(self, group, part, grad, state):
        part.sub_(state["m"].lerp_(grad, group["lr"] / group["sum"]) / self.counts["steps"])


STEADY = [Grouped, SkipsFirst, WarmsUp, ByShape, Sums]
WAIT_FOR_FROZEN = [Waits, WaitsForFewest]


# Coupled in steady groups, too


class ByNorm(Grouped):
    def update_all(self, group, parts, grads, states):
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        super().update_all(group, parts, [grad / (1 + norm) for grad in grads], states)


class Leads(Grouped):
    """The first group's rate is that of all."""

    def update(self, group, part, grad, state):
        super().update({**group, "lr": self.param_groups[0]["lr"]}, part, grad, state)


class ByNumber(Grouped):
    """Counts gradients, not steps."""

    def update_all(self, group, parts, grads, states):
        group["updates"] = group.get("updates", 0) + len(parts)
        super().update_all(group, parts, grads, states)


class ByFirst(Grouped):
    """A number in the state of the first one is a factor of all."""

    def update_all(self, group, parts, grads, states):
        states[0]["own"] = states[0].get("own", 0) + 1
        factor = 1 / states[0]["own"]
        super().update_all(group, parts, [grad * factor for grad in grads], states)


class ByPlace(Grouped):
    """The second parameter goes another way, from its seventh step on."""

    def update_all(self, group, parts, grads, states):
        super().update_all(group, parts, grads, states)
        if len(parts) > 1 and group["now"] > 7:
            parts[1].mul_(0.5)


class ByEarlySteps(Grouped):
    """Couples parameters in its third step only, when all have their state."""

    def update_all(self, group, parts, grads, states):
        if group["now"] == 3:
            grads = [grad * grads[0].norm() for grad in grads]
        super().update_all(group, parts, grads, states)


class Partners(Grouped):
    """Knows another parameter by one."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        own = [p for group in self.param_groups for p in group["params"]]
        self.partners = dict(zip(own, own[1:] + own[:1], strict=True))

    def update(self, group, part, grad, state):
        super().update(group, part, grad, state)
        if part in self.partners:
            part.add_(self.partners[part].sum(), alpha=1e-3)


class Rates(Grouped):
    """Has numbers for parameters, which copies don't have."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        own = [p for group in self.param_groups for p in group["params"]]
        self.rates = {p: i for i, p in enumerate(own)}

    def update(self, group, part, grad, state):
        super().update(group, part, grad, state)
        part.mul_(1 + 1e-3 * self.rates.get(part, 0))


class Neighbours(Grouped):
    """Reads how many parameters its own map has."""

    def update(self, group, part, grad, state):
        super().update(group, part, grad, state)
        part.mul_(1 - 1e-3 * len(self.parts))


class DropsSome(Grouped):
    """Drops the gradients of vectors only."""

    def taken(self, group):
        for p in group["params"]:
            if p.grad is not None:
                grad = p.grad
                p.grad = None if p.dim() == 1 else grad
                self.divide(p)
                yield self.parts[p][0], grad


class ExchangesState(Grouped):
    """Puts another dict into the state with each step."""

    def update(self, group, part, grad, state):
        owner, number = self.owners[self.address(part)]
        kept = {**state, "m": state["m"] * group["beta"] + grad}
        self.state[owner] = {number: kept}
        part.sub_(kept["m"] * (group["lr"] / (1 + group["now"] / group["size"])))


class KeepsNorms(Grouped):
    """Has the norms of gradients by parameter."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.norms = {}

    @torch.no_grad()
    def step(self, closure=None):
        self.keep({p: p.grad.norm() for group in self.param_groups for p in self.given(group)})
        super().step(closure)

    @staticmethod
    def given(group):
        return [p for p in group["params"] if p.grad is not None]

    def keep(self, norms):
        self.norms.update(norms)


class ExchangesNorms(KeepsNorms):
    def keep(self, norms):
        self.norms = norms


class ClearsNorms(KeepsNorms):
    def keep(self, norms):
        self.norms.clear()
        self.norms.update(norms)


class ClearsShapes(KeepsNorms):
    """The values of items stay as they are."""

    def keep(self, norms):
        self.norms.clear()
        self.norms.update((p, p.shape) for p in norms)


class KeepsSums(KeepsNorms):
    """An item has the norms of more than one parameter."""

    def keep(self, norms):
        total = sum(norms.values())
        self.norms.update((p, total) for p in norms)


class RaisesForAll(Grouped):
    """Takes infinite gradients of a single parameter only."""

    def update_all(self, group, parts, grads, states):
        if len(parts) > 1 and not all([bool(grad.isfinite().all()) for grad in grads]):  # noqa: C419
            raise ValueError("infinite")
        super().update_all(group, parts, grads, states)


class StateOfTensors(Grouped):
    """An entry of its state is a tensor."""

    def state_of(self, part):
        owner = next(p for group in self.param_groups for p in group["params"] if p is part)
        self.state.setdefault(owner, torch.zeros_like(part))
        return {"m": self.state[owner]}


COUPLED = [ByNorm, ByNumber, ByFirst, ByPlace, ByEarlySteps, Partners, Rates, Neighbours, DropsSome]
COUPLED += [ExchangesState, ExchangesNorms, ClearsNorms, ClearsShapes, KeepsSums]
COUPLED += [RaisesForAll, StateOfTensors]


# They do what no trial sees


class Late(KeepsNorms):
    is_late = False

    def update(self, group, part, grad, state):
        super().update(group, part, grad, state)
        if type(self).is_late:
            self.change(group, *self.owners[self.address(part)])


class ExchangesStateLate(Late):
    def change(self, group, p, number):
        self.state[p] = dict(self.state[p])


class ExchangesNormsLate(Late):
    def change(self, group, p, number):
        self.norms = dict(self.norms)


class ClearsNormsLate(Late):
    def change(self, group, p, number):
        self.norms.clear()


class DropsOptionLate(Late):
    def change(self, group, p, number):
        del group["beta"]


class DropsAttributeLate(Late):
    def change(self, group, p, number):
        del self.defaults


LATE = [ExchangesStateLate, ExchangesNormsLate, ClearsNormsLate]
LATE += [DropsOptionLate, DropsAttributeLate]

# SPDX-License-Identifier: BSD-3-Clause
"""A step() that looks at the parameter itself, and not only at its data, sees in a trial a small
copy or a stand-in. fuse() refuses where it could see a difference. docs/traced.md"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import python_ok
from test_traced_adversaries import refused
from torch import Tensor, nn
from torch.optim import Optimizer

import optfuse
from optfuse._own_step import reach
from optfuse._own_step.code import functions_reached

MODES = ("forward", "backward")


class MyParameter(nn.Parameter):
    pass


class Marks(Optimizer):
    """Ten times the rate for marked parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.prepare([p for group in self.param_groups for p in group["params"]])

    def prepare(self, params: list[Tensor]) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * (10 if self.mark(p) else 1))

    def mark(self, p: Any) -> bool:
        raise NotImplementedError


class ByClass(Marks):
    def mark(self, p: Any) -> bool:
        return isinstance(p, MyParameter)


class ByType(Marks):
    def mark(self, p: Any) -> bool:
        return type(p) is MyParameter


class ByAttribute(Marks):
    def mark(self, p: Any) -> bool:
        return bool(getattr(p, "special", False))


class ByDict(Marks):
    def mark(self, p: Any) -> bool:
        return "special" in p.__dict__


class ByVars(Marks):
    def mark(self, p: Any) -> bool:
        return bool(vars(p))


class ByHook(Marks):
    def mark(self, p: Any) -> bool:
        return bool(p._backward_hooks)


class ById(Marks):
    def prepare(self, params: list[Tensor]) -> None:
        self.special = {id(p) for p in params}

    def mark(self, p: Any) -> bool:
        return id(p) in self.special


_by_id: dict[int, bool] = {}


class ByGlobalId(Marks):
    def prepare(self, params: list[Tensor]) -> None:
        _by_id.update({id(p): True for p in params})

    def mark(self, p: Any) -> bool:
        return _by_id.get(id(p), False)


class ByKey(Marks):
    def prepare(self, params: list[Tensor]) -> None:
        self.names = dict.fromkeys(params, 1)

    def mark(self, p: Any) -> bool:
        return p in self.names


class ByKind(Marks):
    def mark(self, p: Any) -> bool:
        return isinstance(p, nn.Parameter)


class ByLeaf(Marks):
    def mark(self, p: Any) -> bool:
        return bool(p.is_leaf and p.requires_grad)


class ByShape(Marks):
    def mark(self, p: Any) -> bool:
        return p.ndim == 2


def by_closure(params: list[Tensor]) -> type[Marks]:
    marked = [id(p) for p in params]
    (one,) = marked

    class ByClosure(Marks):
        def mark(self, p: Any) -> bool:
            return id(p) == one

    return ByClosure


def plain() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 5))


def marked() -> nn.Parameter:
    p = MyParameter(torch.randn(4, 5))
    p.special = True  # type: ignore[attr-defined]
    p.register_hook(lambda g: g)
    return p


def trained(cls: type[Marks], make: Callable[[], nn.Parameter], mode: str | None) -> Any:
    torch.manual_seed(0)
    p = make()
    optimizer = cls([p])
    if mode is not None:
        optfuse.fuse(optimizer, mode=mode)
    for _ in range(3):
        optimizer.zero_grad()
        p.square().sum().backward()
        optimizer.step()
    return p.detach().as_subclass(Tensor).clone()


WORDS: dict[type[Marks], str] = {
    ByClass: "subclass of Parameter",
    ByType: "equal",
    ByAttribute: "attribute 'special'",
    ByDict: "__dict__",
    ByVars: "__dict__",
    ByHook: "_backward_hooks",
    ById: r"an attribute holds the id\(\)",
    ByGlobalId: r"reach holds the id\(\)",
    ByKey: "holds parameters",
    ByKind: "attribute '_is_param'",
    ByLeaf: "equal",
    ByShape: "equal",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", WORDS)
def test_a_parameter_like_any_other(cls: type[Marks], mode: str) -> None:
    if WORDS[cls] == "equal":
        assert torch.equal(trained(cls, plain, mode), trained(cls, plain, None))
    else:
        with pytest.raises(optfuse.Error, match=WORDS[cls]):
            trained(cls, plain, mode)
    _by_id.clear()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", WORDS)
def test_a_parameter_with_a_class_of_its_own(cls: type[Marks], mode: str) -> None:
    with pytest.raises(optfuse.Error, match="of the class MyParameter"):
        trained(cls, marked, mode)


class Described(ByShape):
    """Has code with a name of an attribute, which step() does not reach."""

    def described(self, p: Any) -> str:
        return f"special: {p.special}"


@pytest.mark.parametrize("mode", MODES)
def test_code_that_step_does_not_reach_may_look_at_parameters(mode: str) -> None:
    def make() -> nn.Parameter:
        p = plain()
        p.special = True  # type: ignore[attr-defined]
        return p

    assert torch.equal(trained(Described, make, mode), trained(Described, make, None))


class Overrides(torch.optim.Adagrad):
    """Only PyTorch's own step() calls the method that looks."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)

    def _init_group(self, group: Any, *lists: Any) -> Any:
        for p in group["params"]:
            if "special" in vars(p):
                group["lr"] = 0.5
        return super()._init_group(group, *lists)  # type: ignore[no-untyped-call]


def test_methods_that_pytorchs_own_step_calls_are_reached() -> None:
    names = {function.__name__ for function in functions_reached(Overrides)}
    assert names == {"step", "_init_group"}


def test_kernels_look_at_nothing() -> None:
    optfuse.fuse(torch.optim.AdamW([marked()]))


def test_a_registered_class_may_promise_to_take_subclasses() -> None:
    class Registered(ByShape):
        pass

    optfuse.register(Registered)
    with pytest.raises(optfuse.Error, match="of the class MyParameter"):
        trained(Registered, marked, "forward")
    optfuse.register(Registered, subclasses=True)
    for mode in MODES:
        assert torch.equal(trained(Registered, marked, mode), trained(Registered, marked, None))


def named() -> nn.Parameter:
    p = plain()
    p.special = True  # type: ignore[attr-defined]
    return p


def hooked() -> nn.Parameter:
    p = plain()
    p.register_hook(lambda g: g)
    return p


@pytest.mark.parametrize(
    "cls, make, why",
    [
        (ByAttribute, named, "has the attribute 'special', and code of the class has that name"),
        (ByDict, named, "has the attribute 'special', and code of the class has that name"),
        (ByVars, named, "has a look at all attributes"),
        (ByHook, hooked, "has hooks"),
        (ById, plain, r"holds the id\(\)"),
    ],
)
def test_registered_classes(cls: type[Marks], make: Callable[[], nn.Parameter], why: str) -> None:
    registered = type("Registered", (cls,), {})
    optfuse.register(registered)
    with pytest.raises(optfuse.Error, match=why):
        optfuse.fuse(registered([make()]))
    optimizer = registered([nn.Parameter(torch.randn(3))]) if cls is not ById else None
    if optimizer is not None:
        optfuse.fuse(optimizer)
        with pytest.raises(optfuse.Error, match=why):
            optimizer.add_param_group({"params": [make()]})


def test_an_attribute_that_no_code_names_is_no_obstacle() -> None:
    p = plain()
    p.of_somebody_else = True  # type: ignore[attr-defined]
    optfuse.fuse(ByAttributeOfOthers([p]))


class ByAttributeOfOthers(Marks):
    def mark(self, p: Any) -> bool:
        return False


def test_identities_in_closures() -> None:
    p = plain()
    with pytest.raises(optfuse.Error, match=r"closure of its code holds the id\(\)"):
        optfuse.fuse(by_closure([p])([p]))


class Answers:
    """Has an attribute of any name, as unittest.mock.call and addict.Dict have."""

    def __getattr__(self, name: str) -> Answers:
        return Answers()


ANSWERS = Answers()


def endless() -> None:
    pass


endless.__wrapped__ = endless  # type: ignore[attr-defined]


class ByAnswers(Marks):
    def mark(self, p: Any) -> bool:
        endless()
        return ANSWERS is None


def test_a_global_that_answers_to_any_name() -> None:
    python_ok(
        "import folders, optfuse, torch\n"
        "from test_looks import ByAnswers, plain\n"
        "optfuse.fuse(ByAnswers([plain()]))",
        timeout=60,
    )


def asks(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: Any, p: Any) -> Any:
        return getattr(p, "special", False) or function(self, p)

    return wrapper


@functools.lru_cache
def is_special(p: Any) -> bool:
    return bool(getattr(p, "special", False))


class ByWrapper(Marks):
    @asks
    def mark(self, p: Any) -> bool:
        return False


class ByCache(Marks):
    def mark(self, p: Any) -> bool:
        return is_special(p)


@pytest.mark.parametrize("cls", (ByWrapper, ByCache))
def test_wrappers_are_code_of_the_class(cls: type[Marks]) -> None:
    with pytest.raises(optfuse.Error, match="has the attribute 'special'"):
        optfuse.fuse(cls([named()]))


class ByRequiresGrad(Marks):
    def mark(self, p: Any) -> bool:
        return not p.requires_grad


def test_a_frozen_parameter_that_has_a_gradient() -> None:
    """Only step()s that ask see it."""

    def trained(cls: type[Marks], wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        params = [plain(), plain()]
        optimizer = wrap(cls(params))
        for i in range(4):
            for p in params:
                p.grad = torch.full_like(p, 0.5 + i)
            params[0].requires_grad_(i == 0)
            optimizer.step()
        return [p.detach().clone() for p in params]

    for cls in (ByRequiresGrad, ByShape):
        ours, stock = trained(cls, optfuse.fuse), trained(cls, lambda optimizer: optimizer)
        assert all(map(torch.equal, ours, stock))


class ByTextOfId(Marks):
    def prepare(self, params: list[Tensor]) -> None:
        self.special = {f"{id(p)}" for p in params}

    def mark(self, p: Any) -> bool:
        return f"{id(p)}" in self.special


@pytest.mark.parametrize("mode", MODES)
def test_what_is_made_of_an_id_is_not_seen(mode: str) -> None:
    """A row of docs/hazards.md."""
    ours, stock = trained(ByTextOfId, plain, mode), trained(ByTextOfId, plain, None)
    assert not torch.equal(ours, stock)


LOOKS: dict[str, tuple[Any, str]] = {
    "attributes": (lambda o, p, g, s: p.__dict__, "__dict__"),
    "vars": (lambda o, p, g, s: vars(p), "__dict__"),
    "hooks": (lambda o, p, g, s: p._backward_hooks, "_backward_hooks"),
    "later hooks": (lambda o, p, g, s: p._post_accumulate_grad_hooks, "_post_accumulate_grad"),
    "class": (lambda o, p, g, s: isinstance(p, MyParameter), "subclass of Parameter"),
    "classes": (lambda o, p, g, s: isinstance(g, int | MyParameter), "subclass of Parameter"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_stand_ins_refuse(name: str) -> None:
    refused(*LOOKS[name])


def test_stand_ins_answer_what_is_the_same_for_all() -> None:
    from test_traced_recorder import recorded_of

    def update(o: Any, group: Any, p: Tensor, state: Any) -> None:
        assert isinstance(p, Tensor) and not isinstance(p, int | float | list)
        assert p.__class__ is type(p)
        p.add_(p.grad)  # type: ignore[arg-type]

    recorded_of(update)


class Full(Marks):
    kept: Any = ()

    def prepare(self, params: list[Tensor]) -> None:
        self.kept = [[] for _ in range(100)]

    def mark(self, p: Any) -> bool:
        return not self.kept


KEPT: list[list[int]] = [[] for _ in range(100)]


class FullModule(Marks):
    def mark(self, p: Any) -> bool:
        return not KEPT


@pytest.mark.parametrize("cls", (Full, FullModule))
def test_more_than_can_be_looked_at(cls: type[Marks], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error does not say where so much is found: reachable() does not know."""
    monkeypatch.setattr(reach, "MOST", 90)
    with pytest.raises(optfuse.Error, match="attributes, options, state or code, too many"):
        optfuse.fuse(cls([plain()]))


def test_the_frame_that_stand_ins_look_at_is_that_of_torch() -> None:
    """Who asks in isinstance() is told by the code that asks."""
    seen = []

    class Asks:
        @property
        def __class__(self) -> Any:
            seen.append(sys._getframe(1).f_code.co_name)
            return Asks

    isinstance(Asks(), MyParameter)
    assert seen == ["__instancecheck__"]

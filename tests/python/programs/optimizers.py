# SPDX-License-Identifier: BSD-3-Clause
"""The kinds of optimizers that programs train with: of PyTorch, with kernels and without, recorded,
registered, and those that couple their parameters."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import generated_classes
import on_device
import own_classes
import recorded_classes
import style_classes
import torch

import optfuse
import optfuse.optim
from programs import cxx_door

IN_CXX = " in C++"  # kinds that optfuse.hpp fuses
NATIVE, RECORDED, REGISTERED, OWN = "native", "recorded", "registered", "own"


@dataclass(frozen=True)
class Kind:
    name: str
    make: Callable[..., torch.optim.Optimizer]  # given groups, and options
    way: str = RECORDED  # NATIVE: there are kernels
    options: tuple[dict, ...] = ({},)  # one of them is drawn, with a learning rate
    weight: int = 1  # how often random programs have it
    # A choice of what random programs may do with it.
    has_tensor_lr: bool = False  # with the reference's bits
    has_attributes: bool = False  # of its own, of which PyTorch copies and pickles none
    has_closure: bool = True  # calls the one that step() is given
    reads_strides: bool = True  # of gradients; PyTorch's fused kernels go through memory
    spares: tuple[str, ...] = ()  # deeds that random programs don't have with it


def fused(cls):
    """Where fused=True is the reference."""
    return lambda groups, **options: cls(groups, fused=True, **options)


def adam_options():
    return tuple(
        {"weight_decay": decay, "betas": betas, "amsgrad": amsgrad, "maximize": maximize}
        for decay in (0.1, 0.0)
        for betas in ((0.9, 0.999), (0.3, 0.9), (0.0, 0.5))
        for amsgrad in (False, False, True)
        for maximize in (False,) * 8 + (True,)
    )


def sgd_options():
    return tuple(
        {"weight_decay": decay, "maximize": maximize, **momentum}
        for decay in (0.1, 0.0)
        for momentum in (
            {"momentum": 0.9},
            {"momentum": 0.9, "nesterov": True},
            {"momentum": 0.9, "dampening": 0.25},
            {"momentum": 0.0},
        )
        for maximize in (False,) * 8 + (True,)
    )


def registered(cls):
    """By a subclass, so that tests of the class itself find it as it is."""
    made = type(f"Registered{cls.__name__}", (cls,), {"__module__": __name__})
    globals()[made.__name__] = made  # where pickle finds it
    optfuse.register(made)
    return Kind(made.__name__, made, REGISTERED, has_closure=cls is not own_classes.Stateless)


def of_matrices(cls):
    """The class takes no others; they stay as they are."""

    def make(groups, **options):
        groups = groups if isinstance(groups[0], dict) else [{"params": groups}]
        return cls([{**group, "params": matrices(group["params"])} for group in groups], **options)

    return make


def matrices(params):
    return [p for p in params if (p[1] if type(p) is tuple else p).dim() == 2]


OPTIM = torch.optim
DECAYS = {"weight_decay": 0.1}
ADAGRAD = {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}
FIXED = {"lr": 0.01, "relative_step": False}
BY_ROWS = ({**FIXED, "beta1": 0.9}, {**FIXED, "scale_parameter": False, **DECAYS})
FOR_PYTORCH = {"way": NATIVE, "has_tensor_lr": True, "reads_strides": False}
ALL = (
    Kind("AdamW", fused(OPTIM.AdamW), options=adam_options(), weight=5, **FOR_PYTORCH),
    Kind("SGD", fused(OPTIM.SGD), options=sgd_options(), weight=5, **FOR_PYTORCH),
    Kind("Adam", fused(OPTIM.Adam), options=adam_options(), weight=5, **FOR_PYTORCH),
    Kind("Adagrad", fused(OPTIM.Adagrad), NATIVE, ({}, ADAGRAD), reads_strides=False),
    Kind(
        "RMSprop",
        OPTIM.RMSprop,
        NATIVE,
        ({"momentum": 0.9, "centered": True}, {}, {"weight_decay": 0.1, "maximize": True}),
    ),
    Kind("Adadelta", OPTIM.Adadelta, NATIVE, ({}, DECAYS)),
    Kind("NAdam", OPTIM.NAdam, NATIVE, ({}, {**DECAYS, "decoupled_weight_decay": True})),
    Kind("RAdam", OPTIM.RAdam, NATIVE, ({}, DECAYS)),
    Kind("Adamax", OPTIM.Adamax, NATIVE, ({}, {**DECAYS, "maximize": True})),
    Kind("Rprop", OPTIM.Rprop, NATIVE),
    Kind("ASGD", OPTIM.ASGD, NATIVE, ({}, {**DECAYS, "t0": 2})),
    # By operators, and by its own step().
    Kind("Adafactor", OPTIM.Adafactor, OWN, weight=4, has_tensor_lr=True),
    Kind("Adafactor of lists", OPTIM.Adafactor, OWN, ({"foreach": True},)),
    Kind("Muon", of_matrices(OPTIM.Muon), OWN, weight=0),
    Kind("Lion", optfuse.optim.Lion, NATIVE, ({}, DECAYS)),
    Kind("Adan", optfuse.optim.Adan, NATIVE, ({}, DECAYS)),
    # One operator of ours for each parameter, on a tape.
    Kind("Adafactor of ours", optfuse.optim.Adafactor, options=BY_ROWS),
    Kind("CAME", optfuse.optim.CAME, options=({"lr": 0.01}, {"lr": 0.01, **DECAYS})),
    # Without kernels: elementwise, with numbers of tensors, with looks, by lists, coupled.
    *(
        Kind(name, recorded_classes.KINDS[name], has_attributes=True)
        for name in ("Elementwise", "Norms", "Looks", "Lists", "Coupled")
    ),
    Kind("AdaBelief", style_classes.AdaBelief),
    Kind("TensorCounter", style_classes.TensorCounter),
    Kind("Adam of lists", OPTIM.Adam, NATIVE, ({"foreach": True}, {"foreach": True, **DECAYS})),
    Kind("SignOfAverage", style_classes.SignOfAverage),
    Kind("GroupCounter", own_classes.GroupCounter),
    Kind("Counter", own_classes.Counter, has_attributes=True),
    *map(
        registered,
        (own_classes.Tensors, own_classes.Numbers, own_classes.NewTensors, own_classes.Stateless),
    ),
)


def drawn(groups, seed, lr=0.1):
    """By a class of which all that its step() does is drawn."""
    for group in groups[1:]:
        group["flag"] = False
    return generated_classes.make(seed)(groups, lr=lr)


def training(cls):
    """For those that are told so."""

    def make(groups, **options):
        optimizer = cls(groups, **options)
        getattr(optimizer, "train", list)()
        return optimizer

    return make


UNFUSED = ("unfuse_and_fuse_again", "train_one_round_unfused", "replace_the_optimizer")
# One for each way in which a step() computes, or keeps what it has.
WITHOUT_KERNELS = {f"{name}, a class": cls for name, cls in recorded_classes.KINDS.items()}
WITHOUT_KERNELS |= {f"{name}, a style": training(cls) for name, cls in style_classes.STYLES.items()}
# NumPy's view of state is older than fuse() then (docs/hazards.md).
VIEWS = {"KeepsAnAddress, a class": ("train_before_fuse", *UNFUSED)}
OF_CLASSES = [
    Kind(name, make, has_attributes=True, weight=0, spares=VIEWS.get(name, ()))
    for name, make in WITHOUT_KERNELS.items()
]
# PyTorch's own, which are anyone's as subclasses.
SUBCLASSED = {
    "SGD": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "Adam": {"amsgrad": True, "weight_decay": 0.1, "maximize": True},
    "AdamW": {},
    "Adagrad": ADAGRAD,
    "RMSprop": {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1, "maximize": True},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
    "Rprop": {},
    "ASGD": {"t0": 5, "weight_decay": 0.01},
    "Adafactor": {"weight_decay": 0.1},
}


def subclassed(name):
    cls = type(f"Own{name}", (getattr(OPTIM, name),), {"__module__": __name__})
    globals()[cls.__name__] = cls
    some = tuple({**SUBCLASSED[name], "foreach": foreach} for foreach in (False, True))
    return Kind(f"{name}, a subclass", cls, options=some, weight=0)


def of_cxx(kind):
    """Its class of torch::optim."""

    def make(groups, **options):
        optimizer = kind.make(groups, **options)
        optimizer._cxx = kind.name
        return optimizer

    return replace(
        kind,
        name=f"{kind.name}{IN_CXX}",
        make=make,
        options=tuple(one for one in kind.options if not one.get("maximize")),
        weight=0,
        has_tensor_lr=False,
        spares=(*cxx_door.left_out(), *cxx_door.BY_DATA),
    )


OF_CLASSES += map(subclassed, SUBCLASSED)
WITHOUT_KERNELS = {kind.name: kind.make for kind in OF_CLASSES}
# Classes of which all is drawn.
SEEDS = tuple({"seed": i} for i in range(2000))
OF_CLASSES.append(Kind("drawn", drawn, options=SEEDS, has_attributes=True, weight=0))


def has_no_attributes(kind):
    return not kind.has_attributes


def has_closure(kind):
    return kind.has_closure


OF_CXX = [of_cxx(kind) for kind in ALL if kind.name in cxx_door.OPTIONS]
KINDS = {kind.name: kind for kind in (*ALL, *OF_CLASSES, *OF_CXX)}


def made_by(name, params):
    """With the first of the kind's options; the parameters may have names."""
    return KINDS[name].make(list(params), **KINDS[name].options[0])


#: Each class with kernels, or with operators in the order of its step().
CLASSES = (
    *("AdamW", "SGD", "Adam", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax"),
    *("Rprop", "ASGD", "Adafactor", "Muon", "Lion", "Adan"),
)
# With what each deed is tried: a step counter, none, state made late, one by one, and each way.
EACH = (
    "AdamW",
    "SGD",
    "RMSprop",
    "Lion",
    "Elementwise",
    "Looks",
    "Coupled",
    "RegisteredTensors",
)
if on_device.DEVICE:  # where the ways of all kinds have tests of their own
    CLASSES = EACH = ("AdamW", "Elementwise")
EVERY = tuple(dict.fromkeys((*EACH, *CLASSES)))
SIXTEEN_BITS = ("Adam", "AdamW")  # see draw.py

# SPDX-License-Identifier: BSD-3-Clause
"""Every use of a pending tensor: each public attribute and method of Tensor, and each function of
torch that takes a tensor first or second, is used on a pending parameter, its .data, its gradient
and its state, each untouched before, in backward mode on a consumed gradient, and on a promised
one. What comes of a call, and what it leaves behind, is compared with the same call after stock's
step().

All functions are bound before optfuse is imported. Run by test_uses.py, which explains EXCEPTED:

    python sweep_uses.py [--full] [NAME ...]

Role: what the call is made on. How: where its arguments are from."""

import contextlib
import ctypes
import inspect
import io
import os
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cheap_seeds  # noqa: F401 - it seeds before each call
import torch
from torch import nn
from torch.nn import functional

SIZE = 4
#: Calls that need arguments of their own. The first argument is the tensor under test.
BY_HAND = {
    "Tensor.apply_": lambda f, t: f(t, lambda x: x + 1),
    "Tensor.map_": lambda f, t: f(t, torch.ones_like(t), lambda x, y: x + y),
    "Tensor.map2_": lambda f, t: f(
        t, torch.ones_like(t), torch.ones_like(t), lambda x, y, z: x + z
    ),
    "Tensor.new": lambda f, t: (f(t, 3).shape, f(t, [1.0, 2.0]), f(t, torch.ones(2)), f(t).shape),
    "Tensor.new_tensor": lambda f, t: f(t, [1.0, 2.0]),
    "Tensor.resize_as": lambda f, t: f(t, torch.ones(2, 8)),
    "Tensor.resize": lambda f, t: f(t, 2, 8),
    "Tensor.data_ptr": lambda f, t: at_address(f(t)),
    "Tensor.const_data_ptr": lambda f, t: at_address(f(t)),
    "_C._data_address": lambda f, t: at_address(f(t)),
    "_C._to_dlpack": lambda f, t: torch.from_dlpack(f(without_graph(t))),
    "_C._to_dlpack_versioned": lambda f, t: torch.from_dlpack(f(without_graph(t))),
    "torch.to_dlpack": lambda f, t: torch.from_dlpack(f(without_graph(t))),
    "Tensor.__dlpack__": lambda f, t: torch.from_dlpack(f(without_graph(t))),
    "torch.from_dlpack": lambda f, t: f(without_graph(t)),
    "Tensor.numpy": lambda f, t: f(t, force=True).tolist(),
    "Tensor.__array__": lambda f, t: f(t.detach()).tolist(),
    "Tensor.untyped_storage": lambda f, t: bytes(f(t)),
    "Tensor.storage": lambda f, t: f(t).tolist(),
    "Tensor.__getitem__": lambda f, t: (f(t, 0), f(t, ...), f(t, t > 0), f(t, (slice(1), -1))),
    "Tensor.__setitem__": lambda f, t: (f(t, 0, 2.0), f(t, ..., torch.ones(()))),
    "Tensor.__deepcopy__": lambda f, t: f(t, {}),
    "Tensor.__reduce_ex__": lambda f, t: str(f(t, 2)[0]),
    "Tensor.__format__": lambda f, t: f(t, ""),
    "Tensor.register_hook": lambda f, t: type(f(t.requires_grad_(), print)),
    "Tensor.backward": lambda f, t: f(t.requires_grad_(), torch.ones_like(t)),
    "Tensor.type": lambda f, t: (f(t), f(t, torch.float64)),
    "Tensor.module_load": lambda f, t: f(t, torch.ones_like(t)),
    "Tensor.set_": lambda f, t: f(t.data, torch.ones(3)),
    "Tensor.copy_": lambda f, t: (f(t.data, torch.ones(())), f(torch.ones_like(t), t.detach())),
    "Tensor.share_memory_": lambda f, t: f(t).is_shared(),
    "torch.equal": lambda f, t: (f(t, torch.ones_like(t)), f(torch.ones_like(t), t)),
    "torch.save": lambda f, t: saved(f, t),
    "torch.tensor": lambda f, t: (f(t), f([t.mean(), 1.0])),
    "torch.as_tensor": lambda f, t: f(t).clone(),
    "torch.asarray": lambda f, t: (f(t), f(t, copy=True)),
    "Tensor.as_subclass": lambda f, t: f(t, nn.Parameter),
    "Tensor.__setstate__": lambda f, t: f(t.data, (t.data.storage(), 0, t.shape, t.stride())),
    "Tensor.__array_wrap__": lambda f, t: f(t.data, torch.ones(2).numpy()),
    "Tensor.register_post_accumulate_grad_hook": lambda f, t: type(f(t.requires_grad_(), print)),
    "torch.einsum": lambda f, t: (f("ij->ji", t), f("ij,jk", torch.ones_like(t), t)),
    "torch.embedding_bag": lambda f, t: f(t, LONG, LONG[:1])[0],
    "torch.batch_norm": lambda f, t: f(t, None, None, None, None, True, 0.1, 1e-5, False),
    "torch.instance_norm": lambda f, t: f(t[None], None, None, None, None, True, 0.1, 1e-5, False),
    "torch.dropout": lambda f, t: f(t, 0.5, True),
    "torch.alpha_dropout": lambda f, t: f(t, 0.5, True),
    "torch.feature_dropout": lambda f, t: f(t, 0.5, True),
    "torch.feature_alpha_dropout": lambda f, t: f(t, 0.5, True),
    "torch.native_dropout": lambda f, t: f(t, 0.5, True),
    "torch.rnn_tanh_cell": lambda f, t: f(t, t, t, t),
    "torch.gru_cell": lambda f, t: f(t, t, torch.ones(12, 4), torch.ones(12, 4)),
    "torch.lstm_cell": lambda f, t: f(t, (t, t), torch.ones(16, 4), torch.ones(16, 4)),
    "torch.ctc_loss": lambda f, t: f(t[:, None], LONG[None, :2] + 1, (4,), (2,)),
    "torch.quantize_per_tensor": lambda f, t: f(t, 0.1, 0, torch.qint8),
    "torch.quantize_per_channel": lambda f, t: f(t, torch.ones(4), LONG * 0, 0, torch.qint8),
    "torch.fake_quantize_per_tensor_affine": lambda f, t: f(t, 0.1, 0, 0, 255),
    "torch.native_channel_shuffle": lambda f, t: f(t[None, :, :, None], 2),
    "torch.convolution": lambda f, t: f(
        t[None], t[..., None], None, (1,), (0,), (1,), False, (0,), 1
    ),
    "torch.conv_tbc": lambda f, t: f(t[None], t[None], torch.ones(4)),
    "torch.grid_sampler": lambda f, t: f(t[None, None], torch.zeros(1, 2, 2, 2), 0, 0, False),
    "torch.affine_grid_generator": lambda f, t: f(t[None, :2, :3], (1, 1, 2, 2), False),
}
LONG = torch.tensor([0, 1, 2, 3])
#: Calls that are not compared, on what, and why.
EXCEPTED = {
    "torch.fbgemm_pack_gemm_matrix_fp16": ("all", "it gives an address, in the bytes of a tensor"),
    # Its pivots begin in memory that nobody has written.
    "linalg.lstsq": ("all", "PyTorch's default driver, gelsy, has several results for one input"),
}
#: Calls whose result is memory that nobody has written, or an address.
UNKNOWN = ("empty", "resize", "new_empty", "Tensor.new", "__hash__", "_storage_id")
RANDOM = 7


def at_address(address):
    return ctypes.string_at(address, 4 * SIZE * SIZE)


def without_graph(tensor):
    """Where DLPack takes no tensor with requires_grad: the very tensor else."""
    return tensor.data if tensor.requires_grad else tensor


def saved(save, tensor):
    buffer = io.BytesIO()
    save(tensor, buffer)
    buffer.seek(0)
    return torch.load(buffer)


# Calls.


def public(owner, names=()):
    return [name for name in dir(owner) if not name.startswith("_") or name in names]


def dunders():
    """Those that Tensor has of its own."""
    plain = set(dir(object)) - {"__repr__", "__hash__", "__format__", "__reduce_ex__"}
    return [n for n in dir(torch.Tensor) if n.startswith("__") and n not in plain]


NAMESPACES = {
    "torch": torch,
    "nn.functional": functional,
    "linalg": torch.linalg,
    "fft": torch.fft,
    "special": torch.special,
    "utils.dlpack": torch.utils.dlpack,
}
#: Functions of torch._C that read a tensor's memory or its record.
PRIVATE = ("_to_dlpack", "_to_dlpack_versioned", "_data_address", "_is_cow_tensor", "_storage_id")


def targets():
    """Label, and what is called: a function, or None for an attribute."""
    known = set(torch.overrides.get_testing_overrides())
    found = {}
    for name in (*public(torch.Tensor), *dunders()):
        member = getattr(torch.Tensor, name, None)
        is_method = callable(member) and not isinstance(member, type)
        found[f"Tensor.{name}"] = member if is_method else None
    for prefix, owner in NAMESPACES.items():
        for name in public(owner):
            function = getattr(owner, name)
            if callable(function) and (function in known or f"{prefix}.{name}" in BY_HAND):
                found[f"{prefix}.{name}"] = function
    for name in PRIVATE:
        if hasattr(torch._C, name):
            found[f"_C.{name}"] = getattr(torch._C, name)
    return found


def op_db():
    """PyTorch's own samples, by the name of the operator. They come with its test suite, which
    needs a package that its operators don't."""
    sys.modules.setdefault("expecttest", types.ModuleType("expecttest"))
    sys.modules["expecttest"].TestCase = unittest.TestCase
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core
    # Each sample would look for a test of that suite among its callers, through all modules.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None

    ops = [op for op in op_db if torch.float32 in op.dtypes]
    aliases = {alias.name: op for op in ops for alias in op.aliases}
    return aliases | {op.name: op for op in ops}


# Arguments.

VALUES = {
    "dim": 0, "dims": (0, 1), "dim0": 0, "dim1": 1, "axis": 0, "axes": 1, "start": 0, "end": 1,
    "length": 1, "size": (SIZE, SIZE), "shape": (SIZE, SIZE), "repeats": 2, "n": 2, "k": 1,
    "index": torch.zeros(SIZE, SIZE, dtype=torch.long), "indices": torch.tensor([0, 1]),
    "mask": torch.ones(SIZE, SIZE, dtype=torch.bool), "value": 0.5, "chunks": 2, "sections": 2,
    "split_size": 2, "split_size_or_sections": 2, "indices_or_sections": 2, "p": 0.5,
    "dtype": torch.float64, "kernel_size": 1, "output_size": 2, "shifts": 1, "lambd": 0.5,
    "threshold": 0.1, "condition": torch.ones(SIZE, SIZE, dtype=torch.bool), "step": 1,
    "source": 0, "destination": 1, "ord": 2, "max": 1.0, "min": -1.0, "bins": 4, "diagonal": 0,
    "offset": 0, "upscale_factor": 1, "downscale_factor": 1, "groups": 1, "num_groups": 1,
    "normalized_shape": (SIZE,), "target": torch.zeros(SIZE, SIZE), "exponent": 2, "equation": "ij",
}  # fmt: skip


def guesses(function, names):
    """Lists of further arguments: more and more, then by the names of its parameters."""
    other = torch.linspace(0.1, 1.6, SIZE * SIZE).view(SIZE, SIZE)
    yield ()
    if names:
        yield tuple(VALUES.get(name, other) for name in names)
    yield from ((1,), (other,), (0.5,), (0, 1), (other, other), (2, 2), (0, VALUES["indices"]))
    yield from (((1,),), ([other],), (torch.float64,), (torch.zeros(SIZE, dtype=torch.long),))


def parameters_of(function):
    """The names of an overridable function's required parameters after the first one."""
    dummy = torch.overrides.get_testing_overrides().get(function)
    if dummy is None:
        return ()
    found = [
        name
        for name, p in inspect.signature(dummy).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return tuple(found[1:])


@dataclass(frozen=True)
class Use:
    """One call."""

    label: str
    how: str
    values: torch.Tensor  # of the tensor before it is updated
    call: Callable


def values_of(shape):
    n = torch.Size(shape).numel()
    return torch.linspace(-0.9, 1.1, n).view(shape).clone()


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        items = map(copied, value)
        return type(value)(items) if type(value) in (list, tuple) else value
    return value


def is_plain(value):
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.layout == torch.strided
        and value.numel() > 0
        and value.is_contiguous()
    )


def sample_uses(label, function, op, most):
    """With the samples of op_db: the tensor is the first argument, or the second one."""
    made = 0
    for sample in op.sample_inputs("cpu", torch.float32):
        if made >= most:
            return
        first, rest, named = sample.input, tuple(sample.args), sample.kwargs
        if is_plain(first):
            made += 1
            yield Use(
                label, "sample", first.detach(),
                lambda t, r=rest, n=named: function(t, *copied(r), **n),
            )  # fmt: skip
        elif isinstance(first, list | tuple) and first and is_plain(first[0]):
            made += 1
            yield Use(
                label, "sample", first[0].detach(),
                lambda t, f=first, r=rest, n=named: function(
                    [t, *copied(list(f[1:]))], *copied(r), **n
                ),
            )  # fmt: skip
        if rest and is_plain(rest[0]) and isinstance(first, torch.Tensor):
            yield Use(
                label, "second", rest[0].detach(),
                lambda t, f=first, r=rest, n=named: function(copied(f), t, *copied(r[1:]), **n),
            )  # fmt: skip


def op_of(label, ops):
    """Its operator in op_db: without the underscore of what works in place."""
    name = label.partition(".")[2] if label.startswith(("Tensor.", "torch.")) else label
    name = {"__add__": "__radd__"}.get(name, name)
    return ops.get(name) or ops.get(name.rstrip("_")) or ops.get(f"nn.functional.{name}")


def is_taken(use):
    """Whether stock takes these arguments."""
    return not isinstance(result_of(use.call, use.values.clone()), Exception)


def guessed(label, function):
    """The first guess that stock takes."""
    for shape in ((SIZE, SIZE), (1,), (SIZE,), (2, 3, 4), (1, 2, 4, 4), (1, 1, 4, 4, 4)):
        for arguments in guesses(function, parameters_of(function)):
            for second in (False, True) if arguments else (False,):

                def call(t, a=arguments, second=second):
                    a = copied(a)
                    return function(a[0], t, *a[1:]) if second else function(t, *a)

                use = Use(label, "guess", values_of(shape), call)
                if is_taken(use):
                    return use
    return Use(label, "never", values_of((SIZE, SIZE)), lambda t: function(t))


def uses(label, function, ops, most):
    if label in BY_HAND:
        yield Use(label, "hand", values_of((SIZE, SIZE)), lambda t: BY_HAND[label](function, t))
        return
    name = label.rpartition(".")[2]
    if function is None:
        yield Use(label, "attribute", values_of((SIZE, SIZE)), lambda t: getattr(t, name))
        return
    op = op_of(label, ops)
    found = list(sample_uses(label, function, op, most)) if op is not None else []
    yield from list(filter(is_taken, found)) or [guessed(label, function)]


# Playing a call.


def trained(values, fuse):
    """A parameter after two steps; the second is pending if it was fused."""
    weight = nn.Parameter(values.clone())
    optimizer = torch.optim.SGD([weight], lr=1e-3, momentum=0.9, fused=True)
    if fuse is not None:
        optimizer = fuse(optimizer)
    for i in range(2):
        weight.grad = None
        (weight * (values * (i + 1) + 0.5)).sum().backward()
        optimizer.step()
    return weight, optimizer


def promised(weight, optimizer):
    """The gradient of a linear layer, which nobody has computed if the optimizer is fused."""
    weight.grad = None
    x = torch.linspace(-1, 1, 2 * weight.shape[1], dtype=weight.dtype).view(2, -1)
    functional.linear(x, weight).tanh().sum().backward()
    return weight.grad


def can_be_promised(values):
    return values.dim() == 2 and values.dtype in (torch.float32, torch.float64) and values.numel()


PICK = {
    "parameter": lambda weight, optimizer: weight,
    "data": lambda weight, optimizer: weight.data,
    "gradient": lambda weight, optimizer: weight.grad,
    "state": lambda weight, optimizer: optimizer.state[weight]["momentum_buffer"],
    "consumed": lambda weight, optimizer: weight.grad,
    "promise": promised,
}


def result_of(call, tensor):
    torch.manual_seed(RANDOM)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return call(tensor)
    except Exception as error:
        return error


def after(use, role, fuse):
    """Calls it; the result, and all that there is then."""
    weight, optimizer = trained(use.values, fuse)
    if fuse is not None and role != "consumed":
        assert is_pending(optimizer), "nothing is pending: the call would prove nothing"
    tensor = PICK[role](weight, optimizer)
    if fuse is not None and role == "promise":
        assert is_promised(optimizer), "no gradient is a promise: the call would prove nothing"
    result = result_of(use.call, tensor)
    left = [weight, PICK["state"](weight, optimizer)]
    if role != "consumed":
        left.append(weight.grad)
    return result, left


def is_pending(optimizer):
    import optfuse

    return optfuse.summary(optimizer).pending == 1


def is_promised(optimizer):
    import optfuse

    (layer,) = optfuse.summary(optimizer).promised
    return layer.promised == 1 or "other bits" in layer.because


# Comparing.


def difference(ours, stock, label):
    """Empty: none."""
    if isinstance(stock, Exception) or isinstance(ours, Exception):
        same = type(ours) is type(stock)
        return "" if same else f"{shown(ours)}, in stock {shown(stock)}"
    if isinstance(stock, torch.Tensor) and isinstance(ours, torch.Tensor):
        return tensors_differ(ours, stock, label)
    if type(ours) is not type(stock):
        return f"a {type(ours).__name__}, in stock a {type(stock).__name__}"
    if isinstance(stock, dict):
        ours, stock = list(ours.items()), list(stock.items())
    if isinstance(stock, list | tuple):
        pairs = [difference(a, b, label) for a, b in zip(ours, stock, strict=False)]
        return "a length" if len(ours) != len(stock) else next(filter(None, pairs), "")
    if isinstance(stock, int | float | str | bytes | torch.dtype | torch.device | torch.Size):
        same = ours == stock or (ours != ours and stock != stock)
        return "" if same or is_unknown(label) else f"{ours!r:.80}, in stock {stock!r:.80}"
    return ""


def is_unknown(label):
    return any(label.rpartition(".")[2].startswith(w) or label == w for w in UNKNOWN)


def tensors_differ(ours, stock, label):
    for what in ("dtype", "shape", "layout", "requires_grad", "is_leaf", "device"):
        a, b = getattr(ours, what), getattr(stock, what)
        if a != b:
            return f"{what} {a}, in stock {b}"
    if is_unknown(label) or stock.device.type == "meta":
        return ""
    with torch.no_grad():
        a, b = (bits(t) for t in (ours, stock))
    return "" if a == b else "other numbers"


def bits(tensor):
    """Any NaN equals any other one."""
    t = tensor.detach()
    t = t.to_dense() if t.layout != torch.strided else t
    t = t.int_repr() if t.is_quantized else t.resolve_conj().resolve_neg()
    t = torch.view_as_real(t) if t.is_complex() else t
    if t.is_floating_point():
        t = torch.where(t.isnan(), torch.full_like(t, 1234.5), t)
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def shown(value):
    return (
        f"{type(value).__name__}: {str(value)[:140]}" if isinstance(value, Exception) else "a value"
    )


# ---- the sweep


def compared(use, role, optfuse):
    """Names the differences; empty: there is none."""
    mode = "backward" if role == "consumed" else "forward"
    stock, stock_left = after(use, role, None)
    ours, left = after(use, role, lambda optimizer: optfuse.fuse(optimizer, mode=mode))
    found = difference(left, stock_left, use.label) and "what is left differs"
    if use.how == "hand" and role == "data" and isinstance(stock, Exception):
        return f"stock has {shown(stock)}"
    if role != "consumed":
        return difference(ours, stock, use.label) or found
    try:
        return "" if isinstance(ours, optfuse.Error) else difference(ours, stock, use.label)
    except optfuse.Error:  # it is consumed, too
        return ""


def compare(use, optfuse):
    """Lines about what differs."""
    for role in PICK:
        if EXCEPTED.get(use.label, ("",))[0] in ("all", role):
            continue
        if role == "promise" and not can_be_promised(use.values):
            continue
        try:
            found = compared(use, role, optfuse)
        except Exception as error:
            found = f"can't be compared: {shown(error)}"
        if found:
            yield f"{use.label} ({use.how}) on {role}: {found}".replace("\n", " ")


def main(arguments):
    full, names = "--full" in arguments, [a for a in arguments if not a.startswith("--")]
    torch.set_num_threads(1)
    os.environ["OPTFUSE_PRODUCTS"] = "force"
    bound = targets()
    ops = op_db()
    counts, lines, never = {}, [], []
    import optfuse

    for label, function in bound.items():
        if names and label not in names:
            continue
        for use in uses(label, function, ops, 6 if full else 1):
            counts[use.how] = counts.get(use.how, 0) + 1
            if use.how == "never":
                never.append(label)
            lines += compare(use, optfuse)
    print(f"called: {len(bound) - len(never)} of {len(bound)} names, by {counts}")
    print(f"excepted: {len(EXCEPTED)}", *EXCEPTED)
    print(f"never reached: {len(never)}", *never)
    print(f"different: {len(lines)}", *lines, sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: BSD-3-Clause
"""Classes whose step() on one parameter the library makes without Python, by torch's operators in
their order (shim/native): the options and the state that it takes. What is not as usual is left
to the class's own step()."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from optfuse._rules import Group


class Native(NamedTuple):
    options: tuple[str, ...]  # in the order of shim/native/native.h; "eps.0": the first
    entries: tuple[tuple[str, ...], ...]  # keys of a state entry, in its order

    def numbers(self, group: Group) -> list[float]:
        """A group's options; all NaN if one of them is not a usual one."""
        try:
            return [_plain(name, group) for name in self.options]
        except (ValueError, KeyError, TypeError, OverflowError):
            return [math.nan] * len(self.options)

    def tensors(self, entry: Any) -> list[Any]:
        """None if it is not a usual one."""
        keys = entry.keys() if isinstance(entry, dict) else ()
        names = next((names for names in self.entries if keys == set(names)), ())
        found = [entry[name] for name in names]
        return found if all(isinstance(tensor, torch.Tensor) for tensor in found) else []


_ADAFACTOR = ("lr", "beta2_decay", "eps.0", "eps.1", "d", "weight_decay", "foreach", "maximize")
_MUON = (
    *("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients.0", "ns_coefficients.1"),
    *("ns_coefficients.2", "eps", "ns_steps", "adjust_lr_fn"),
)
NATIVE = {
    "adafactor": Native(_ADAFACTOR, (("step", "row_var", "col_var"), ("step", "variance"))),
    "muon": Native(_MUON, (("momentum_buffer",),)),
}
_LENGTHS = {"eps": 2, "ns_coefficients": 3}  # of options in which several are
# Numbers for options that are none.
_WORDS: dict[str, dict[Any, float]] = {
    "eps.0": {None: math.nan},
    "foreach": {None: 0.0},
    "adjust_lr_fn": {None: 0.0, "original": 0.0, "match_rms_adamw": 1.0},
}
# Types that numbers may have; a tensor's or NumPy's arithmetic rounds otherwise.
_NUMBERS: dict[str, tuple[type, ...]] = {"ns_steps": (int,), "adjust_lr_fn": ()}


def _plain(name: str, group: Group) -> float:
    """Raises an error if it is not a usual one."""
    key, _, index = name.partition(".")
    value = group[key]
    if index:
        if len(value) != _LENGTHS[key]:
            raise ValueError(name)
        value = value[int(index)]
    if type(value) in _NUMBERS.get(name, (float, int, bool)) and value == value:
        return float(value)
    words = _WORDS.get(name, {})
    if (value is None or type(value) is str) and value in words:
        return words[value]
    raise ValueError(name)

# SPDX-License-Identifier: BSD-3-Clause
"""Reads what nvcc makes of the CUDA kernels: the PTX leaves ptxas nothing to fuse, to approximate
or to flush, and ptxas spills no register. That its bits are right is seen where it is executed, as
it is written (ptx/).

    ptx_check.py [--sample] NVCC FOLDER FLAGS... -- INSTANCE SOURCE MACROS... [-- INSTANCE ...]

--sample: the instances of float32 and the first control, for one chip.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

CHIPS = ("sm_90", "sm_75")
SPILLS = ("adam", "adam_mixed", "sgd", "rmsprop", "nadam", "programs", "packing", "adamw")
SCALARS = 12  # roundings of a kernel's scalars to float, at most; there are more elements
# Where powers are in double, as CUDA's library has them in PyTorch (kernels/cuda/meson.build).
CONTRACTED = ("adam-float64", "adam_mixed-float32")
# How often a kernel may approximate, as CUDA's functions do in PyTorch: powf has one reciprocal,
# and corrects it; rsqrt is one, of each element of a vector and of one alone.
POWF, RSQRT = "rcp.approx", "rsqrt.approx"
APPROXIMATE = {"adam": (POWF, None), "asgd_next": (POWF, 1), "programs-float64": (RSQRT, 4)}
APPROXIMATE |= dict.fromkeys(
    ("programs-float32", "programs-bfloat16", "programs-float16"), (RSQRT, 8)
)
ROUNDED = re.compile(r"\b((?:fma|mul|add|sub|div|sqrt|rcp|ex2|lg2|rsqrt)[\w.]*\.f(?:32|64))")
# Builds that the check has to refuse: an instance and flags.
CONTROLS = (
    ("adam-float32", ("-fmad=true", "-use_fast_math")),
    ("nadam-float32", ("-fmad=true", "-prec-div=false", "-prec-sqrt=false", "-ftz=true")),
    ("programs-float32", ("-fmad=true", "-prec-div=false")),
    ("adamw-bfloat16", ("-fmad=true", "-prec-div=false", "-prec-sqrt=false", "-ftz=true")),
    ("asgd_next", ("-fmad=true", "-prec-div=false", "-prec-sqrt=false", "-ftz=true")),
    ("packing-float32", ("-fmad=true", "-ftz=true")),
)


class Compiler:
    def __init__(self, nvcc: str, flags: list[str], folder: Path) -> None:
        self.nvcc, self.flags, self.folder = nvcc, flags, folder

    def run(self, source: Path, *more: str) -> tuple[str, str]:
        out = self.folder / "out"
        command = [self.nvcc, *self.flags, *more, "-o", str(out), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        return out.read_text(errors="replace"), done.stderr

    def kernels(self, source: Path, contracted: bool, *macros: str) -> dict[str, str]:
        """The bodies by their names."""
        flags = ["-arch=compute_90", "-ptx", f"-fmad={str(contracted).lower()}"]
        ptx = self.run(source, *flags, *macros)[0]
        return dict(re.findall(r"\.entry (\w+)\((.*?)\n}\n", ptx, re.DOTALL))


def wrongly_rounded(body: str, contracted: bool) -> set[str]:
    """Operations that ptxas may fuse or flush."""
    found = {name for name in ROUNDED.findall(body) if ".approx" not in name}
    wrong = {name for name in found if {"full", "ftz"} & set(name.split("."))}
    bare = {name for name in found if ".rn" not in name}
    return wrong | (products_in_sums(body) if contracted else bare)


def wrongly_approximated(body: str, instance: str) -> list[str]:
    found = [name for name in ROUNDED.findall(body) if ".approx" in name]
    allowed, times = APPROXIMATE.get(
        instance, APPROXIMATE.get(re.split("[-_]", instance)[0], ("", 0))
    )
    own = [name for name in found if name.startswith(allowed)]
    return found if own != found or times not in (None, len(found)) else []


def products_in_sums(body: str) -> set[str]:
    """Bare products that go into bare sums: what a compiler may contract."""
    products = set(re.findall(r"\bmul\.f\d\d\s+(%\w+)", body))
    sums = re.findall(r"\b(?:add|sub)\.f\d\d\s+%\w+, (%\w+), (%\w+)", body)
    return {f"{name} in a sum" for pair in sums for name in pair if name in products}


def body_faults(name: str, body: str, instance: str) -> list[str]:
    found = [f"{name}: approximates by {w}" for w in [wrongly_approximated(body, instance)] if w]
    if wrong := wrongly_rounded(body, instance in CONTRACTED):
        found.append(f"{name}: {sorted(wrong)}")
    rounded = len(re.findall(r"cvt\.rn\.f32\.f64", body))
    if rounded > SCALARS and not instance.startswith("programs"):
        found.append(f"{name}: {rounded} roundings of scalars")
    if (n := body.count("bar.sync")) != name.startswith("of_cuda_packing_unpack"):
        found.append(f"{name}: {n} barriers")
    return found


def faults(compiler: Compiler, source: Path, instance: str, macros: list[str]) -> list[str]:
    """The faults in the PTX of one instance."""
    bodies = compiler.kernels(source, instance in CONTRACTED, *macros)
    found = [fault for name, body in bodies.items() for fault in body_faults(name, body, instance)]
    return found if bodies else [f"{instance}: no kernels"]


def spills(compiler: Compiler, source: Path, chip: str, macros: list[str]) -> list[str]:
    options = [f"-arch={chip}", "-cubin", "-Xptxas", "-v", "-fmad=false"]
    log = compiler.run(source, *options, *macros)[1]
    bytes_spilled = re.findall(r"(\d+) bytes spill", log)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    print(f"     {chip}: {max(registers)} registers at most, {set(bytes_spilled)} bytes spilled")
    return [] if set(bytes_spilled) == {"0"} else [f"{chip} spills: {bytes_spilled}"]


def main() -> None:
    sample = sys.argv[1] == "--sample"
    nvcc, folder, *rest = sys.argv[1 + sample :]
    groups: list[list[str]] = [[]]
    for word in rest:
        groups.append([]) if word == "--" else groups[-1].append(word)
    instances = {name: (Path(folder) / source, macros) for name, source, *macros in groups[1:]}
    if sample:
        instances = {k: v for k, v in instances.items() if k.endswith(("float32", "next"))}
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        compiler = Compiler(nvcc, groups[0], Path(temporary))
        for instance, (source, macros) in instances.items():
            found = faults(compiler, source, instance, macros)
            print(f"{'FAIL' if found else 'ok  '} {instance}", *found, sep="\n     ", flush=True)
            failed += found
            if instance.split("-")[0] in SPILLS and instance.endswith(("float32", "bfloat16")):
                for chip in CHIPS[:1] if sample else CHIPS:
                    failed += spills(compiler, source, chip, macros)
        for instance, flags in CONTROLS[:1] if sample else CONTROLS:
            source, macros = instances[instance]
            for flag in flags:
                found = faults(compiler, source, instance, [*macros, flag])
                print(f"control {instance} {flag}:", *(found[:1] or ["NOT SEEN"]))
                failed += [] if found else [f"a build of {instance} with {flag} was accepted"]
        if not body_faults("of_cuda_packing_unpack_float32", "ret;", "packing-float32"):
            failed.append("a kernel without its barrier was accepted")
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()

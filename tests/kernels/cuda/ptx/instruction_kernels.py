# SPDX-License-Identifier: BSD-3-Clause
"""Writes a PTX kernel for each instruction of instructions.def: it reads a, b and c from three
places of 8 bytes, and writes the result.

    instruction_kernels.py DEF OUT
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROW = re.compile(r"INSTRUCTION\((\w+), (\w+), (\w+), (\w+), (\w+),")
REGISTERS = {"u16": "%rs", "u32": "%r", "u64": "%rd", "f32": "%f", "f64": "%fd", "pred": "%p"}
KERNEL = """
.visible .entry instruction_{name}(
	.param .u64 instruction_{name}_param_0,
	.param .u64 instruction_{name}_param_1
)
{{
	.reg .pred %p<5>;
	.reg .b16 %rs<5>;
	.reg .b32 %r<9>;
	.reg .f32 %f<5>;
	.reg .b64 %rd<9>;
	.reg .f64 %fd<5>;

	ld.param.u64 %rd8, [instruction_{name}_param_0];
	ld.param.u64 %rd7, [instruction_{name}_param_1];
{lines}
	ret;
}}
"""


def kernel(name: str, result: str, kinds: list[str]) -> str:
    lines, operands = [], []
    for i, kind in enumerate(kinds):
        register = f"{REGISTERS[kind]}{i + 1}"
        operands.append(register)
        if kind == "pred":
            lines.append(f"ld.global.u32 %r{i + 5}, [%rd7+{8 * i}];")
            lines.append(f"setp.ne.s32 {register}, %r{i + 5}, 0;")
        else:
            lines.append(f"ld.global.{kind} {register}, [%rd7+{8 * i}];")
    to = f"{REGISTERS[result]}4"
    lines.append(f"{name.replace('_', '.')} {', '.join([to, *operands])};")
    if result == "pred":
        lines += ["selp.u32 %r4, 1, 0, %p4;", "st.global.u32 [%rd8], %r4;"]
    else:
        lines.append(f"st.global.{result} [%rd8], {to};")
    return KERNEL.format(name=name, lines="\n".join(f"\t{line}" for line in lines))


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    rows = ROW.findall(source.read_text("utf-8"))
    kernels = [
        kernel(name, result, [kind for kind in kinds if kind != "none"])
        for name, result, *kinds in rows
    ]
    out.write_text(".version 9.0\n.target sm_90\n.address_size 64\n" + "".join(kernels), "utf-8")


if __name__ == "__main__":
    main()

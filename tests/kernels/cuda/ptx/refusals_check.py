# SPDX-License-Identifier: BSD-3-Clause
"""PTX that is not understood is an error, and never something else's translation.

refusals_check.py COMPILER..."""

from __future__ import annotations

import subprocess
import sys

from parts import FLAGS
from ptx_text import PtxError
from translate import translated

KERNEL = """.visible .entry some(.param .u64 some_param_0)
{{
	.reg .pred %p<3>;
	.reg .b32 %r<3>;
	.reg .f32 %f<4>;
	.reg .b64 %rd<3>;
{line}
	ret;
}}
"""
# Instructions that the compiler does not know, and that translate.py refuses.
UNKNOWN = {
    "add.rz.f32 %f1, %f2, %f3;": "ptx_add_rz_f32",
    "add.rn.ftz.f32 %f1, %f2, %f3;": "ptx_add_rn_ftz_f32",
    "div.approx.f32 %f1, %f2, %f3;": "ptx_div_approx_f32",
    "shfl.sync.b32 %r1, %r2, 1, 31, -1;": "ptx_shfl_sync_b32",
    "ld.global.s16 %r1, [%rd1];": "ptx_get_s16",
}
REFUSED = {
    "ld.local.u32 %r1, [%rd1];": "no local.read",
    "ld.shared.u32 %r1, [%r2];": "no shared.read",
    "ld.volatile.global.u32 %r1, [%rd1];": "ld.volatile.global",
    "st.param.u32 [some_param_0], %r1;": "no param.write",
    "ld.global.v4.u32 {%r1, %r2}, [%rd1];": "2 registers",
    "add.rn.f32 %f1, %f2, %f9x;": "%f9x",
    "setp.lt.s32 %p1|%p2, %r1, %r2;": "%p1|%p2",
    ".reg .b128 %q<2>;": "unknown registers",
}
# Only shared memory of one kind begins at 0.
BOTH = """.extern .shared .align 16 .b8 rows[];
""" + KERNEL.format(
    line="""	.shared .align 4 .b8 place[16];
	mov.u32 %r1, rows;
	ld.shared.u32 %r2, [place];"""
)


def compiled(text: str) -> str:
    """The messages of the compiler."""
    command = [*sys.argv[1:], *FLAGS, "-fsyntax-only"]
    done = subprocess.run([*command, "-xc", "-"], input=text, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def main() -> None:
    wrong = []
    if said := compiled(translated(KERNEL.format(line="add.rn.f32 %f1, %f2, %f3;"))):
        wrong.append(f"a known instruction: {said}")
    for line, name in UNKNOWN.items():
        if name not in compiled(translated(KERNEL.format(line=line))):
            wrong.append(f"not unknown: {line}")
    refused = {KERNEL.format(line=line): why for line, why in REFUSED.items()}
    for text, why in {**refused, BOTH: "no shared.read"}.items():
        try:
            translated(text)
            wrong.append(f"not refused: {text}")
        except PtxError as error:
            if why not in str(error):
                wrong.append(f"{text}: {error}")
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()

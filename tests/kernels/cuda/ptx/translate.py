# SPDX-License-Identifier: BSD-3-Clause
"""Translates PTX to C: a function for each kernel, which does what one thread does.

    translate.py PTX OUT

Nothing of the project's sources is read. An instruction becomes a call of ptx.h, which is where
instructions have their meaning."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ptx_text import WIDTHS, Function, Instruction, Label, Local, PtxError, Scope, functions

TYPES = {1: "bool", 8: "u8", 16: "u16", 32: "u32", 64: "u64"}
SPECIAL = {
    "%tid.x": "host_thread_index.x",
    "%ctaid.x": "host_block_index.x",
    "%ntid.x": "host_block_size.x",
}
COMBINED = {"and": "&", "or": "|", "xor": "^"}  # of setp with a second predicate


def identifier(name: str) -> str:
    return name.replace("%", "").replace("$", "_")


class Writer:
    """Writes one function."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.barriers = sum(
            isinstance(one, Instruction) and one.parts[0] == "bar" for one in function.body
        )
        self.met = 0  # barriers that have been written
        self.labels: set[str] = set()  # that have been written
        self.places: dict[str, int] = {}  # of a kernel's parameters
        end = 0
        for parameter in function.parameters:
            end = (end + parameter.align - 1) // parameter.align * parameter.align
            self.places[parameter.name] = end
            end += parameter.bytes

    def register(self, name: str) -> str:
        return f"R->{identifier(name)}"

    def operand(self, text: str) -> str:
        function = self.function
        if text in SPECIAL:
            return SPECIAL[text]
        if text in function.registers:
            return self.register(text)
        if match := re.fullmatch(r"0[fF](\w{8})|0[dD](\w{16})", text):
            return f"0x{match[1] or match[2]}u"
        if re.fullmatch(r"-?\d+", text):
            return f"{int(text) % 2**64:#x}u"
        if text in function.shared:
            return str(function.shared[text])
        if text in function.dynamic:
            return "0u"
        if function.kernel and text in self.places:
            return f"(u64)(uintptr_t)ptx_now.arguments + {self.places[text]}"
        if not function.kernel or re.fullmatch(r"\w+", text):
            return identifier(text)  # a parameter of a call
        raise PtxError(f"{function.name}: operand {text!r}")

    def address(self, text: str) -> str:
        match = re.fullmatch(r"\[([^+\]]+)(?:\+(-?\d+))?\]", text)
        if not match:
            raise PtxError(f"{self.function.name}: address {text!r}")
        return f"{self.operand(match[1])} + {int(match[2] or 0) % 2**64:#x}u"

    def checked(self, space: str, address: str, size: int, line: int) -> str:
        shared, dynamic = self.function.shared_bytes, self.function.dynamic
        match space:
            case "global.read" | "global.write":
                return f"ptx_global({address}, {size}, {str('write' in space).lower()}, {line})"
            case "param.read":
                return f"ptx_argument({address}, {size}, {line})"
            case "shared.read" | "shared.write" if bool(shared) != bool(dynamic):
                name = f"{self.function.name}_shared, {shared}"
                memory = name if shared else "host_shared, host_shared_bytes"
                return f"ptx_shared({memory}, (u32)({address}), {size}, {line})"
        raise PtxError(f"{self.function.name}, line {line}: no {space}")

    def access(self, one: Instruction) -> str:
        """A load or a store."""
        name, space, *options, kind = one.parts
        loads = name == "ld"
        vector, many, address = one.operands[0 if loads else 1], 1, one.operands[1 if loads else 0]
        registers = re.findall(r"[^{},\s]+", vector)
        if self.is_of_call(address):
            place = identifier(address.strip("[]").removesuffix("+0"))
            stored = self.operand(vector)
            return f"{stored} = {place};" if loads else f"{place} = {stored};"
        for option in options:
            if option in ("v2", "v4"):
                many = int(option[1])
            elif option != "nc":  # not coherent: read-only memory
                raise PtxError(f"{self.function.name}, line {one.line}: {one.op}")
        size = int(kind[1:]) // 8
        if len(registers) != many:
            raise PtxError(f"{self.function.name}, line {one.line}: {len(registers)} registers")
        where = f"{space}.{'read' if loads else 'write'}"
        text = f"at = {self.checked(where, self.address(address), size * many, one.line)};"
        for i, register in enumerate(registers):
            value = self.operand(register)
            text += (
                f" {value} = ptx_get_{kind}(at + {i * size});"
                if loads
                else f" ptx_put_{kind}((unsigned char *)at + {i * size}, {value});"
            )
        return f"{{ const unsigned char *{text} }}"

    def is_of_call(self, address: str) -> bool:
        name = address.strip("[]").split("+")[0]
        locals_ = {one.name for one in self.function.body if isinstance(one, Local)}
        mine = not self.function.kernel and (name in self.places or name == self.function.result)
        return mine or name in locals_

    def parts_of(self, one: Instruction) -> str:
        """mov between a register and a vector of halves."""
        to, source = one.operands
        width = WIDTHS[one.parts[1]]
        pieces = re.findall(r"[^{},\s]+", to if to.startswith("{") else source)
        half = width // len(pieces)
        if to.startswith("{"):
            return " ".join(
                f"{self.operand(piece)} = ({TYPES[half]})({self.operand(source)} >> {i * half});"
                for i, piece in enumerate(pieces)
            )
        terms = [
            f"({TYPES[width]})({TYPES[half]}){self.operand(piece)} << {i * half}"
            for i, piece in enumerate(pieces)
        ]
        return f"{self.operand(to)} = {' | '.join(terms)};"

    def compared(self, one: Instruction) -> str:
        to, a, b, *more = one.operands
        parts = one.parts
        combined = next((COMBINED[part] for part in parts if part in COMBINED), "")
        name = "_".join(part for part in parts if part not in COMBINED)
        text = f"ptx_{name}({self.operand(a)}, {self.operand(b)})"
        if combined:
            text = f"({text} {combined} {self.operand(more[0])})"
        return f"{self.operand(to)} = {text};"

    def barrier(self) -> str:
        self.met += 1
        return f"{{ ptx_stop({self.met}); return; }} after_{self.met}:;"

    def jump(self, one: Instruction) -> str:
        label = one.operands[0]
        turn = f"ptx_turn({one.line}); " if label in self.labels else ""
        return f"{{ {turn}goto {identifier(label)}; }}"

    def called(self, one: Instruction) -> str:
        result, name, arguments = (part.strip("()") for part in one.operands)
        return f"{result} = {name}({arguments});"

    def effect(self, one: Instruction) -> str:
        name = one.parts[0]
        if name in ("ld", "st"):
            return self.access(one)
        if name == "setp":
            return self.compared(one)
        if name == "bra":
            return self.jump(one)
        if name == "bar" and one.parts == ["bar", "sync"] and one.operands == ("0",):
            return self.barrier()
        if name == "ret":
            return self.end()
        if name == "call":
            return self.called(one)
        if name == "mov" and any(text.startswith("{") for text in one.operands):
            return self.parts_of(one)
        to, *values = (self.operand(text) for text in one.operands)
        return f"{to} = ptx_{'_'.join(one.parts)}({', '.join(values)});"

    def end(self) -> str:
        if self.function.result:
            return f"return {self.function.result};"
        return "{ ptx_stop(PTX_ENDED); return; }" if self.barriers else "return;"

    def instruction(self, one: Instruction) -> str:
        if not one.guard:
            return self.effect(one)
        return f"if ({'!' if one.negated else ''}{self.register(one.guard)}) {self.effect(one)}"

    def statement(self, one: Instruction | Label | Local | Scope) -> str:
        match one:
            case Instruction():
                return self.instruction(one)
            case Label(name):
                self.labels.add(name)
                return f"{identifier(name)}:;"
            case Local(name):
                return f"u64 {identifier(name)};"
            case Scope(opens):
                return "{" if opens else "}"

    def head(self) -> str:
        function = self.function
        if function.kernel:
            return f"void {function.name}(const void *arguments)"
        arguments = ", ".join(f"u64 {parameter.name}" for parameter in function.parameters)
        return f"static u64 {function.name}({arguments})"

    def state(self) -> list[str]:
        """The registers; where there are barriers, of all threads, for the way from there on."""
        name = f"struct {self.function.name}_registers"
        fields = [
            f"{TYPES[WIDTHS[kind]]} {identifier(register)};"
            for register, kind in self.function.registers.items()
        ]
        self.declared = f"{name} {{ {' '.join(fields)} }};"
        if not self.barriers:
            return [f"{name} registers = {{0}}, *const R = &registers;"]
        cases = [f"case {i + 1}: goto after_{i + 1};" for i in range(self.barriers)]
        cases += ["case PTX_ENDED: return;", "default: break;"]
        return [
            f"static _Thread_local {name} kept[PTX_THREADS];",
            f"{name} *const R = &kept[host_thread_index.x];",
            f"switch (ptx_place()) {{ {' '.join(cases)} }}",
        ]

    def text(self) -> str:
        function, lines = self.function, self.state()
        declared = [self.declared]
        if size := function.shared_bytes:
            name = f"{function.name}_shared[{size}]"
            declared.append(f"static _Thread_local _Alignas(16) unsigned char {name};")
        if function.kernel:
            lines.append("(void)arguments;")
        if function.result:
            lines.append(f"u64 {function.result} = 0;")
        lines += [self.statement(one) for one in function.body]
        return "\n".join([*declared, *self.between(), self.head(), "{", *lines, "}", ""])

    def between(self) -> list[str]:
        """The lines before the function and after its registers."""
        return []


def translated(text: str) -> str:
    writers = [Writer(function) for function in functions(text)]
    heads = [f"{writer.head()};" for writer in writers]
    return "\n".join(['#include "ptx.h"', *heads, *(writer.text() for writer in writers)])


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    try:
        out.write_text(translated(source.read_text("utf-8")), "utf-8")
    except PtxError as error:
        sys.exit(f"{source}: {error}")


if __name__ == "__main__":
    main()

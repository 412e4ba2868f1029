"""Finds instructions in SASS that do not wait for an earlier one: a bug of ptxas.

Loads, stores and TMA read and write registers some time after they are issued. The encoding of an instruction names up
to two of six scoreboards, one that it releases when it has read its operands and one when it has written its results,
and the scoreboards that it waits for (Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking",
arXiv:1804.06826, section 2). Without a wait, an instruction may read a register before it is written, or overwrite it
before it is read. The fault shows only if the earlier instruction is slow, for example if two programs share an SM.

The ptxas of Triton 3.6 does not always compile the same PTX to the same code. In one of two variants of
selected_backward_kernel, the address of a load was overwritten before it was read.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

# instructions whose results arrive later; they read uniform registers when issued, except those of TMA
MEMORY = re.compile(
    r"(LD[GSLC]?|LDSM|ST[GSL]?|STSM|RED|ATOM[GS]?|S2U?R|SHFL|MUFU|I2F|F2I|UTM\w+|SYNCS|POPC|FLO|MATCH|BAR|MEMBAR|FENCE"
    r"|ERRBAR|CGAERRBAR|CCTL|DEPBAR|LDGSTS|LDGDEPBAR|REDUX)(\.|$)"
)
STORE = re.compile(r"(ST[GSL]?|STSM|RED)(\.|$)")
# these write no register, or (HGMMA) one that WARPGROUP.DEPBAR waits for
WITHOUT_RESULT = re.compile(
    r"(ST[GSL]?|STSM|RED|UTM\w+|BAR|BRA|BRX|SYNCS|HGMMA|MEMBAR|FENCE|WARPGROUP|USETMAXREG|EXIT|NOP|ERRBAR|CGAERRBAR"
    r"|CCTL|DEPBAR|ISETP|FSETP|UISETP|PLOP3|UPLOP3|LDGDEPBAR)(\.|$)"
)
# no scoreboard
NONE = 7


class Instruction(NamedTuple):
    """An instruction and its control bits.

    reads_done, writes_done  scoreboards that it releases when it has read or written its registers, or NONE
    waits                    bit i: it waits for scoreboard i
    """

    address: int
    is_conditional: bool
    name: str
    operands: str
    writes_done: int
    reads_done: int
    waits: int

    def __str__(self) -> str:
        return f"{self.address:#x} {self.name} {self.operands}"


class Pending(NamedTuple):
    """A register that instruction `source` will read, or write, before it releases a scoreboard."""

    scoreboard: int
    register: str
    is_written: bool
    source: int


def instructions(sass: str, code: bytes) -> list[Instruction]:
    """The instructions in the text and the encoding of a kernel."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ +)?([^\s;]+) *([^;]*);", sass)
    # 16 bytes each
    controls = [high >> 41 for _, high in struct.iter_unpack("<QQ", code[: 16 * len(found)])]
    return [
        Instruction(
            int(address, 16), bool(condition), name, operands.strip(), bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63
        )
        for (address, condition, name, operands), bits in zip(found, controls, strict=True)
    ]


def _width(name: str) -> int:
    """Registers of the result of an instruction, or of what it stores."""
    if ".128" in name or re.match(r"(LDSM|STSM)\S*\.4", name):
        return 4
    return 2 if ".64" in name or "WIDE" in name or re.match(r"(LDSM|STSM)\S*\.2", name) else 1


def _registers(kind: str, first: str, count: int) -> set[str]:
    return {f"{kind}{int(first) + i}" for i in range(count)}


def _of_tma(name: str) -> int:
    """Uniform registers of the first operand: shared memory, the mbarrier of a load, coordinates."""
    dims = re.search(r"\.(\d)D", name)
    return (2 if name.startswith("UTMALDG") else 1) + (int(dims[1]) if dims else 0)


def accesses(instruction: Instruction) -> tuple[set[str], set[str]]:
    """(registers that it writes, registers that it reads), without the operands of products."""
    name = instruction.name
    operands = [text.strip() for text in re.split(r",(?![^\[]*\])", instruction.operands)]
    written, read = set[str](), set[str]()
    if not WITHOUT_RESULT.match(name):
        # a predicate may come first
        i_result = 1 if re.fullmatch(r"U?P\w+", operands[0]) and len(operands) > 1 else 0
        result = re.fullmatch(r"(U?R)(\d+)", operands[i_result])
        if result:
            written = _registers(*result.groups(), _width(name))
            operands[i_result] = ""
    if name.startswith("HGMMA"):
        return written, read
    for i, operand in enumerate(operands):
        for desc, kind, first, is_wide in re.findall(r"(\bdesc\[)?\b(U?R)(\d+)\b(?:\.reuse)?(\.64)?", operand):
            count = 2 if desc or is_wide else 1
            if kind == "UR" and MEMORY.match(name):
                if not name.startswith("UTM"):
                    continue
                count = _of_tma(name) if i == 0 else 2
            elif STORE.match(name) and "[" not in operand:
                count = _width(name)
            read |= _registers(kind, first, count)
    return written, read


def _successors(code: list[Instruction]) -> list[list[int]]:
    index = {each.address: i for i, each in enumerate(code)}
    found = []
    for i, each in enumerate(code):
        follows = [i + 1] if i + 1 < len(code) else []
        if each.name.startswith("BRA"):
            *condition, target = re.split(r"\b0x", each.operands)
            is_conditional = each.is_conditional or re.search(r"U?P\d", condition[0])
            follows = [index[int(target, 16)], *(follows if is_conditional else [])]
        elif each.name.startswith("EXIT") and not each.is_conditional:
            follows = []
        found.append(follows)
    return found


def unwaited(sass: str, code: bytes) -> list[str]:
    """Instructions that use a register too early, each with the instruction that it does not wait for."""
    program = instructions(sass, code)
    registers, successors = [accesses(each) for each in program], _successors(program)
    before: list[set[Pending] | None] = [None] * len(program)
    found = dict[str, None]()

    def after(i: int, pending: set[Pending]) -> set[Pending]:
        each, (written, read) = program[i], registers[i]
        released = {board for board in range(6) if each.waits >> board & 1}
        if each.name.startswith("DEPBAR"):
            released |= {int(board) for board in re.findall(r"SB(\d)", each.operands)}
        # an instruction that has written its results has read its operands
        done = {one.source for one in pending if one.is_written and one.scoreboard in released}
        pending = {one for one in pending if one.scoreboard not in released and one.source not in done}
        for one in pending:
            # memory instructions read their operands in order
            is_early = one.register in (written | read if one.is_written else written)
            if is_early and (one.is_written or not MEMORY.match(each.name)):
                verb = "has written" if one.is_written else "has read"
                found[f"{each} uses {one.register} before {program[one.source]} {verb} it"] = None
        pending = {one for one in pending if one.register not in written}
        if each.writes_done != NONE:
            pending |= {Pending(each.writes_done, register, True, i) for register in written}
        if each.reads_done != NONE:
            pending |= {Pending(each.reads_done, register, False, i) for register in read}
        return pending

    # the targets of indirect branches have no other predecessor
    reached = {target for targets in successors for target in targets}
    work = [i for i in range(len(program)) if i == 0 or i not in reached]
    for i in work:
        before[i] = set()
    while work:
        i = work.pop()
        pending = after(i, before[i] or set())
        for target in successors[i]:
            known = before[target]
            if known is None or not pending <= known:
                before[target] = (known or set()) | pending
                work.append(target)
    return list(found)

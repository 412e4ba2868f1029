"""scoreboards.unwaited finds each kind of register that is used too early, and nothing else."""

from __future__ import annotations

import struct

import pytest

from tests.support.scoreboards import NONE, unwaited

# (text, scoreboard released when it has read its registers, when it has written them, scoreboards that it waits for)
Line = tuple[str, int, int, tuple[int, ...]]


def line(text: str, *, read: int = NONE, written: int = NONE, waits: tuple[int, ...] = ()) -> Line:
    return text, read, written, waits


def compiled(lines: list[Line]) -> tuple[str, bytes]:
    """Text and encoding of instructions, which are conditional after a predicate."""
    sass = "\n".join(f"        /*{16 * i:04x}*/    {text} ;" for i, (text, *_) in enumerate(lines))
    controls = [sum(1 << each for each in waits) << 11 | read << 8 | written << 5 for _, read, written, waits in lines]
    return sass, b"".join(struct.pack("<QQ", 0, bits << 41) for bits in controls)


LOAD = "LDG.E R11, desc[UR30][R12.64]"


@pytest.mark.parametrize(
    ("first", "then", "register"),
    [
        # the fault of Triton 3.6: an address that is overwritten
        (line(LOAD, read=1), "LEA R12, P0, R5, R2, 0x2", "R12"),
        (line(LOAD, read=1), "LEA.HI.X R13, R5, R3, R221, 0x2, P0", "R13"),
        # that of Triton 3.7: a stored value that is overwritten
        (line("STSM.16.M88.4 [R57], R24", read=1), "VIADD R27, R21, UR8", "R27"),
        (line("STS.64 [R57+UR4], R24", read=1), "MOV R25, RZ", "R25"),
        (line("UTMALDG.4D [UR16], [UR6]", read=1), "UMOV UR21, URZ", "UR21"),
        (line("UTMASTG.4D [UR16], [UR6]", read=1), "R2UR UR20, R0", "UR20"),
        (line("UTMASTG.4D [UR16], [UR6]", read=1), "UIADD3 UR7, UR7, 0x1, URZ", "UR7"),
        # results that are used, or overwritten by an earlier value
        (line(LOAD, written=1), "IMAD.IADD R6, R11, 0x1, -R217", "R11"),
        (line(LOAD, written=1), "MOV R11, RZ", "R11"),
        (line("LDS.128 R8, [R20]", written=1), "STS [R20], R11", "R11"),
        (line("LDL.64 R8, [R20]", written=1), "LOP3.LUT P1, R9, R0, 0x7f, RZ, 0xc0, !PT", "R9"),
    ],
)
def test_a_register_that_is_used_too_early_is_found(first: Line, then: str, register: str) -> None:
    other = line("IMAD R200, R201, R202, R203")
    (found,) = unwaited(*compiled([first, other, line(then)]))
    assert f"{then} uses {register} before 0x0 {first[0]} has" in found
    assert unwaited(*compiled([first, other, line(then, waits=(0, 1))])) == []
    assert unwaited(*compiled([first, line("MOV R200, RZ", waits=(1,)), line(then)])) == []
    assert unwaited(*compiled([first, line("DEPBAR.LE SB1, 0x0"), line(then)])) == []
    assert len(unwaited(*compiled([first, line("MOV R200, RZ", waits=(0, 2, 3, 4, 5)), line(then)]))) == 1
    assert len(unwaited(*compiled([first, line("DEPBAR.LE SB0, 0x0"), line(then)]))) == 1


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (line(LOAD, read=1), "LEA R14, P0, R12, R13, 0x2"),
        # no scoreboard: a fixed latency
        (line("IMAD R12, R12, R13, R14"), "MOV R12, R12"),
        # memory instructions read their operands in order
        (line(LOAD, read=1), "LDL R12, [R1+0xc]"),
        # uniform registers are read at once, but by TMA
        (line("STS [UR5+0x10], R8", read=1), "UMOV UR5, UR6"),
        (line(LOAD, read=1), "UMOV UR30, UR6"),
        (line("UTMALDG.1D [UR16], [UR6]", read=1), "UMOV UR19, URZ"),
        (line("UTMASTG.4D [UR16], [UR6]", read=1), "UMOV UR21, URZ"),
        (line("STSM.16.M88.4 [R57], R24", read=1), "MOV R28, RZ"),
        (line("LDS.64 R8, [R20]", written=1), "MOV R10, RZ"),
        # a predicate
        (line("ISETP.GE.AND P3, PT, R221, R8, PT", written=1), "MOV R221, R8"),
    ],
)
def test_other_registers_are_not_reported(first: Line, then: str) -> None:
    assert unwaited(*compiled([first, line(then)])) == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # around a loop, and past a branch
        ([line("MOV R12, RZ"), line(LOAD, read=1), line("@P0 BRA 0x0000"), line("EXIT")], 1),
        ([line("MOV R12, RZ"), line(LOAD, read=1), line("BRA 0x0000"), line("EXIT")], 1),
        ([line("MOV R12, RZ", waits=(1,)), line(LOAD, read=1), line("@P0 BRA 0x0000"), line("EXIT")], 0),
        ([line(LOAD, read=1), line("@P0 BRA 0x0030"), line("EXIT"), line("MOV R12, RZ")], 1),
        ([line(LOAD, read=1), line("BRA P1, 0x0030"), line("EXIT"), line("MOV R12, RZ")], 1),
        # not reached
        ([line(LOAD, read=1), line("BRA 0x0030"), line("MOV R12, RZ"), line("EXIT")], 0),
        ([line(LOAD, read=1), line("EXIT"), line("MOV R12, RZ")], 0),
        # what has been written has been read
        ([line(LOAD, read=1, written=2), line("MOV R12, R11", waits=(2,))], 0),
        ([line(LOAD, read=1), line("@P2 EXIT"), line("MOV R12, RZ")], 1),
        # the targets of an indirect branch
        ([line("BRX R2 -0x10"), line("EXIT"), line(LOAD, read=1), line("MOV R12, RZ"), line("EXIT")], 1),
        # waited for on one of two paths
        ([line(LOAD, read=1), line("@P0 BRA 0x0030"), line("NOP", waits=(1,)), line("MOV R12, RZ")], 1),
        # reported once, though the value that replaces it is read again
        ([line(LOAD, written=1), line("MOV R11, RZ"), line("MOV R10, R11")], 1),
    ],
)
def test_every_path_is_followed(lines: list[Line], expected: int) -> None:
    assert len(unwaited(*compiled(lines))) == expected

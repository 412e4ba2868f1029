"""What ptx_and_sass.py finds in short listings, and what it leaves out."""

from __future__ import annotations

import pytest

ptx_and_sass = pytest.importorskip("tests.support.ptx_and_sass", reason="needs Triton")


@pytest.mark.parametrize(
    ("between", "expected"), [("bar.sync 0, 128;", 0), ("bar.warp.sync -1;", 0), ("add.s32 %r4, %r1, 1;", 1)]
)
def test_an_mbarrier_arrival_needs_a_barrier_after_shared_memory_reads(between: str, expected: int) -> None:
    ptx = f"bar.sync 0, 128; ld.shared.b32 %r1, [%r2]; {between} @%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];"
    assert ptx_and_sass.early_arrivals(ptx) == expected


def test_spills_are_counted_only_in_loops_with_products() -> None:
    code = ["STL [R1], R9", "LDL R9, [R1]", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT", "@P1 BRA 0x0010"]
    code += ["STL [R1], R9", "@P1 BRA 0x0040", "BRA 0x0000"]
    sass = "\n".join(f"        /*{16 * line:04x}*/    {text} ;    /* 0x0 */" for line, text in enumerate(code))
    assert ptx_and_sass.spills_beside_products(sass) == 1


# a loop with a product whose left operand, %r1 to %r4, comes from before the loop
KEPT_PTX = """
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r9];
$L__BB0_2:                              // =>This Inner Loop
    .loc 1 8 15
    // begin inline asm
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r5,%r6}, {%r1,%r2,%r3,%r4}, %rd1, %p1, 1, 1, 0;
    // end inline asm
    cvt.rn.bf16x2.f32 %r7, %r5, %r6;
    @%p2 bra $L__BB0_2;
"""


@pytest.mark.parametrize(
    ("ptx", "expected"),
    [
        (KEPT_PTX, 1),
        # computed in each iteration, or passed from one to the next
        (KEPT_PTX.replace("%r7", "%r1"), 0),
        (KEPT_PTX.replace("cvt.rn.bf16x2.f32 %r7, %r5, %r6", "mov.b32 %r4, %r7"), 0),
        # no loop
        (KEPT_PTX.replace("@%p2 bra $L__BB0_2;", ""), 0),
        # from shared memory
        (KEPT_PTX.replace("{%r1,%r2,%r3,%r4}, %rd1", "%rd2, %rd1"), 0),
    ],
)
def test_operands_that_a_loop_keeps_are_found_in_ptx(ptx: str, expected: int) -> None:
    assert ptx_and_sass.kept_operands(ptx) == expected


@pytest.mark.parametrize(
    "before", ["LDSM.16.M88.4 R180, [R3+UR22+0xe000]", "LOP3.LUT R181, R152, 0x80008000, RZ, 0x3c"]
)
@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        # the operand of the other product
        ("F2FP.BF16.F32.PACK_AB R184, R25, R24", 0),
        ("F2FP.BF16.F32.PACK_AB R183, R25, R24", 1),
        ("LDSM.16.M88.4 R178, [R3+UR22+0xe000]", 1),
        ("STS.128 [R180], R184", 0),
    ],
)
def test_overwriting_an_operand_that_a_loop_keeps_is_found(before: str, writes: str, expected: int) -> None:
    code = [
        before,
        "MOV R9, RZ",
        "HGMMA.64x64x16.F32.BF16 R24, R180, gdesc[UR16], RZ, !UPT",
        writes,
        "HGMMA.64x64x16.F32.BF16 R88, R184, gdesc[UR32].tnspB, R88",
        "@P1 BRA 0x0010",
        # the operand of the next work tile, and the outer loop
        before,
        "BRA 0x0000",
    ]
    sass = "\n".join(f"        /*{16 * line:04x}*/    {text} ;    /* 0x0 */" for line, text in enumerate(code))
    assert ptx_and_sass.lost_operands(KEPT_PTX, sass) == expected
    # an operand that each iteration passes to the next
    assert ptx_and_sass.lost_operands(KEPT_PTX.replace("%r7", "%r1"), sass) == 0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (["UIADD3 UR18, UP0, UR18, 0x20, URZ"], 1),
        (["UIADD3 UR18, UP0, UR16, 0x20, URZ"], 0),
        # a result that is discarded
        (["UIADD3 URZ, UP0, UR16, 0x20, URZ"], 0),
        (["STS.U16 [R68+UR17+0x8000], R35"], 0),
        (["STS.U16 [R68+UR18+0x8000], R35"], 1),
        # descriptors are left out
        (["HGMMA.64x16x16.F32.BF16 R56, R28, gdesc[UR20].tnspB, R56"], 0),
        # high halves of addresses
        (["LDG.E R9, desc[UR16][R2.64+0x2c]"], 0),
        (["UMOV UR20, UR16", "LDG.E R9, desc[UR20][R2.64+0x2c]"], 1),
        (["UMOV UR20, UR16", "UTMASTG.4D [UR16], [UR20]"], 1),
        (["UMOV UR20, UR16", "UIADD3.64 UR22, UR20, 0x200, URZ"], 1),
        # copies, which later results replace
        (["UMOV UR19, UR18", "UIADD3.X UR19, URZ, UR17, URZ, UP2, !UPT", "STS [R68+UR19], R35"], 0),
        (["MOV R0, UR18", "R2UR UR19, R0", "MOV R0, R5", "R2UR UR19, R0", "STS [R0+UR19], R35"], 0),
        # or which are used
        (["UMOV UR19, UR18", "STS [R68+UR19], R35"], 1),
        (["UMOV UR16, UR18", "STS [R68+UR16], R35"], 1),
        (["MOV R0, UR18", "R2UR UR19, R0", "STS [R68+UR19], R35"], 1),
        (["IMAD.U32 R0, RZ, RZ, UR18", "STS [R0], R35"], 1),
        (["IMAD.U32 R0, RZ, R7, UR18"], 1),
        (["@P1 UMOV UR19, UR18"], 1),
    ],
)
def test_reads_of_unwritten_uniform_registers_are_found(code: list[str], expected: int) -> None:
    code = ["ULDC.64 UR16, c[0x0][0x208]", "MOV R9, RZ", *code]
    sass = "\n".join(f"        /*{16 * line:04x}*/    {text} ;    /* 0x0 */" for line, text in enumerate(code))
    assert ptx_and_sass.unwritten_registers(sass) == expected

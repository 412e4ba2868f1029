"""What compiled kernels show in PTX and SASS: spills in loops, early arrivals, lost and unwritten registers."""

from __future__ import annotations

import itertools
import re
import struct
import subprocess
import tempfile

import triton


def early_arrivals(ptx: str) -> int:
    """Number of mbarrier arrivals that follow an access to shared memory without a thread barrier between them.

    One thread arrives for all warps of a partition. Without the barrier another warp could still read a buffer that the
    arrival releases, or write one that it commits.
    """
    n_early, is_ordered = 0, True
    barriers = r"\b(?:bar|barrier)\.(?:warp\.)?sync|mbarrier\.arrive\.shared"
    events = rf"\b(?:ld|st)\.shared|\b(?:ld|st)matrix|wgmma\.mma_async|{barriers}"
    for event in re.findall(events, ptx):
        if event.startswith("mbarrier"):
            n_early += not is_ordered
        else:
            is_ordered = event.startswith("bar")
    return n_early


def code_and_loops(sass: str) -> tuple[list[tuple[int, str]], list[tuple[int, int]]]:
    """(address, text) of the instructions and (first, last) address of the loops, from `cuobjdump -sass` output."""
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ +)?([^;/]+?) *;", sass)
    lines = [(int(address, 16), text) for address, text in code]
    branches = [(address, re.match(r"BRA (?:[^,]+, )?0x([0-9a-f]+)", text)) for address, text in lines]
    targets = [(int(branch[1], 16), address) for address, branch in branches if branch]
    return lines, [(target, address) for target, address in targets if target < address]


def spills_beside_products(sass: str) -> int:
    """Number of spill loads and stores in the innermost loops with matrix products."""
    lines, loops = code_and_loops(sass)
    with_products = {innermost(loops, address) for address, text in lines if "HGMMA" in text}
    spills = [address for address, text in lines if re.match("LDL|STL", text)]
    return sum(first <= address <= last for address in spills for first, last in filter(None, with_products))


def innermost(loops: list[tuple[int, int]], address: int) -> tuple[int, int] | None:
    """The innermost loop around an address, None outside loops."""
    around = [loop for loop in loops if loop[0] <= address <= loop[1]]
    return min(around, key=lambda loop: loop[1] - loop[0]) if around else None


def kept_operands(ptx: str) -> int:
    """Number of wgmma in PTX whose left operand is in registers that the innermost loop around them never writes."""
    statements, labels = list[str](), dict[str, int]()
    for statement in re.sub(r"//[^\n]*", "", ptx).split(";"):
        for label in re.findall(r"^\s*([$\w]+):", statement, re.MULTILINE):
            labels[label] = len(statements)
        # remove labels, directives and the opening brace of inline assembly
        text = re.sub(r"^\s*([$\w]+:|\.\w+[^\n]*$)", "", statement, flags=re.MULTILINE)
        statements.append(text.strip().lstrip("{").strip())
    loops = []
    for i, text in enumerate(statements):
        branch = re.search(r"\bbra(?:\.uni)?\s+([$\w]+)$", text)
        if branch and labels.get(branch[1], i + 1) <= i:
            loops.append((labels[branch[1]], i))
    result = re.compile(r"(?:@!?%p\d+\s+)?[\w.:]+\s+(\{[^}]*\}|%\w+(?:\|%\w+)?)\s*(?:,|$)")
    written = [set(re.findall(r"%\w+", found[1])) if (found := result.match(text)) else set() for text in statements]
    n_kept = 0
    for i, text in enumerate(statements):
        product = re.match(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*\{([^}]*)\}", text)
        loop = innermost(loops, i)
        if product and loop:
            n_kept += set(re.findall(r"%\w+", product[1])).isdisjoint(set().union(*written[loop[0] : loop[1] + 1]))
    return n_kept


def result_registers(text: str) -> range:
    """The registers that a SASS instruction writes."""
    found = re.match(r"(\S+) R(\d+)\b", text)
    if not found or re.match(r"ST|RED|ATOM|UTMA", found[1]):
        return range(0)
    name, width = found[1], 1
    product = re.match(r"HGMMA\.64x(\d+)x", name)
    if product:
        width = int(product[1]) // 2
    elif ".128" in name or (name.startswith("LDSM") and ".4" in name):
        width = 4
    elif ".64" in name or "WIDE" in name or (name.startswith("LDSM") and ".2" in name):
        width = 2
    return range(int(found[2]), int(found[2]) + width)


def lost_operands(ptx: str, sass: str) -> int:
    """Number of products in SASS whose left operand should stay in registers but is overwritten later in the loop.

    From the second iteration on, such a product multiplies values of the iteration before. The ptxas of Triton 3.6 and
    3.7 has this bug, those of 3.8 and 3.9 do not: values that are loaded (LDSM) or computed (LOP3) before the loop are
    kept in registers that the exponentials (F2FP) of each iteration overwrite. A loop that computes an operand for its
    next iteration looks the same in SASS, but in PTX it writes the registers. Hence the result is 0 unless a product in
    PTX has an operand that its loop never writes.
    """
    if not kept_operands(ptx):
        return 0
    lines, loops = code_and_loops(sass)
    written = [(address, result_registers(text)) for address, text in lines]
    n_lost = 0
    for address, text in lines:
        product = re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", text)
        loop = innermost(loops, address)
        if not product or not loop:
            continue
        operand = range(int(product[1]), int(product[1]) + 4)
        writes = [
            at for at, registers in written if loop[0] <= at <= loop[1] and not set(operand).isdisjoint(registers)
        ]
        n_lost += bool(writes) and min(writes) >= address
    return n_lost


def unwritten_registers(sass: str) -> int:
    """Number of reads of uniform registers, which hold addresses, that no earlier instruction writes: a bug of ptxas.

    A copy is no read: ptxas may move a 64-bit address before it has computed the high half. But the copy of an
    unwritten register is unwritten too, also in a general register.
    Matrix descriptors (gdesc) do not count: a product with its left operand in registers reads the last two of four.
    """
    written, unwritten_copies = set[str](), set[str]()
    n_unwritten = 0
    for predicate, name, operands in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ +)?(\S+) *([^;]*);", sass):
        first, _, sources = operands.strip().partition(",")
        results = [f"R{i}" for i in result_registers(f"{name} {operands}")]
        if name.startswith(("U", "R2UR", "S2UR")) and not name.startswith("UTM") and re.fullmatch(r"UR\d+", first):
            # wide results are pairs of registers, or four
            results = _consecutive(first, 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1)
        reads = [] if "gdesc" in operands else _registers_read(name, sources if results else operands)
        missing = [
            each for each in reads if each in unwritten_copies or (each.startswith("UR") and each not in written)
        ]
        text = f"{name} {operands.strip()}"
        is_copy = re.fullmatch(r"(?:U?MOV|R2UR) U?R\d+, U?R\d+|IMAD\S* R\d+, RZ, RZ, U?R\d+", text)
        if missing and is_copy and not predicate:
            unwritten_copies.update(results)
            written.difference_update(results)
        else:
            n_unwritten += len(missing)
            unwritten_copies.difference_update(results)
            written.update(results)
    return n_unwritten


def _consecutive(first: str, count: int) -> list[str]:
    """Registers from the first one on."""
    kind = first.rstrip("0123456789")
    return [f"{kind}{int(first.removeprefix(kind)) + i}" for i in range(count)]


def _registers_read(name: str, sources: str) -> list[str]:
    """Registers that an instruction reads, with the high halves of 64-bit addresses and values."""
    if name.startswith("UTM"):
        # the buffer, which the mbarrier follows, and the address of the descriptor
        return [each for first in re.findall(r"\[(UR\d+)\]", sources) for each in _consecutive(first, 2)]
    found = []
    for memory, first, is_wide in re.findall(r"(\bdesc\[)?\b(U?R\d+)\b(\.64)?", sources):
        is_pair = memory or is_wide or (name.startswith("U") and ".64" in name)
        found += _consecutive(first, 2 if is_pair else 1)
    return found


def instructions_of(cubin: bytes) -> bytes:
    """The instructions of a cubin, which is an ELF file: the contents of its sections .text.<kernel>."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, i_names = struct.unpack_from("<HHH", cubin, 0x3A)
    # name, type, flags, address, offset, length
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(count)]
    names = sections[i_names][4]
    return b"".join(
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin.startswith(b".text.", names + name)
    )


def disassembled(cubins: list[bytes]) -> list[str]:
    """SASS of kernels for sm90, from the nvdisasm that ships with Triton. Addresses count through all kernels.

    One run for all, since a run takes half a second to start.
    """
    codes = [instructions_of(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "--binary", "SM90a", file.name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"^ */\*[0-9a-f]{4,}\*/.*", output, re.MULTILINE)
    # an instruction has 16 bytes
    ends = [end // 16 for end in itertools.accumulate(map(len, codes))]
    assert len(lines) == (ends[-1] if ends else 0), output[:1000]
    return ["\n".join(lines[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]

"""Layouts and plans of blocks that a model selects on a device, made without waiting for the device.

Tensors have room for every entry of the selection (the capacity), unused entries last, so a CUDA graph can capture
everything here.

On a GPU four launches do the work (0.37 ms of a step of 16,384 tokens on an H200, against 1.34 ms for the 60 PyTorch
operations here): kernels/triton/block_selection.py and plan_builder.py. The operations define what the kernels compute.
They run on the CPU, under torch.compile and other tracing, and where the kernels do not apply: see `_has_kernels`,
`by_scores` and `plan_of_selection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import checks
from ..blocks.block_list import FULL, Frame, Size
from ..plan_format import N_LONG, PARTIAL, RECORD, TILE, Plan, list_lengths, with_dynamic_lengths
from ..runtime import tracing

# blocks per tile up to which all possible bitmasks are made in advance: 2^4 patterns
MAX_TABLED_BLOCKS = 4
# the kernels mark blocks as bits only up to this many block rows (of 128 tokens or more: a million tokens) and block
# cols: a program holds all cols of a row, and the kernels visit every tile of the grid, stored or not
MAX_GRID_SIDE = 8192
# rows of 128 tokens or block cols of all batches and heads together: each program sums the counts of all programs
# before it, and offsets are 32-bit
MAX_TOTAL_GRID_SIDE = 1 << 20
# block rows of all batches and heads together
MAX_BLOCK_ROWS = 1 << 22
# bit words allowed per row: BASE_BIT_WORDS (few beside the row's scores) plus BIT_WORDS_PER_ENTRY per selected entry
# (an entry takes as much in a plan)
BASE_BIT_WORDS, BIT_WORDS_PER_ENTRY = 64, 4
# int32 words of the bitmasks of a plan; their offsets are 32-bit
MAX_BITMASK_WORDS = (1 << 31) - (1 << 12)
# dtypes of scores that the kernels compare, as 32 bits
COMPARABLE = (torch.float32, torch.float16, torch.bfloat16)
# dtypes of scores and indices that PyTorch sorts and compares on every device
FLOATS = (*COMPARABLE, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Selection(NamedTuple):
    """The int32 tensors of a layout of full blocks that were selected on a device, and what its plans need beside them.

    indptr, indices, bitmask_ids  see BlockLayout. All rows together use no more than len(indices) blocks; the unused
                    entries come last
    bits            the same blocks as bits (batch * heads, n_rows, words), if kernels made them
    rows_per_token  consecutive queries at the position of one token, a power of two: the heads of a group
    documents       int32 (batch | 1, 3, tokens): number of the document, first key, one past the last key of each
                    token; plans drop the other pairs. None: one document
    n_documents     documents of a sequence, at most
    may_have_selected_plan  whether it comes from `selected_attention`, whose calls may have plans by key block: see
                    selected_builder.py
    """

    indptr: Tensor
    indices: Tensor
    bitmask_ids: Tensor
    bits: Tensor | None
    rows_per_token: int = 1
    documents: Tensor | None = None
    n_documents: int = 0
    may_have_selected_plan: bool = False


def frame_of(values: Tensor, name: str, frame: Frame, *, kind: str) -> Frame:
    """Check `values` and return the frame with their batch and heads.

    kind  "integers" (any number per row) or "floats" (one per col)
    """
    checks.check_tensor(name, values, f"; torch.tensor({name}) makes one from nested lists")
    checks.check_in_memory(values, name)
    if values.dtype not in (INTEGERS if kind == "integers" else FLOATS):
        hint = "int64" if kind == "integers" else "float32"
        raise ValueError(f"{name} must be {kind}, got {values.dtype}; {name}.to(torch.{hint}) makes them")
    last, size = ("k", None) if kind == "integers" else (f"n_cols = {frame.n_cols}", frame.n_cols)
    if (
        values.ndim != 4
        or 0 in values.shape[:2]
        or values.shape[2] != frame.n_rows
        or size not in (None, values.shape[3])
    ):
        raise ValueError(
            f"{name} must have shape (batch or 1, heads or 1, n_rows = {frame.n_rows}, {last}), "
            f"got {tuple(values.shape)}"
        )
    _check_sides(frame)
    checks.check_nnz(values.numel())
    return frame._replace(batch=values.shape[0], heads=values.shape[1])


def _check_sides(frame: Frame) -> None:
    for side in frame.block_size:
        if TILE % side and side % TILE:
            raise ValueError(
                f"block_size must divide {TILE} or be a multiple of it for blocks selected on a device, got "
                f"{frame.block_size}: from_block_mask() takes any size, on the host"
            )


def check_selected(tensors: Sequence[Tensor], frame: Frame) -> None:
    """Refuse tensors that no selection has; types and shapes are checked already. Waits for their device.

    A selection has k entries per row of each head. A row uses at most k of them, ascending and distinct; the used
    entries of all rows come first, then zeros. Every block is full.
    """
    _check_sides(frame)
    bitmasks = tensors[3]
    if len(bitmasks):
        raise ValueError(f"bitmasks must be none for selected blocks, which are full, got {len(bitmasks)}")
    n_flat_rows, capacity = frame.batch_heads * frame.n_rows, len(tensors[1])
    k = capacity // max(1, n_flat_rows)
    if k * n_flat_rows != capacity:
        raise ValueError(
            f"indices must have k entries for each of the {n_flat_rows} rows of all heads of a selection, "
            f"got {capacity}"
        )
    if bitmasks.is_meta:
        return
    indptr, indices, ids = (tensor.detach().cpu().numpy() for tensor in tensors[:3])
    counts = checks.check_rows(indptr, indices, frame, is_padded=True)
    if (counts > k).any():
        raise ValueError(f"indptr must give each row of this selection at most k = {k} blocks, got {int(counts.max())}")
    unused = indices[int(counts.sum()) :]
    if unused.any():
        raise ValueError(f"indices must be 0 after the last block, {len(indices) - len(unused)}, got {unused.max()}")
    if (ids != FULL).any():
        where = int((ids != FULL).argmax())
        raise ValueError(f"bitmask_ids must be -1 (full) for selected blocks, got {ids[where]} at {where}")


def check_cols(selected: Tensor, frame: Frame) -> None:
    """Refuse cols that do not exist, on the CPU alone: on a GPU the check would wait for the device."""
    if selected.device.type != "cpu" or not selected.numel() or not tracing.has_values(selected):
        return
    low, high = (int(bound) for bound in selected.aminmax())
    if low < -1 or high >= frame.n_cols:
        raise ValueError(
            f"indices must be -1 (none) or in 0 .. n_cols - 1 = {frame.n_cols - 1}, got {low if low < -1 else high}"
        )


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether kernels can be launched on a tensor: a plain GPU tensor, with no tracing active."""
    return (
        tensor.is_cuda
        and not tracing.has_observers()
        and type(tensor) in tracing.PLAIN_TYPES
        and tracing.runs_triton(tensor.device.index)
    )


def _has_kernels(selected: Tensor, frame: Frame, k: int) -> bool:
    """Whether the kernels can list these cols, k per row, within their limits of memory and time."""
    n_rows, n_cols = frame.n_rows, frame.n_cols
    return (
        is_on_gpu(selected)
        and 0 < frame.q_len <= MAX_GRID_SIDE * max(TILE, frame.block_size[0])
        and 0 < n_cols <= MAX_GRID_SIDE
        and frame.batch_heads * max(-(-frame.q_len // TILE), n_cols) <= MAX_TOTAL_GRID_SIDE
        and frame.batch_heads * n_rows <= MAX_BLOCK_ROWS
        and k > 0
        and -(-n_cols // 32) <= BASE_BIT_WORDS + BIT_WORDS_PER_ENTRY * k
    )


def _selection_of(found: tuple[Tensor, ...], frame: Frame) -> Selection:
    bits, indptr, indices, ids = found
    return Selection(indptr.view(frame.batch, frame.heads, frame.n_rows + 1), indices, ids, bits)


def by_indices(indices: Tensor, frame: Frame) -> Selection:
    """The selection of the cols that each row names; numbers that are no cols and repeated cols are left out.

    indices  integers (batch, heads, n_rows, k)
    """
    if not _has_kernels(indices, frame, indices.shape[3]):
        return Selection(*sorted_rows(clamp_unknown_cols(indices, frame.n_cols), frame.n_cols), None)
    from ..kernels.triton import block_selection

    with tracing.on_device(indices.device):
        grid = block_selection.BlockGrid(frame.batch_heads, frame.n_rows, frame.n_cols, *frame[2:])
        return _selection_of(block_selection.of_indices(indices.contiguous(), grid), frame)


def by_scores(scores: Tensor, frame: Frame, k: int, *, causal: bool) -> Selection:
    """The selection of the cols with the k highest scores (batch, heads, n_rows, n_cols) of each row."""
    if checks.integer(k, "k") < 1:
        raise ValueError(f"k must be at least 1 col per row, got {k}")
    checks.boolean(causal, "causal")
    k = min(k, frame.n_cols)
    if not _has_kernels(scores, frame, k):
        return Selection(*sorted_rows(top_k_cols(scores, frame, k, causal=causal), frame.n_cols), None)
    if scores.dtype not in COMPARABLE:
        return by_indices(top_k_cols(scores, frame, k, causal=causal), frame)
    from ..kernels.triton import block_selection

    with tracing.on_device(scores.device):
        grid = block_selection.BlockGrid(frame.batch_heads, frame.n_rows, frame.n_cols, *frame[2:])
        return _selection_of(block_selection.of_scores(scores.detach().contiguous(), grid, k, causal=causal), frame)


def top_k_cols(scores: Tensor, frame: Frame, k: int, *, causal: bool) -> Tensor:
    """The cols with the k highest scores of each row, k <= n_cols; n_cols where fewer can be selected."""
    values = scores.detach().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if causal:
        ahead, (block_q, block_kv) = frame.kv_len - frame.q_len, frame.block_size
        # the last query of each row, as a key position; the first key of each col
        first = ahead + block_q - 1
        last_q = torch.arange(first, first + frame.n_rows * block_q, block_q, device=scores.device)
        last_q = last_q.clamp_(max=frame.kv_len - 1)
        first_kv = torch.arange(0, frame.n_cols * block_kv, block_kv, device=scores.device)
        values.masked_fill_(first_kv > last_q[:, None], -torch.inf)
    found = values.topk(k, dim=3)
    return found.indices.masked_fill_(found.values == -torch.inf, frame.n_cols)


def clamp_unknown_cols(selected: Tensor, n_cols: int) -> Tensor:
    """The cols as int64, with n_cols for numbers that are no cols."""
    return selected.to(torch.int64).clamp(-1, n_cols).remainder(n_cols + 1)


def sorted_rows(selected: Tensor, n_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """indptr, indices and bitmask_ids (all full) of the cols that each row selects.

    selected  int64 (batch, heads, n_rows, k), 0 .. n_cols; n_cols and repeated cols are left out
    returns   int32 (batch, heads, n_rows + 1), (capacity,), (capacity,), capacity = number of entries of `selected`
    """
    batch, heads, n_rows, k = selected.shape
    cols = selected.reshape(batch * heads * n_rows, k).sort(dim=1).values
    is_used = cols < n_cols
    is_used[:, 1:].logical_and_(cols[:, 1:] != cols[:, :-1])
    count = is_used.flatten().cumsum(0)
    # output position of each entry; unused ones go past the last
    place = (count - 1).masked_fill_(~is_used.flatten(), len(count))
    indices = cols.new_zeros(len(count) + 1, dtype=torch.int32).scatter_(0, place, cols.flatten().to(torch.int32))
    indptr = cols.new_zeros(batch * heads, n_rows + 1, dtype=torch.int32)
    if len(count):
        indptr[:, 1:] = count.view(batch * heads, n_rows, k)[:, :, -1]
        indptr[1:, 0] = indptr[:-1, -1]
    return indptr.view(batch, heads, n_rows + 1), indices[:-1], torch.full_like(indices[:-1], FULL)


def document_of_tokens(cu_seqlens: Tensor, length: int) -> Tensor:
    """int32 (batch, 3, length): the number of each token's document, its first token, and the token after its last one.

    cu_seqlens  valid boundaries, integers (batch, documents + 1)

    None of the three decreases from token to token. Tokens after the last document are as in a document that begins at
    `length` and ends where the last one ends, which has no tokens.
    """
    cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
    tokens = torch.arange(length, dtype=torch.int32, device=cu_seqlens.device)
    number = torch.searchsorted(cu_seqlens, tokens.repeat(len(cu_seqlens), 1), right=True).sub_(1)
    # in bounds even for boundaries that a check on the device refuses
    number.clamp_(0, cu_seqlens.shape[1] - 1)
    first = pad(cu_seqlens[:, :-1], (0, 1), value=length).gather(1, number)
    stop = torch.cat([cu_seqlens[:, 1:], cu_seqlens[:, -1:]], 1).gather(1, number)
    return torch.stack([number.to(torch.int32), first, stop], 1)


def plan_of_selection(
    selection: Selection, *, q_len: int, kv_len: int, block_size: Size, causal: bool, tile: int
) -> Plan:
    """The plan of selected blocks, made on the device of the tensors without waiting for it.

    Equals host_builder.build_plan, except that lists have the length of the capacity and some bitmasks may be unused.
    q_len   rows: rows_per_token for each token
    causal  also drops the pairs with kv_pos > token + (kv_len - tokens), where tokens = q_len // rows_per_token
    tile    tokens per side of a tile, TILE or FINE_TILE
    """
    blocks_per_tile = [max(1, tile // side) for side in block_size]
    # small rows: sorting would take longer
    has_small_rows = selection.rows_per_token > 1 or block_size[0] < 16
    bits = selection.bits
    are_tabled = blocks_per_tile[0] * blocks_per_tile[1] <= MAX_TABLED_BLOCKS
    has_kernels = bits is not None and is_on_gpu(bits) and (are_tabled or has_small_rows)
    make = _plan_by_kernels if has_kernels else _plan_by_operations
    return make(selection, q_len=q_len, kv_len=kv_len, block_size=block_size, causal=causal, tile=tile)


def _plan_by_kernels(
    selection: Selection, *, q_len: int, kv_len: int, block_size: Size, causal: bool, tile: int
) -> Plan:
    from ..kernels.triton import block_selection, plan_builder

    (batch, heads, n_ends), documents, bits = selection.indptr.shape, selection.documents, selection.bits
    assert bits is not None
    blocks = block_selection.BlockGrid(
        batch * heads, n_ends - 1, -(-kv_len // block_size[1]), q_len, kv_len, block_size
    )
    sizes = None if documents is None else plan_builder.DocumentSizes(len(documents), selection.n_documents)
    grid = plan_builder.Grid(blocks, causal, tile, selection.rows_per_token, sizes)
    if grid.n_bitmasks * grid.words_of_bitmask >= MAX_BITMASK_WORDS:
        raise ValueError(
            f"a plan of blocks of {block_size[0]} queries x {block_size[1]} keys would take "
            f"{grid.n_bitmasks * grid.words_of_bitmask >> 28} GB of bitmasks for {batch * heads} heads of {q_len} x "
            f"{kv_len} tokens: select for more queries together (query_block_size), or attend with fewer heads a call"
        )
    tiles_per_block = [max(1, side // tile) for side in block_size]
    n_entries = len(selection.indices) * tiles_per_block[0] * tiles_per_block[1]
    lengths = _lengths(n_entries, blocks.n_batch_heads, grid.shape)
    with tracing.on_device(bits.device):
        made = plan_builder.build_from_bits(bits, grid, (batch, heads), lengths, documents)
    return with_dynamic_lengths(Plan._make(made))


def _lengths(n_entries: int, n_batch_heads: int, grid: Size) -> tuple[int, int, int]:
    """Lengths of indices, row_bitmask_ids and col_bitmask_ids for at most n_entries entries."""
    # one more for the unused entries; no tile row is known to be long
    size = min(n_entries, n_batch_heads * grid[0] * grid[1] + 1)
    if size >= 2**31:
        raise ValueError(f"a plan must list fewer than 2**31 tiles, but this one may list {size}: use larger tiles")
    (n_indices, n_row_ids), (_, n_col_ids) = (list_lengths(size, 0, of_rows=of_rows) for of_rows in (True, False))
    return n_indices, n_row_ids, n_col_ids


def _plan_by_operations(
    selection: Selection, *, q_len: int, kv_len: int, block_size: Size, causal: bool, tile: int
) -> Plan:
    """Processes both directions together: each operation costs the host more than the GPU, so few are best."""
    indptr, indices = selection[:2]
    rows_per_token, documents = selection.rows_per_token, selection.documents
    grid = -(-q_len // tile), -(-kv_len // tile)
    n_batch_heads = indptr.shape[0] * indptr.shape[1]
    bitmasks = _Bitmasks(block_size, q_len, kv_len, tile, indptr.device, rows_per_token)
    batch_head, row, col, pattern = _tiles(indptr, indices, grid, block_size, tile)
    # 1: on the ragged right edge; 2: on the bottom edge; 4, 8, ...: crossed by the diagonal, at one of some distances
    kind = torch.zeros_like(row)
    if kv_len % tile:
        kind += col == grid[1] - 1
    if q_len % tile:
        kind.add_(row == grid[0] - 1, alpha=2)
    if causal:
        if rows_per_token == 1:
            # the general case below with rows_per_token = 1, in fewer operations: the first query of a tile is
            # (row - col) * tile + kv_len - q_len after its first key; from tile - 1 on every pair attends, from -tile
            # down none
            behind, ahead = row - col, q_len - kv_len
            for least in (tile - 1, 0):
                kind.add_(behind < -(-(ahead + least) // tile), alpha=4)
            is_behind = behind >= -((tile - 1 - ahead) // tile)
        else:
            # the same in tokens, for tile rows of fewer tokens
            behind = row * tile // rows_per_token - col * tile + (kv_len - q_len // rows_per_token)
            diagonal = bitmasks.steps - (behind - bitmasks.diagonal_offset) // bitmasks.tokens
            diagonal.clamp_(max=bitmasks.steps + 1)
            kind.add_(diagonal.masked_fill_(behind >= tile - 1, 0), alpha=4)
            is_behind = behind > -bitmasks.tokens
    if pattern.dim() > 1 or documents is not None:
        ids = torch.arange(len(row), device=row.device)
        if pattern.dim() == 1:
            words = bitmasks.words(pattern, kind & 3, kind >> 2)
        else:
            words = bitmasks.cut(pattern, kind & 3, kind >> 2)
        if documents is not None:
            words &= bitmasks.within_documents(documents, batch_head, row, col, n_batch_heads)
        is_full = (words == -1).flatten(1).all(dim=1)
    elif bitmasks.blocks_in_tile <= MAX_TABLED_BLOCKS:
        ids = torch.add(pattern, kind, alpha=2**bitmasks.blocks_in_tile)
        is_full = ids == 2**bitmasks.blocks_in_tile - 1
        words = bitmasks.every(n_diagonals=bitmasks.steps + 1 if causal else 0)
    else:
        ids = torch.arange(len(row), device=row.device)
        is_full = (pattern == (-1 if bitmasks.blocks_in_tile == 64 else 2**bitmasks.blocks_in_tile - 1)) & (kind == 0)
        words = bitmasks.words(pattern, kind & 3, kind >> 2)
    if causal or documents is not None:
        # drop tiles that lie entirely beyond the diagonal, or outside the documents of their queries
        is_left = words.flatten(1).any(dim=1)[ids]
        batch_head = batch_head.masked_fill(~(is_left & is_behind if causal else is_left), n_batch_heads)
    return _listed(batch_head, row, col, ids, is_full, words, indptr.shape[:2], grid)


def _tiles(
    indptr: Tensor, indices: Tensor, grid: Size, block_size: Size, tile: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(batch_head, row, col, blocks in it) of each tile that has a block, once; batch_head is past the last if unused.

    The blocks are the bits of an int64, or, of more than 64, words of a bitmask (tiles, tile, tile // 32).
    """
    n_batch_heads, device = indptr.shape[0] * indptr.shape[1], indices.device
    n_rows = max(1, indptr.shape[2] - 1)
    # (batch_head, row) of each entry; past the end for unused entries
    entry = torch.arange(len(indices), dtype=torch.int32, device=device)
    flat_row = torch.searchsorted(indptr[..., 1:].flatten().contiguous(), entry, right=True)
    batch_head, row, col = flat_row // n_rows, flat_row % n_rows, indices
    # tiles per block and blocks per tile, along each axis
    tiles_per_block = [max(1, side // tile) for side in block_size]
    blocks_per_tile = [max(1, tile // side) for side in block_size]
    bit = torch.ones_like(row)
    if blocks_per_tile != [1, 1]:
        # number of the block in its tile
        sub = row % blocks_per_tile[0] * blocks_per_tile[1] + col % blocks_per_tile[1]
        if blocks_per_tile[0] * blocks_per_tile[1] <= 64:
            bit = bit << sub
        row, col = row // blocks_per_tile[0], col // blocks_per_tile[1]
    if tiles_per_block != [1, 1]:
        step = torch.arange(tiles_per_block[0] * tiles_per_block[1], device=device)
        row = row[:, None] * tiles_per_block[0] + step // tiles_per_block[1]
        col = col[:, None] * tiles_per_block[1] + step % tiles_per_block[1]
        batch_head = torch.where((row < grid[0]) & (col < grid[1]), batch_head[:, None], n_batch_heads)
        # kernels read one index ahead, so unused entries must be valid tiles too
        row, col = row.clamp_(max=max(1, grid[0]) - 1), col.clamp_(max=max(1, grid[1]) - 1)
        bit = bit[:, None].expand_as(batch_head).flatten()
        if blocks_per_tile != [1, 1]:
            sub = sub[:, None].expand_as(batch_head).flatten()
        batch_head, row, col = batch_head.flatten(), row.flatten(), col.flatten()
    if blocks_per_tile == [1, 1]:
        return batch_head, row, col, bit

    n_tiles = n_batch_heads * grid[0] * grid[1]
    key, order = ((batch_head * grid[0] + row) * grid[1] + col).clamp_(max=n_tiles).sort()
    place = torch.zeros_like(key)
    torch.cumsum(key[1:] != key[:-1], 0, out=place[1:])
    # at most one tile per entry, and the tiles of the grid; one more for the unused
    size = min(len(key), n_tiles + 1)
    found = torch.full((size,), n_tiles, device=device).scatter_(0, place, key)
    if blocks_per_tile[0] * blocks_per_tile[1] > 64:
        pattern = _words_of_blocks(place, sub[order], batch_head[order] < n_batch_heads, size, blocks_per_tile, tile)
    else:
        # blocks are distinct, so a sum of bits is their union
        pattern = key.new_zeros(size).index_add_(0, place, bit.masked_fill(batch_head >= n_batch_heads, 0)[order])
    flat_row = found // max(1, grid[1])
    return flat_row // max(1, grid[0]), flat_row % max(1, grid[0]), found % max(1, grid[1]), pattern


def _words_of_blocks(
    place: Tensor, sub: Tensor, is_used: Tensor, size: int, blocks_per_tile: list[int], tile: int
) -> Tensor:
    """int32 words (size, tile, tile // 32) of tiles, from the blocks in them.

    place, sub  of each block: its tile, and its number in the tile
    """
    height, width = tile // blocks_per_tile[0], tile // blocks_per_tile[1]
    # pieces of 16 keys, half a word each
    pieces = torch.zeros(size * tile * tile // 16 + 1, dtype=torch.int16, device=place.device)
    query = sub[:, None] // blocks_per_tile[1] * height + torch.arange(height, device=place.device)
    piece = sub[:, None] % blocks_per_tile[1] * (width // 16) + torch.arange(width // 16, device=place.device)
    index = ((place[:, None] * tile + query) * (tile // 16))[:, :, None] + piece[:, None]
    index = index.masked_fill_(~is_used[:, None, None], len(pieces) - 1)
    return pieces.index_fill_(0, index.flatten(), -1)[:-1].view(torch.int32).view(size, tile, tile // 32)


def _listed(
    batch_head: Tensor,
    row: Tensor,
    col: Tensor,
    ids: Tensor,
    is_full: Tensor,
    words: Tensor,
    batch_heads: Sequence[int],
    grid: Size,
) -> Plan:
    """The plan of these tiles, without those whose batch_head is past the last.

    The two directions are the first dimension of most tensors here. The shorter one is padded with empty tile rows, and
    the batch_head past the last has tile rows too, for unused entries. One sort orders both directions: sorts of a few
    long rows would leave most of a GPU idle.
    """
    n_batch_heads, n_major, n_entries = batch_heads[0] * batch_heads[1], max(grid), len(row)
    majors = torch.stack([row, col])
    # (direction, batch_head, major, is full, minor) in one number, in the order of Plan
    major_stride = 2 * PARTIAL
    keys = torch.add(majors.flip(0), majors, alpha=major_stride)
    keys.add_(is_full, alpha=PARTIAL).add_(batch_head, alpha=major_stride * n_major)
    keys[1].add_(major_stride * n_major * (n_batch_heads + 1))
    flat_keys, flat_order = keys.flatten().sort()
    keys, order = flat_keys.view(2, -1), flat_order.view(2, -1)
    order[1].sub_(n_entries)
    n_marks = 4 * (n_batch_heads + 1) * n_major
    bounds = torch.searchsorted(flat_keys, torch.arange(0, (n_marks + 1) * PARTIAL, PARTIAL, device=row.device))
    # [2, n_batch_heads, n_major]
    begin, partial_end, end = (
        bounds[first : n_marks + first : 2].view(2, n_batch_heads + 1, n_major)[:, :n_batch_heads] for first in range(3)
    )
    n_partial, work = partial_end - begin, end - begin
    begin[1].sub_(n_entries)
    work, launch = work.sort(dim=2, descending=True, stable=True)
    # twice the mean
    twice = 2 * bounds[2 * n_batch_heads * n_major]
    limits = [twice // max(1, n_batch_heads * size) for size in dict.fromkeys(grid)]
    limit = limits[0] if len(limits) == 1 else torch.stack(limits).view(2, 1, 1)
    # never all: see host_builder.long_of
    n_long = (work[..., : max(0, n_major - 1)] > limit).sum(dim=2).amax(dim=1)
    if grid[0] != grid[1]:
        n_long[int(grid[0] > grid[1])].clamp_(max=max(0, min(grid) - 1))
    # in the order of the words of a record
    fields = [launch, begin.gather(2, launch), work, n_partial.gather(2, launch), launch.argsort(dim=2)]
    fields += [n_long[:, None, None].expand_as(launch), *[torch.zeros_like(launch)] * (RECORD - N_LONG - 1)]
    records = torch.stack(fields, dim=3).to(torch.int32)

    size = min(len(row), n_batch_heads * grid[0] * grid[1] + 1)
    n_indices, *n_ids = _lengths(len(row), n_batch_heads, (grid[0], grid[1]))
    # every list is aligned to 32 bytes
    lists = torch.zeros(2, 2, -(-max(n_ids) // 8) * 8, dtype=torch.int32, device=row.device)
    lists[0, :, :size] = (keys[:, :size] & (major_stride - 1)) - PARTIAL
    lists[1, :, :size] = ids.masked_fill(is_full, 0)[order[:, :size]]
    sides: list[Tensor] = []
    for side in (0, 1):
        sides.append(records[side, :, : grid[side]].reshape(*batch_heads, grid[side], RECORD).contiguous())
        sides += [lists[0, side, :n_indices], lists[1, side, : n_ids[side]]]
    return with_dynamic_lengths(Plan._make([*sides, words]))


class _Bitmasks:
    """Bitmasks of tiles, from the blocks, edges and diagonals in them."""

    def __init__(
        self, block_size: Size, q_len: int, kv_len: int, tile: int, device: torch.device, rows_per_token: int = 1
    ) -> None:
        self.tile, self.rows_per_token = tile, rows_per_token
        # tokens: of a tile row. steps: tile rows per `tile` tokens. blocks_per_tile: along each axis; blocks_in_tile:
        # in all. sides: queries and keys of a block within a tile. last_sizes: valid queries and keys of the last tile.
        # diagonal_offset: of the diagonal, modulo `tokens`
        self.tokens = max(1, tile // rows_per_token)
        self.steps = tile // self.tokens
        self.blocks_per_tile = [max(1, tile // side) for side in block_size]
        self.blocks_in_tile = self.blocks_per_tile[0] * self.blocks_per_tile[1]
        self.sides = [min(tile, side) for side in block_size]
        self.last_sizes = [(length - 1) % tile + 1 for length in (q_len, kv_len)]
        self.diagonal_offset = (kv_len - q_len // rows_per_token) % self.tokens
        self.device = device

    def every(self, n_diagonals: int) -> Tensor:
        """`words` of every diagonal 0 .. n_diagonals, edge and pattern, the last one fastest.

        For at most MAX_TABLED_BLOCKS blocks in a tile.
        """
        tile = self.tile
        words = torch.full(
            (n_diagonals + 1, 4, 2**self.blocks_in_tile, tile, tile // 32), -1, dtype=torch.int32, device=self.device
        )
        # blocks of 16 keys take half a word
        unit = min(32, self.sides[1])
        pieces = words if unit == 32 else words.view(torch.int16)
        down, across = self.sides[0], self.sides[1] // unit
        for sub in range(self.blocks_in_tile):
            row, col = divmod(sub, self.blocks_per_tile[1])
            without = pieces.unflatten(2, (-1, 2, 2**sub))[:, :, :, 0]
            without[..., row * down : (row + 1) * down, col * across : (col + 1) * across].zero_()
        word, bits = divmod(self.last_sizes[1], 32)
        if word < tile // 32:
            words[:, 1::2, ..., word].bitwise_and_(2**bits - 1)
            words[:, 1::2, ..., word + 1 :].zero_()
        if self.last_sizes[0] < tile:
            words[:, 2:, :, self.last_sizes[0] :].zero_()
        if n_diagonals:
            token = torch.arange(tile, device=self.device)[:, None]
            # per diagonal and word: the first key that query 0 does not see, less the first key of the word
            if self.rows_per_token == 1:
                # the general case below with rows_per_token = 1, in fewer operations
                ends = self.diagonal_offset + 1, self.diagonal_offset + 1 - 2 * tile
                first = torch.arange(*ends, -32, device=self.device).view(2, 1, -1)
            else:
                token = token // self.rows_per_token
                first = self.tokens * torch.arange(self.steps - 1, -2, -1, device=self.device)
                first = first + (self.diagonal_offset + 1)
                first = first[:, None, None] - torch.arange(0, tile, 32, device=self.device)
            seen = _first_bits(token + first)
            # the lower half of each 64-bit number
            words[1:].bitwise_and_(seen.view(torch.int32)[..., ::2][:, None, None])
        return words.flatten(0, 2)

    def words(self, pattern: Tensor, edge: Tensor, diagonal: Tensor) -> Tensor:
        """int32 (tiles, tile, tile // 32). pattern: bits of blocks; edge: 1 right, 2 bottom; diagonal: 0 none."""
        query = torch.arange(self.tile, device=self.device)[:, None]
        start = torch.arange(0, self.tile, 32, device=self.device)
        words = torch.zeros(1, 1, 1, dtype=torch.int64, device=self.device)
        for half in (0, 16):
            sub = query // self.sides[0] * self.blocks_per_tile[1] + (start + half) // self.sides[1]
            words = words | ((pattern[:, None, None] >> sub & 1) * (0xFFFF << half))
        return self.cut(words, edge, diagonal)

    def cut(self, words: Tensor, edge: Tensor, diagonal: Tensor) -> Tensor:
        """Words (tiles, tile, tile // 32) without the pairs beyond the edges and the diagonal of each tile."""
        query = torch.arange(self.tile, device=self.device)[:, None]
        start = torch.arange(0, self.tile, 32, device=self.device)
        edge, diagonal = edge[:, None, None], diagonal[:, None, None]
        words = words & torch.where((edge & 1) == 1, _first_bits(self.last_sizes[1] - start), 2**32 - 1)
        words = torch.where(((edge & 2) == 2) & (query >= self.last_sizes[0]), 0, words)
        # the last key that each query sees, relative to the tile
        last_key = query // self.rows_per_token + self.diagonal_offset - self.tokens * (diagonal - self.steps)
        words = torch.where(diagonal > 0, words & _first_bits(last_key + 1 - start), words)
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)

    def within_documents(
        self, documents: Tensor, batch_head: Tensor, row: Tensor, col: Tensor, n_batch_heads: int
    ) -> Tensor:
        """int32 words (tiles, tile, tile // 32) of the pairs within a document.

        batch_head, row, col  (tiles,); batch_head is past the last for unused tiles
        """
        batch = batch_head.clamp(max=n_batch_heads - 1) // (n_batch_heads // len(documents))
        token = (row[:, None] * self.tile + torch.arange(self.tile, device=self.device)) // self.rows_per_token
        place = batch[:, None] * documents.shape[2] + token.clamp_(max=documents.shape[2] - 1)
        # [tiles, tile, 1]
        first, stop = documents[:, 1:].transpose(0, 1).flatten(1)[:, place.long()].long().unsqueeze(3)
        start = col[:, None, None] * self.tile + torch.arange(0, self.tile, 32, device=self.device)
        words = _first_bits(stop - start) & ~_first_bits(first - start)
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _first_bits(count: Tensor) -> Tensor:
    """A word whose lowest `count` bits are set, none below 0, all from 32 on."""
    return (torch.ones_like(count) << count.clamp(0, 32)) - 1

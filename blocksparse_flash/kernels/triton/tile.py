"""Device functions shared by the kernels: tile loads and stores, products, masks, dropout, tile scheduling.

Scores and the running maximum are in base 2 inside kernels; `lse` in memory uses the natural logarithm.
"""

import triton
import triton.language as tl

from ... import philox, plan_format, score_mods

# tokens per side of a 128 x 128 tile; Constants.TILE is that of the plan at hand. A bias cell always lies within one
# such tile
TILE = tl.constexpr(plan_format.TILE)
# subtracted from the list entries of partial tiles
PARTIAL = tl.constexpr(plan_format.PARTIAL)
# int32 values per record of a plan, and where in it each field is
RECORD = tl.constexpr(plan_format.RECORD)
NUMBER, BEGIN, N_TILES, N_PARTIAL = (
    tl.constexpr(i) for i in (plan_format.NUMBER, plan_format.BEGIN, plan_format.N_TILES, plan_format.N_PARTIAL)
)
POSITION, N_LONG = tl.constexpr(plan_format.POSITION), tl.constexpr(plan_format.N_LONG)
LOG2_E = tl.constexpr(score_mods.LOG2_E)
LN_2 = tl.constexpr(0.6931471805599453)
# of the dropout mask, see philox.py
ROUNDS, VALUE_BITS, VALUE_DISTANCE = (
    tl.constexpr(i) for i in (philox.ROUNDS, philox.VALUE_BITS, philox.VALUE_DISTANCE)
)
MULTIPLIER_0, MULTIPLIER_1 = (tl.constexpr(i) for i in philox.MULTIPLIERS)
KEY_STEP_0, KEY_STEP_1 = (tl.constexpr(i) for i in philox.KEY_STEPS)
# Triton's interpreter lacks inline assembly and bfloat16 products
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def head_base(ptr, strides, i_batch, i_head):
    """Pointer to one head. 64-bit offsets: batch * heads * length * head_dim can exceed 2^31."""
    return ptr + i_batch.to(tl.int64) * strides[0] + i_head.to(tl.int64) * strides[1]


@triton.jit
def load_tile(
    ref, strides, i_batch, i_head, row, limit,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, TMA: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """[ROWS, DIM] starting at row `row`; zero from row `limit` on and from column HEAD_DIM on.

    `ref` is a pointer, or with TMA a descriptor of (batch, heads, length, head_dim), which zero-fills out of bounds.
    LIMITED: `limit` may be less than the length of the tensor.
    """
    if TMA:
        b_tile = ref.load([i_batch, i_head, row, 0]).reshape(ROWS, DIM)
        if LIMITED:
            o_row = row + tl.arange(0, ROWS)
            b_tile = tl.where((o_row < limit)[:, None], b_tile, 0.0)
    else:
        o_row = tl.arange(0, ROWS)
        o_dim = tl.arange(0, DIM)
        p_tile = head_base(ref, strides, i_batch, i_head) + row.to(tl.int64) * strides[2]
        p_tile += o_row[:, None] * strides[2] + o_dim[None, :]
        m_tile = (row + o_row < limit)[:, None]
        if HEAD_DIM != DIM:
            m_tile = m_tile & (o_dim < HEAD_DIM)[None, :]
        b_tile = tl.load(p_tile, mask=m_tile, other=0.0)
    return b_tile


@triton.jit
def result_rows(ptr, batch_head, n_heads, length, HEAD_DIM: tl.constexpr, BY_TOKEN: tl.constexpr):
    """Pointer to one head of a result without gaps, and the elements from one of its rows to the next.

    batch_head  i_batch * n_heads + i_head
    BY_TOKEN    the result is (batch, length, heads, HEAD_DIM) in memory, else (batch, heads, length, HEAD_DIM)
    """
    if BY_TOKEN:
        first_row = (batch_head // n_heads).to(tl.int64) * length * n_heads + batch_head % n_heads
        return ptr + first_row * HEAD_DIM, n_heads * HEAD_DIM
    else:
        return ptr + batch_head.to(tl.int64) * length * HEAD_DIM, HEAD_DIM


@triton.jit
def store_tile(ptr, row_stride, row, limit, b_tile, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Stores the rows of a tile below `limit` to one head, whose rows are row_stride elements apart."""
    o_row = tl.arange(0, ROWS)
    o_dim = tl.arange(0, DIM)
    p_tile = ptr + row.to(tl.int64) * row_stride + o_row[:, None] * row_stride + o_dim[None, :]
    m_tile = (row + o_row < limit)[:, None] & (o_dim < HEAD_DIM)[None, :]
    tl.store(p_tile, b_tile.to(ptr.dtype.element_ty), mask=m_tile)


@triton.jit
def product(b_left, b_right, PRECISION: tl.constexpr):
    """b_left @ b_right in float32."""
    if INTERPRETED:
        return tl.dot(b_left.to(tl.float32), b_right.to(tl.float32), input_precision="ieee")
    else:
        b_zero = tl.zeros([b_left.shape[0], b_right.shape[1]], tl.float32)
        return tl.dot(b_left, b_right, b_zero, input_precision=PRECISION)


@triton.jit
def add_product(b_left, b_right, b_sum, b_lost, PRECISION: tl.constexpr):
    """(b_sum + b_left @ b_right, b_lost) in float32; b_lost starts at zero.

    IEEE float32 products use Kahan summation over the steps, with b_lost as compensation: its error is at most 0.5
    times the tolerance, that of a plain sum up to 1.7 times.
    """
    if b_left.dtype == tl.float32 and PRECISION == "ieee":
        b_step = product(b_left, b_right, PRECISION) - b_lost
        b_new = b_sum + b_step
        return b_new, (b_new - b_sum) - b_step
    elif INTERPRETED:
        return b_sum + product(b_left, b_right, PRECISION), b_lost
    else:
        return tl.dot(b_left, b_right, b_sum, input_precision=PRECISION), b_lost


@triton.jit
def with_sink(b_max, b_sum, sinks_ptr, o_head):
    """Running maximum and sum after the sinks of heads o_head, which act as keys without values. -inf has no effect."""
    b_sink = tl.load(sinks_ptr + o_head) * LOG2_E
    return tl.maximum(b_max, b_sink), b_sum + tl.where(b_sink == float("-inf"), 0.0, 1.0)


@triton.jit
def softmax_step(b_scores, factor, b_max, b_sum, b_out, b_lost):
    """Online softmax: the weights of scores * factor in base 2, and the updated maximum, sum, output and lost bits."""
    b_new_max = tl.maximum(b_max, tl.max(b_scores, 1) * factor)
    b_p = tl.math.exp2(b_scores * factor - b_new_max[:, None])
    b_decay = tl.math.exp2(b_max - b_new_max)
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    return b_p, b_new_max, b_sum, b_out * b_decay[:, None], b_lost * b_decay[:, None]


@triton.jit
def log_sum(b_max, b_sum):
    """ln(b_sum * 2^b_max) in float32, computed in float64 to round once."""
    return ((b_max.to(tl.float64) + tl.math.log2(b_sum).to(tl.float64)) * LN_2).to(tl.float32)


@triton.jit
def with_sign(b_scores, SIGN: tl.constexpr):
    """Raw scores times the sign of the scale, so that their maximum can be scaled afterwards.

    The queries are not multiplied instead: a computed left operand stays in registers, which ptxas overwrites in a loop
    (see `lost_operands` in tests/support/ptx_and_sass.py).
    """
    if SIGN != 1:
        b_scores = b_scores * SIGN
    return b_scores


@triton.jit
def record_pointer(records_ptr, record_strides, batch_head, n_heads, i_launch, GROUP: tl.constexpr):
    """Pointer to a record by its position in the launch order of a head; with GROUP, of the first head of the group."""
    p_record = records_ptr + (batch_head // n_heads).to(tl.int64) * record_strides[0]
    return p_record + (batch_head % n_heads * GROUP).to(tl.int64) * record_strides[1] + i_launch * RECORD


@triton.jit
def find_work_record(
    records_ptr, record_strides, pid, n_lines, n_heads, n_batch_heads, SPLIT: tl.constexpr, GROUP: tl.constexpr
):
    """Tile scheduler: (batch * n_heads + head, record pointer, block within the tile row or column) of program `pid`.

    SPLIT programs share a tile row or column. The `n_long` longest of every head come first, interleaved over
    heads, so that no long line starts late; then head after head, so that the inputs of a head stay in L2.
    """
    n_long = tl.load(records_ptr + N_LONG) * SPLIT
    n_rest = n_lines * SPLIT - n_long
    n_first = n_long * n_batch_heads
    is_long = pid < n_first
    batch_head = tl.where(is_long, pid % n_batch_heads, (pid - n_first) // n_rest)
    i_launch = tl.where(is_long, pid // n_batch_heads, n_long + (pid - n_first) % n_rest)
    p_record = record_pointer(records_ptr, record_strides, batch_head, n_heads, i_launch // SPLIT, GROUP)
    return batch_head, p_record, i_launch % SPLIT


@triton.jit
def find_split(records_ptr, pid, n_lines, n_batch_heads, n_split_lines, num_splits):
    """Tile scheduler with split-KV: (batch * n_heads + head, position in the launch order, split) of program `pid`.

    The split is -1 for a tile row (or column) that is not split. num_splits programs share each of the first
    n_split_lines tile rows of every head. The order is that of find_work_record; splits of a tile row are neighbors.
    """
    n_more = n_split_lines * (num_splits - 1)
    if records_ptr is not None:
        # split tile rows are long
        n_long = tl.maximum(tl.load(records_ptr + N_LONG), n_split_lines) + n_more
        n_rest = tl.maximum(n_lines + n_more - n_long, 1)
        is_long = pid < n_long * n_batch_heads
        batch_head = tl.where(is_long, pid % n_batch_heads, (pid - n_long * n_batch_heads) // n_rest)
        i_work = tl.where(is_long, pid // n_batch_heads, n_long + (pid - n_long * n_batch_heads) % n_rest)
    else:
        batch_head = pid // (n_lines + n_more)
        i_work = pid % (n_lines + n_more)
    is_split = i_work < n_split_lines * num_splits
    return (
        batch_head,
        tl.where(is_split, i_work // num_splits, i_work - n_more),
        tl.where(is_split, i_work % num_splits, -1),
    )


@triton.jit
def split_range(first, end, i_split, n_splits):
    """(begin, end) of split i_split of first .. end - 1; sizes differ by at most one, larger splits come first."""
    size = (end - first) // n_splits
    n_larger = (end - first) % n_splits
    begin = first + i_split * size + tl.minimum(i_split, n_larger)
    return begin, begin + size + (i_split < n_larger).to(tl.int32)


@triton.jit
def split_steps(n_steps, n_front, i_split, num_splits):
    """(first step, steps, steps below n_front) of split i_split of n_steps; i_split = -1 is all of them."""
    begin, end = split_range(0, n_steps, tl.maximum(i_split, 0), tl.where(i_split < 0, 1, num_splits))
    return begin, end - begin, tl.minimum(tl.maximum(n_front - begin, 0), end - begin)


@triton.jit
def split_index(batch_head, i_launch, i_split, n_batch_heads, n_split_lines):
    """Workspace block of a split, see combine_splits.py; -1 if the tile row is not split."""
    return tl.where(i_split < 0, -1, (i_split * n_split_lines + i_launch) * n_batch_heads + batch_head)


@triton.jit
def find_line_record(records_ptr, record_strides, i_batch, i_head, i_line):
    """Pointer to the record of a tile row (or column) of a head."""
    p_head = records_ptr + i_batch.to(tl.int64) * record_strides[0] + i_head.to(tl.int64) * record_strides[1]
    return p_head + tl.load(p_head + i_line * RECORD + POSITION) * RECORD


@triton.jit
def tile_start(indices_ptr, i_step, side: tl.constexpr, TILE: tl.constexpr):
    """First token of step `i_step` of `side` tokens; a listed tile has TILE / side steps.

    Negative if the tile is partial: `& (PARTIAL * TILE - 1)` restores the token.
    """
    STEPS: tl.constexpr = TILE // side
    i_tile = i_step // STEPS
    return tl.load(indices_ptr + i_tile) * TILE + (i_step - i_tile * STEPS) * side


@triton.jit
def begin_step(indices_ptr, start, i_step, is_masked, SIDE: tl.constexpr, TILE: tl.constexpr):
    """(first token, whether the step is partial, `start` of the next step); start: from `tile_start` in a layout.

    The next index is loaded a step ahead: in its own step it would take a pipeline stage from the keys.

    is_masked  whether the step is partial without a layout
    """
    if indices_ptr is None:
        return start, is_masked, start + SIDE
    else:
        is_partial = start < 0
        start = start & (PARTIAL * TILE - 1)
        return start, is_partial, tile_start(indices_ptr, i_step + 1, SIDE, TILE)


@triton.jit
def clamped_kv_len(kv_lengths_ptr, i_batch, kv_len):
    """Number of keys of a batch element, clamped to 0 .. kv_len: the host never reads lengths on the GPU."""
    if kv_lengths_ptr is None:
        return kv_len
    else:
        return tl.minimum(tl.maximum(tl.load(kv_lengths_ptr + i_batch), 0), kv_len).to(tl.int32)


@triton.jit
def load_words(words_ptr, o_word):
    """int32 at each offset, loaded in the layout of its use.

    A coalesced tl.load would be converted through shared memory; the barrier of that conversion, in a branch between
    two products, makes ptxas serialize every wgmma (C7515).
    """
    p_words = words_ptr + o_word
    if INTERPRETED:
        return tl.load(p_words)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [p_words.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def query_pairs(words_ptr, i_bitmask, o_q, kv_start, ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr):
    """[ROWS, COLS] bool: which queries o_q attend to which keys from kv_start on; positions within the tile."""
    o_col = tl.arange(0, COLS)
    p_words = words_ptr + i_bitmask.to(tl.int64) * (TILE * TILE // 32) + kv_start // 32
    b_bits = tl.zeros([ROWS, COLS], tl.int32)
    for i_word in tl.static_range(COLS // 32):
        b_words = load_words(p_words, o_q * (TILE // 32) + i_word)
        b_bits = tl.where((o_col // 32 == i_word)[None, :], b_words[:, None], b_bits)
    return ((b_bits >> (o_col % 32)[None, :]) & 1) != 0


@triton.jit
def bitmask_pairs(
    words_ptr, i_bitmask, q_start, kv_start,
    ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLS] bool, or [COLS, ROWS] if TRANSPOSED: the pairs that attend; starts are within the tile."""
    if TRANSPOSED:
        o_col = tl.arange(0, COLS)
        p_words = words_ptr + i_bitmask.to(tl.int64) * (TILE * TILE // 32) + kv_start // 32
        o_word = (q_start + tl.arange(0, ROWS)) * (TILE // 32)
        b_bits = tl.zeros([COLS, ROWS], tl.int32)
        for i_word in tl.static_range(COLS // 32):
            b_bits = tl.where((o_col // 32 == i_word)[:, None], load_words(p_words, o_word + i_word)[None, :], b_bits)
        return ((b_bits >> (o_col % 32)[:, None]) & 1) != 0
    else:
        return query_pairs(words_ptr, i_bitmask, q_start + tl.arange(0, ROWS), kv_start, ROWS, COLS, TILE)


@triton.jit
def load_seed(seed_ptr, seed):
    """The dropout seed, int64: of a tensor on the GPU, or the integer of a call whose seed is on the host."""
    # the interpreter passes small integers as int32
    return seed.to(tl.int64) if seed_ptr is None else tl.load(seed_ptr)


@triton.jit
def philox_words(seed, o_kv, o_q, i_head, i_batch):
    """The four words of Philox 4x32-7, uint32 of the shape to which o_kv and o_q broadcast; seed: int64.

    tl.philox computes the halves of a product separately; here one instruction may compute both.
    """
    key_0, key_1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    b_zero = (o_kv + o_q).to(tl.uint32) * 0
    b_0, b_1, b_2, b_3 = o_kv.to(tl.uint32) + b_zero, o_q.to(tl.uint32) + b_zero, b_zero + i_head, b_zero + i_batch
    for _ in tl.static_range(ROUNDS):
        b_even, b_odd = b_0.to(tl.uint64) * MULTIPLIER_0, b_2.to(tl.uint64) * MULTIPLIER_1
        b_0, b_1 = (b_odd >> 32).to(tl.uint32) ^ b_1 ^ key_0, b_odd.to(tl.uint32)
        b_2, b_3 = (b_even >> 32).to(tl.uint32) ^ b_3 ^ key_1, b_even.to(tl.uint32)
        key_0, key_1 = key_0 + KEY_STEP_0, key_1 + KEY_STEP_1
    return b_0, b_1, b_2, b_3


@triton.jit
def kept_pairs(
    seed, threshold, i_batch, i_head, q_start, kv_start,
    ROWS: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLS] bool, or TRANSPOSED: the pairs that dropout keeps. Philox 4x32-7 with the counter of philox.py.

    seed        int64
    threshold   of philox.py
    ROWS, COLS  a multiple of 16, and 32 or a multiple of 64; q_start and kv_start are multiples of them
    """
    # 8 counters for each 16 queries, and 8 for each 64 keys
    o_q = q_start // 2 + tl.arange(0, ROWS // 2)
    if TRANSPOSED:
        # bits 4 and 5 of a key select the warp here: four warps compute each counter, for one value of each word
        o_row = kv_start // 2 + tl.arange(0, COLS // 2)
        o_kv = o_row // 32 * 8 + o_row % 8
        o_kv, o_q = o_kv[:, None], o_q[None, :]
    else:
        # 32 keys use two of the four values
        o_kv = kv_start // 64 * 8 + tl.arange(0, max(COLS, 64) // 8)
        o_kv, o_q = o_kv[None, :], o_q[:, None]
    b_0, b_1, b_2, b_3 = philox_words(seed, o_kv, o_q, i_head, i_batch)
    # [.., bit 3 of the key, bit 3 of the query]; a shift moves a value to the first bits of its word
    b_words = tl.join(tl.join(b_0, b_1), tl.join(b_2, b_3))
    if TRANSPOSED:
        b_words = b_words << (o_row // 8 % 4 * VALUE_DISTANCE)[:, None, None, None].to(tl.uint32)
        b_words = b_words.reshape(COLS // 16, 8, ROWS // 16, 8, 2, 2).permute(0, 4, 1, 2, 5, 3).reshape(COLS, ROWS)
    elif COLS == 32:
        b_words = b_words << (kv_start // 32 % 2 * (2 * VALUE_DISTANCE)).to(tl.uint32)
        # [.., bit 4 of the key]
        b_words = tl.join(b_words, b_words << VALUE_DISTANCE)
        b_words = b_words.reshape(ROWS // 16, 8, 8, 2, 2, 2).permute(0, 4, 1, 5, 3, 2).reshape(ROWS, COLS)
    else:
        # [.., bit 4 of the key, bit 5 of the key]
        b_later = b_words << (2 * VALUE_DISTANCE)
        b_words = tl.join(tl.join(b_words, b_words << VALUE_DISTANCE), tl.join(b_later, b_later << VALUE_DISTANCE))
        b_words = b_words.reshape(ROWS // 16, 8, COLS // 64, 8, 2, 2, 2, 2).permute(0, 5, 1, 2, 7, 6, 4, 3)
        b_words = b_words.reshape(ROWS, COLS)
    # the bits after a value do not matter
    return b_words >= (threshold.to(tl.uint32) << (32 - VALUE_BITS))


@triton.jit
def where_kept(m_kept, b_p, factor):
    """b_p where m_kept is true, else 0; factor: any finite number that LLVM does not know.

    LLVM would select a constant zero after the conversion to 16 bits, where each half needs instructions of its own.
    """
    return tl.where(m_kept, b_p, factor * 0.0)


# fmt: off
@triton.jit
def dense_kv_steps(q_start, q_len, kv_len, limit, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """(n_full, n_any) without a layout: key steps that a block of queries sees wholly, and at least in part."""
    if CAUSAL:
        diagonal = q_start + (kv_len - q_len) + 1
        n_full = tl.maximum(tl.minimum(diagonal, limit), 0) // BLOCK_KV
        n_any = tl.cdiv(tl.maximum(tl.minimum(diagonal + BLOCK_Q - 1, limit), 0), BLOCK_KV)
    else:
        n_full = limit // BLOCK_KV
        n_any = tl.cdiv(limit, BLOCK_KV)
    return n_full, n_any


@triton.jit
def kv_steps(
    indices_ptr, p_record, q_start, q_len, kv_len, limit,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TILE: tl.constexpr,
):
    """(first, end, n_full): key steps first .. end - 1 of a tile row, the partial ones first.

    Without a layout: the steps of a block of queries; those from n_full on are partial.
    """
    n_full = 0
    if indices_ptr is None:
        first = 0
        n_full, end = dense_kv_steps(q_start, q_len, kv_len, limit, CAUSAL, BLOCK_Q, BLOCK_KV)
    else:
        first = tl.load(p_record + BEGIN) * (TILE // BLOCK_KV)
        end = first + tl.load(p_record + N_TILES) * (TILE // BLOCK_KV)
    return first, end, n_full


@triton.jit
def dense_q_steps(kv_start, q_len, kv_len, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """(first, full, end) without a layout: steps first .. end - 1 see a block of keys, from `full` on all of it."""
    end = tl.cdiv(q_len, BLOCK_Q)
    first = 0
    full = 0
    if CAUSAL:
        first = tl.maximum(kv_start - (kv_len - q_len), 0) // BLOCK_Q
        full = tl.cdiv(tl.maximum(kv_start + BLOCK_KV - 1 - (kv_len - q_len), 0), BLOCK_Q)
    return first, full, end


@triton.jit
def bitmask_of(ids_ptr, i_tile):
    """The bitmask of a list entry; 0 without a layout."""
    if ids_ptr is None:
        return 0
    else:
        return tl.load(ids_ptr + i_tile)


@triton.jit
def attending_pairs(
    words_ptr, i_bitmask, q_start, kv_start, q_len, kv_len, limit,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TILE: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    """[BLOCK_Q, BLOCK_KV] bool, or [BLOCK_KV, BLOCK_Q] if TRANSPOSED: the pairs of a partial step that attend."""
    if words_ptr is not None:
        m_pairs = bitmask_pairs(
            words_ptr, i_bitmask, q_start % TILE, kv_start % TILE, BLOCK_Q, BLOCK_KV, TILE, TRANSPOSED
        )
    else:
        o_q = q_start + tl.arange(0, BLOCK_Q)
        o_kv = kv_start + tl.arange(0, BLOCK_KV)
        o_q = o_q[None, :] if TRANSPOSED else o_q[:, None]
        o_kv = o_kv[:, None] if TRANSPOSED else o_kv[None, :]
        m_pairs = (o_kv < limit) & (o_q < q_len)
        if CAUSAL:
            m_pairs = m_pairs & (o_kv <= o_q + (kv_len - q_len))
    return m_pairs
# fmt: on

"""Table of single-line faults for tests/mutants.py, by area, with the tests that must see each.

A fault is an off-by-one, a wrong comparison, swapped axes, a missing term, a wrong head or rank, never a mere crash. `old` must
occur once in its file: who changes such a line changes it here too.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault: in `file` the text `old` becomes `new`, and `tests`, arguments of pytest, must fail.

    why  for a fault that no test can see: the reason
    """

    file: str
    old: str
    new: str
    tests: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()} -> {self.new.strip()}"


def _of(folder: str, *rows: tuple[str, ...]) -> list[Mutant]:
    """Mutants of the files of a folder."""
    return [Mutant(f"{folder}/{row[0]}", *row[1:]) for row in rows]


OURS = "blocksparse_flash"


def _zoo(*cases: str) -> str:
    """Cases of the zoo on Triton's interpreter."""
    return f'tests/test_zoo.py -k "{" or ".join(f"triton-{case}" for case in cases)}"'


RANKS = 'tests/test_distributed.py -k "every_case and 2"'
GROUPS = 'tests/test_zoo.py -k "several_key and triton"'
LISTED = "tests/test_selecting.py -k test_selected_by_index"
SCORED = "tests/test_selecting.py -k 'test_selected_by_score or of_equal_scores'"
OPERATIONS = "tests/test_selection.py -k 'host and not triton or bitmasks or scores'"
DENSE = _zoo("dense-113x203-float32-gqa-16", "dense-203x113")
DIAGONAL = "tests/test_zoo.py -k a_diagonal_about"
LENGTHS, DECODED = _zoo("causal-tall"), _zoo("dense-7x300-float32-gqa")

MUTANTS: dict[str, list[Mutant]] = {
    "masks": _of(
        "masks",
        (
            "local.py",
            "np.maximum(highest - high, 0)",
            "np.maximum(highest - high - 1, 0)",
            "tests/test_local.py -k 'double_loop or edges'",
        ),
        (
            "local.py",
            "np.minimum(lowest - low, 0)",
            "np.minimum(lowest - low + 1, 0)",
            "tests/test_local.py -k 'double_loop or edges'",
        ),
        ("local.py", "(low <= distance)", "(low < distance)", "tests/test_local.py -k 'double_loop or edges'"),
        (
            "local.py",
            "return first_query - high, last_query - low",
            "return first_query - high + 1, last_query - low",
            "tests/test_local.py -k 'double_loop or edges'",
        ),
        (
            "sinks.py",
            "highest - window + 1, 0,",
            "highest - window, 0,",
            "tests/test_sinks.py -k 'double_loop or edges'",
        ),
        ("sinks.py", "(distance < window)", "(distance <= window)", "tests/test_sinks.py -k 'double_loop or edges'"),
        (
            "sinks.py",
            "first_query - window + 1], axis=1)",
            "first_query - window + 2], axis=1)",
            "tests/test_sinks.py -k 'double_loop or edges'",
        ),
        (
            "sinks.py",
            "np.minimum(last_query, sinks - 1)",
            "np.minimum(last_query, sinks - 2)",
            "tests/test_sinks.py -k 'double_loop or edges'",
        ),
        (
            "sinks.py",
            "(n_last == canvas.block_q)",
            "(n_last >= canvas.block_q - 1)",
            "tests/test_sinks.py -k 'double_loop or edges'",
        ),
        (
            "sinks.py",
            "is_kept = (n_sinks == canvas.block_kv)",
            "is_kept = (n_sinks >= canvas.block_kv - 1)",
            "tests/test_sinks.py -k 'double_loop or edges'",
        ),
        (
            "canvas.py",
            "np.clip(last_key // self.block_kv + 1, 0",
            "np.clip(-(-last_key // self.block_kv), 0",
            "tests/test_local.py -k 'double_loop or edges'",
        ),
        (
            "canvas.py",
            "corner - (self.block_kv - 1), corner + (self.block_q - 1)",
            "corner - (self.block_q - 1), corner + (self.block_kv - 1)",
            "tests/test_local.py -k 'double_loop or edges'",
        ),
        (
            "butterfly.py",
            "partners = cells[:, None] ^ flips",
            "partners = cells[:, None] + flips",
            "tests/test_butterfly.py -k 'double_loop or stretched'",
        ),
        (
            "butterfly.py",
            "(bounds[1:] - 1) // side + 1",
            "bounds[1:] // side + 1",
            "tests/test_butterfly.py -k 'double_loop or stretched'",
        ),
        (
            "global_tokens.py",
            "is_global_key[canvas.kv_len - shared :]",
            "is_global_key[:shared]",
            "tests/test_global_tokens.py -k double_loop",
        ),
        ("strided.py", "else lowest > -stride)", "else lowest > -stride - 2)", "tests/test_strided.py -k edges"),
        ("strided.py", "& (highest < stride)", "& (highest < stride + 2)", "tests/test_strided.py -k edges"),
        ("dilated.py", "(highest <= high)", "(highest <= high + 1)", "tests/test_dilated.py -k edges"),
        ("prefix.py", "(lowest >= 0)", "(lowest >= -1)", "tests/test_prefix.py -k double_loop"),
        (
            "chunks.py",
            "(last_kv_chunk < q_chunk)",
            "(last_kv_chunk <= q_chunk)",
            "tests/test_sparse_transformer.py -k double_loop",
        ),
        (
            "block_diagonal.py",
            "np.minimum(canvas.distances(row, col)[0], 0)",
            "np.minimum(canvas.distances(row, col)[0] + 1, 0)",
            "tests/test_block_diagonal.py -k double_loop",
        ),
        (
            "hierarchical.py",
            "np.minimum(canvas.distances(row, col)[0], 0)",
            "np.minimum(canvas.distances(row, col)[0] + 1, 0)",
            "tests/test_hierarchical.py -k edges",
        ),
        ("longnet.py", "np.minimum(lowest, 0)", "np.minimum(lowest + 1, 0)", "tests/test_longnet.py -k double_loop"),
        (
            "sparse_transformer.py",
            "np.minimum(canvas.distances(row, col)[0], 0)",
            "np.minimum(canvas.distances(row, col)[0] + 1, 0)",
            "tests/test_sparse_transformer.py -k double_loop",
        ),
        (
            "vertical_slash.py",
            "np.minimum(lowest, 0)",
            "np.minimum(lowest + 1, 0)",
            "tests/test_vertical_slash.py -k edges",
        ),
        (
            "grid.py",
            "np.minimum(begin + width, side) - 1",
            "np.minimum(begin + width, side - 1)",
            "tests/test_grid.py -k any_swin",
        ),
        (
            "documents.py",
            "packed.ends[packed.numbers[last_query]] - 1",
            "packed.ends[packed.numbers[last_query]] - 2",
            "tests/test_documents.py -k double_loop",
        ),
        (
            "shared_prefix.py",
            "n_full_cols = prefix // own",
            "n_full_cols = (prefix + 1) // own",
            "tests/test_shared_prefix.py",
        ),
        ("tree.py", "n_full_cols = prompt //", "n_full_cols = (prompt + 1) //", "tests/test_tree.py"),
        (
            "block_diffusion.py",
            "(across.last[col] < down.first[row] + down.is_clean[row])",
            "(across.last[col] <= down.first[row] + down.is_clean[row])",
            "tests/test_block_diffusion.py",
        ),
    ),
    "blocks": _of(
        OURS,
        (
            "blocks.py",
            'packbits(bits, axis=-1, bitorder="little")',
            'packbits(bits, axis=-1, bitorder="big")',
            "tests/test_blocks.py",
        ),
        ("blocks.py", "bits[1::2, :, (kv_len", "bits[1:, :, (kv_len", "tests/test_blocks.py"),
        (
            "blocks.py",
            "(keys // n_cols % n_rows == n_rows - 1)",
            "(keys // n_cols == n_rows - 1)",
            "tests/test_blocks.py",
        ),
        ("blocks.py", 'order = used[np.argsort(first[used], kind="stable")]', "order = used", "tests/test_blocks.py"),
        ("blocks.py", "if np.array_equal(codes[twins], codes):", "if True:", "tests/test_blocks.py"),
        ("blocks.py", "looks + self._n_words, looks)", "looks, looks)", "tests/test_blocks.py"),
        (
            "blocks.py",
            "down = place // n_across * SIDE_UNIT - old[0]",
            "down = place // n_across * SIDE_UNIT - new[0]",
            "tests/test_blocks.py",
        ),
        ("blocks.py", "words &= there[kinds[first]]", "words &= there[0]", "tests/test_blocks.py"),
        ("blocks.py", "values = values[n_full:] - 1", "values = values - 1", "tests/test_blocks.py"),
        (
            "algebra.py",
            "(np.arange(len(leads)) - leads) * n_blocks",
            "np.arange(len(leads)) * n_blocks",
            "tests/test_blocks.py",
        ),
        ("algebra.py", "hit = blocks.keys[where] == keys", "hit = blocks.keys[where] >= keys", "tests/test_blocks.py"),
        ("algebra.py", "turned = (leads * n_cols + keys", "turned = (leads * n_rows + keys", "tests/test_blocks.py"),
        ("algebra.py", "found.ids + n_words, found.ids)", "found.ids, found.ids)", "tests/test_algebra.py"),
        (
            "algebra.py",
            "lead = batch * total + before + head if",
            "lead = batch * frame.heads + before + head if",
            "tests/test_algebra.py",
        ),
        (
            "algebra.py",
            "counts = in_edge[edge_kinds(found.keys, **frame.sizes)]",
            "counts = in_edge[0 * found.keys]",
            "tests/test_algebra.py",
        ),
        ("algebra.py", "there[values % 4] & ~blocks.bitmasks", "there[0] & ~blocks.bitmasks", "tests/test_blocks.py"),
        (
            "gather.py",
            "codes = position % block_q * block_q + token % block_q",
            "codes = token % block_q * block_q + position % block_q",
            "tests/test_gather.py -k 'shifting or permuting or crops'",
        ),
        (
            "gather.py",
            "(first <= col) & (col < stop)",
            "(first <= col) & (col <= stop)",
            "tests/test_gather.py -k 'shifting or permuting or crops'",
        ),
        (
            "gather.py",
            "min(stop * block_kv, frame.kv_len) - first * block_kv",
            "(stop - first) * block_kv",
            "tests/test_gather.py -k 'shifting or permuting or crops'",
            "no key beyond those of the crop is read, however long the frame says that the keys are",
        ),
    ),
    "plan": _of(
        OURS,
        # on the host
        ("plan.py", "edge = 2 * (q_is_ragged", "edge = 1 * (q_is_ragged", "tests/test_plan.py"),
        ("plan.py", "np.array([1, 2, 4, 8], np.int32)", "np.array([1, 4, 2, 8], np.int32)", "tests/test_plan.py"),
        (
            "plan.py",
            "(2, 0b0011) if of_rows else (1, 0b0101)",
            "(1, 0b0101) if of_rows else (2, 0b0011)",
            "tests/test_plan.py",
        ),
        (
            "plan.py",
            "PARTIAL + ((ALL_QUARTERS - quarters) << QUARTERS_BIT)",
            "PARTIAL + (quarters << QUARTERS_BIT)",
            "tests/test_plan.py",
        ),
        ("plan.py", "begin[n_of_rows:] -= len(by_rows.line)", "begin[n_of_rows:] -= 0", "tests/test_plan.py"),
        (
            "plan.py",
            "is_long = work * work.size > 2 * n_tiles",
            "is_long = work * work.size >= 2 * n_tiles",
            "tests/test_plan.py",
        ),
        (
            "plan.py",
            "int(is_long.sum(axis=1).max()), work.shape[1] - 1)",
            "int(is_long.sum(axis=1).max()), work.shape[1])",
            "tests/test_plan.py",
        ),
        (
            "plan.py",
            "range(16, (limit - 1).bit_length(), 16)",
            "range(32, (limit - 1).bit_length(), 16)",
            "tests/test_plan.py",
        ),
        ("plan.py", "length + 8 * n_long +", "length + 8 * min(n_long, 1) +", "tests/test_plan.py"),
        (
            "plan.py",
            "(n_cols * np.arange(leads)).repeat",
            "(frame.n_rows * np.arange(leads)).repeat",
            "tests/test_plan.py",
        ),
        # on the device, by kernels
        ("kernels/listing.py", "- 1 + kv_len - q_len >= b_first_kv", "- 1 + kv_len - q_len > b_first_kv", LISTED),
        (
            "kernels/listing.py",
            "b_first_q + kv_len - q_len >= b_first_kv + HALF - 1",
            "b_first_q + kv_len - q_len > b_first_kv + HALF - 1",
            LISTED,
        ),
        ("kernels/listing.py", "4 * (behind < 0)", "4 * (behind <= 0)", LISTED),
        ("kernels/listing.py", "(last_q + kv_len - q_len >= first_kv)", "(last_q + kv_len - q_len > first_kv)", LISTED),
        ("kernels/listing.py", "(o_other[None, :] < o_line[:, None])", "(o_other[None, :] > o_line[:, None])", LISTED),
        (
            "kernels/listing.py",
            "tl.minimum(n_long, n_major - 1)",
            "tl.minimum(n_long, n_major)",
            "tests/test_selecting.py -k every_line_of_a_head",
        ),
        ("kernels/listing.py", "- TILE * (b_diagonal - 1)", "- TILE * b_diagonal", LISTED),
        (
            "kernels/listing.py",
            "b_next_both = b_next_full - b_quartered",
            "b_next_both = b_next_full - b_single",
            LISTED,
        ),
        # selection: kernels, operations
        ("kernels/selecting.py", "(o_col * block_kv <= last_kv)", "(o_col * block_kv < last_kv)", SCORED),
        ("kernels/selecting.py", "(b_place <= k - n_above)", "(b_place < k - n_above)", SCORED),
        ("kernels/selecting.py", "b_key ^ ((b_key >> 31) & 0x7FFFFFFF)", "b_key ^ ((b_key >> 31) & 0)", SCORED),
        (
            "kernels/selecting.py",
            "(b_col >= 0) & (b_col < n_cols)",
            "(b_col >= 0) & (b_col <= n_cols)",
            "tests/test_selecting.py -k not_a_col",
        ),
        ("selection.py", "first = ahead + block_q - 1", "first = ahead + block_q", OPERATIONS),
        ("selection.py", "(cols[:, 1:] != cols[:, :-1])", "(cols[:, 1:] >= cols[:, :-1])", OPERATIONS),
        ("selection.py", "indptr[1:, 0] = indptr[:-1, -1]", "indptr[1:, 0] = indptr[:-1, 0]", OPERATIONS),
        ("selection.py", "row % parts[0] * parts[1] + col", "row % parts[0] * parts[0] + col", OPERATIONS),
        ("selection.py", "- TILE * (diagonal - 1)", "- TILE * diagonal", OPERATIONS),
        ("selection.py", "for least in (TILE - 1, 0):", "for least in (TILE, 0):", LISTED),
    ),
    "eager": _of(
        f"{OURS}/kernels",
        ("eager.py", "head_idx // (sizes.heads // sizes.kv_heads)", "head_idx % sizes.kv_heads", "tests/test_eager.py"),
        (
            "eager.py",
            "(batch_idx * sizes.heads + head_idx) * sizes.n_rows",
            "(head_idx * sizes.batch + batch_idx) * sizes.n_rows",
            "tests/test_eager.py",
        ),
        ("eager.py", "(row * TILE + offset + 1) // TILE", "(row * TILE + offset + 2) // TILE", "tests/test_eager.py"),
        (
            "eager.py",
            "(last_query + offset) // TILE + 1)",
            "(last_query + offset - 1) // TILE + 1)",
            "tests/test_eager.py",
        ),
        ("eager.py", "kv_pos <= q_pos + offset", "kv_pos < q_pos + offset", "tests/test_eager.py"),
        (
            "eager.py",
            "kv_pos < self.kv_lengths[batch_idx]",
            "kv_pos <= self.kv_lengths[batch_idx]",
            "tests/test_eager.py",
        ),
        ("eager.py", "delta = delta - dlse", "delta = delta + dlse", "tests/test_eager.py"),
        ("eager.py", "dscores.sub_(delta_chunk)", "dscores.sub_(0 * delta_chunk)", "tests/test_eager.py"),
        (
            "eager.py",
            "b.total.mul_(decay_b).addcmul_(a.total, decay_a)",
            "b.total.mul_(decay_b).add_(a.total)",
            "tests/test_eager.py",
        ),
        ("eager.py", "1 / philox.kept_share(self.dropout_p)", "1 / (1 - self.dropout_p)", "tests/test_eager.py"),
        (
            "eager.py",
            "device=tensor.device) >= kv_lengths[:, None]",
            "device=tensor.device) > kv_lengths[:, None]",
            "tests/test_eager.py",
        ),
        (
            "eager.py",
            "highest = sinks[index // sizes.n_rows % sizes.heads]",
            "highest = sinks[index % sizes.heads]",
            "tests/test_scores.py -k eager",
        ),
        (
            "eager.py",
            "(q_pos + (self.sizes.kv_len - self.sizes.q_len) - kv_pos).abs()",
            "(q_pos - kv_pos).abs()",
            "tests/test_scores.py -k eager",
        ),
        (
            "eager.py",
            "dscores.view(span.shape).mul_(span.keep)",
            "dscores.view(span.shape).mul_(1)",
            "tests/test_eager.py",
        ),
    ),
    "kernels": _of(
        f"{OURS}/kernels",
        (
            "forward.py",
            "i_kv_head = i_head // GROUP",
            "i_kv_head = i_head % (n_heads // GROUP)",
            GROUPS,
        ),
        ("forward.py", "b_sum = b_sum * b_decay + tl.sum(b_p, 1)", "b_sum = b_sum + tl.sum(b_p, 1)", DENSE),
        ("forward.py", "b_out = b_out * b_decay[:, None]", "b_out = b_out * 1.0", DENSE),
        ("forward.py", "if LIMITED and HAS_LAYOUT:", "if False:", LENGTHS),
        ("forward.py", "tl.load(kv_lengths_ptr + i_batch)", "tl.load(kv_lengths_ptr)", LENGTHS),
        ("forward.py", "(keep_scale / b_sum)[:, None]", "(1.0 / b_sum)[:, None]", _zoo("global-float32")),
        (
            "forward.py",
            'tl.where(sink == float("-inf"), 0.0, 1.0)',
            'tl.where(sink == float("-inf"), 1.0, 1.0)',
            "tests/test_scores.py -k triton",
        ),
        (
            "tile.py",
            "n_full = tl.maximum(tl.minimum(diagonal, limit), 0)",
            "n_full = tl.maximum(tl.minimum(diagonal + 1, limit), 0)",
            DIAGONAL,
        ),
        ("tile.py", "tl.minimum(diagonal + BLOCK_Q - 1, limit)", "tl.minimum(diagonal + BLOCK_Q - 2, limit)", DIAGONAL),
        (
            "tile.py",
            "full = tl.cdiv(tl.maximum(kv_start + BLOCK_KV - 1 - (kv_len - q_len), 0), BLOCK_Q)",
            "full = tl.maximum(kv_start + BLOCK_KV - 1 - (kv_len - q_len), 0) // BLOCK_Q",
            DIAGONAL,
        ),
        (
            "tile.py",
            "first = tl.maximum(kv_start - (kv_len - q_len), 0) // BLOCK_Q",
            "first = tl.cdiv(tl.maximum(kv_start - (kv_len - q_len), 0), BLOCK_Q)",
            DIAGONAL,
        ),
        ("tile.py", "(o_kv <= o_q + (kv_len - q_len))", "(o_kv < o_q + (kv_len - q_len))", DIAGONAL),
        (
            "tile.py",
            "return ((b_bits >> (o_col % 32)[None, :]) & 1) != 0",
            "return ((b_bits >> (31 - o_col % 32)[None, :]) & 1) != 0",
            GROUPS,
        ),
        (
            "tile.py",
            "o_word = (q_start + tl.arange(0, ROWS)) * (TILE // 32)",
            "o_word = tl.arange(0, ROWS) * (TILE // 32)",
            GROUPS,
        ),
        (
            "tile.py",
            "m_kept.permute(0, 5, 1, 2, 6, 4, 3)",
            "m_kept.permute(0, 5, 1, 2, 4, 6, 3)",
            _zoo("global-float32"),
        ),
        ("tile.py", "(i_axis % n_heads * GROUP)", "(i_axis % n_heads)", "tests/test_parts.py -k columns_are_added"),
        (
            "tile.py",
            "i_chunk * size + tl.minimum(i_chunk, n_larger)",
            "i_chunk * size",
            "tests/test_decode.py -k test_any_number_of_queries",
        ),
        ("tile.py", "(b_new - b_sum) - b_step", "b_step - (b_new - b_sum)", "tests/test_tile.py"),
        (
            "tile.py",
            "tl.load(p_items + i_line * RECORD + 4)",
            "tl.load(p_items + i_line * RECORD)",
            GROUPS,
        ),
        (
            "backward_programs.py",
            "i_head = i_kv_head * GROUP + i_member",
            "i_head = i_member * n_heads + i_kv_head",
            GROUPS,
        ),
        (
            "backward_programs.py",
            "b_kept_p = tl.where(m_kept, b_p * keep_scale, 0.0)",
            "b_kept_p = tl.where(m_kept, b_p, 0.0)",
            _zoo("global-float32"),
        ),
        ("backward_programs.py", "b_ds = b_p * (b_dp - b_delta[None, :])", "b_ds = b_p * b_dp", DENSE),
        ("backward_programs.py", "b_ds = b_p * (b_dp - b_delta[:, None])", "b_ds = b_p * b_dp", DENSE),
        (
            "backward_programs.py",
            "b_p = tl.where(m_kv[:, None], b_p, 0.0)",
            "b_p = tl.where(m_kv[:, None], b_p, b_p)",
            LENGTHS,
        ),
        (
            "backward_programs.py",
            "i_batch, i_head, kv_start // TILE)",
            "i_batch, i_kv_head, kv_start // TILE)",
            GROUPS,
        ),
        (
            "backward_programs.py",
            "b_dslope -= tl.sum(",
            "b_dslope += tl.sum(",
            _zoo("causal-float16-mha-32-causal-has_slopes"),
        ),
        ("statistics.py", "b_delta -= tl.where(b_lse", "b_delta += tl.where(b_lse", DENSE),
        (
            "decode.py",
            "(o_kv[None, :] <= o_q[:, None] + (kv_len - q_len))",
            "(o_kv[None, :] < o_q[:, None] + (kv_len - q_len))",
            DECODED,
        ),
        (
            "decode.py",
            "o_q // PIECE_Q * (TILE // PIECE_KV)",
            "o_q // PIECE_Q * (TILE // PIECE_Q)",
            "tests/test_decode.py -k split_rows",
        ),
        (
            "parts.py",
            "b_out = b_out * b_decay + tl.sum(b_part",
            "b_out = b_out + tl.sum(b_part",
            "tests/test_decode.py -k merged_by_their_weight",
        ),
        (
            "parts.py",
            "i_tile = n_lines - 1 - i_line // n_axes",
            "i_tile = i_line // n_axes",
            "tests/test_parts.py -k rows_are_merged",
        ),
        (
            "parts.py",
            "tl.load(p_part + TILE * DIM + o_row[:, None]",
            "tl.load(p_part + TILE * DIM_V + o_row[:, None]",
            "tests/test_parts.py -k columns_are_added",
        ),
        (
            "score_tile.py",
            "p_table, kv_start % TILE, q_start % TILE, 1, TILE // PIECE_KV, BLOCK_KV, PIECE_KV, BLOCK_Q, PIECE_Q",
            "p_table, kv_start % TILE, q_start % TILE, 1, TILE // PIECE_Q, BLOCK_KV, PIECE_KV, BLOCK_Q, PIECE_Q",
            _zoo("blocks-of-64x32-float16"),
        ),
        (
            "score_tile.py",
            "p_sums += q_start % TILE // GRAIN_Q * (TILE // GRAIN_KV)",
            "p_sums += q_start % TILE // GRAIN_Q * (TILE // GRAIN_Q)",
            _zoo("blocks-of-64x32-float16", "blocks-of-48-float32"),
        ),
        (
            "score_tile.py",
            "q_start + ahead - kv_start, BLOCK_KV, T)",
            "q_start - kv_start, BLOCK_KV, T)",
            _zoo("dense-113x203-float32-gqa-16-has_kv_lengths"),
        ),
    ),
    "interop": _of(
        f"{OURS}/interop",
        (
            "runs.py",
            "is_full = crossing == heights",
            "is_full = crossing >= heights - 1",
            "tests/test_interop_runs.py -k 'runs or few_pairs or from_flashmask'",
        ),
        (
            "runs.py",
            "np.minimum(block_size[0], q_len - rows % n_rows * block_size[0])",
            "np.minimum(block_size[0], q_len - rows * block_size[0])",
            "tests/test_interop_runs.py -k 'runs or few_pairs or from_flashmask'",
        ),
        (
            "flashmask.py",
            "np.minimum(bounds, q_len).reshape",
            "np.asarray(bounds).reshape",
            "tests/test_interop_runs.py -k flashmask",
        ),
        (
            "flashmask.py",
            "is_suffix = end == q_len",
            "is_suffix = end >= q_len - 1",
            "tests/test_interop_runs.py -k flashmask",
        ),
        (
            "flashmask.py",
            "(columns[0], end), (np.zeros_like(end), columns[1])",
            "(columns[1], end), (np.zeros_like(end), columns[0])",
            "tests/test_interop_runs.py -k flashmask",
        ),
        (
            "flashmask.py",
            "bounds = np.repeat(bounds, group, axis=1)",
            "bounds = np.tile(bounds, (1, group, 1, 1))",
            "tests/test_interop_runs.py -k flashmask",
        ),
        ("magi.py", "q1[which] - 1 - lines, 0)", "q1[which] - lines, 0)", "tests/test_interop_runs.py -k from_magi"),
        (
            "kv_lists.py",
            "batch_step = heads * n_rows * n_cols",
            "batch_step = n_rows * n_cols",
            "tests/test_interop_kv_lists.py -k 'attention_and_back or taken_apart'",
        ),
        (
            "kv_lists.py",
            "(word >> (key % 32))",
            "(word >> (31 - key % 32))",
            "tests/test_interop_kv_lists.py -k 'attention_and_back or taken_apart'",
        ),
        (
            "kv_lists.py",
            "np.minimum(down, n_fine_rows - rows * down)",
            "np.full_like(rows, down)",
            "tests/test_interop_kv_lists.py -k 'attention_and_back or taken_apart'",
        ),
        (
            "block_masks.py",
            "(col >= ends - local) & (col < ends)",
            "(col > ends - local) & (col < ends)",
            "tests/test_interop_block_masks.py",
        ),
        (
            "block_masks.py",
            "q_pos + kv_len - q_len - kv_pos < locals_[head]",
            "q_pos + kv_len - q_len - kv_pos <= locals_[head]",
            "tests/test_interop_block_masks.py",
        ),
        (
            "block_masks.py",
            "-(-max(kv_len - q_len, 0) // _MIT_BLOCK) + 1",
            "max(kv_len - q_len, 0) // _MIT_BLOCK + 1",
            "tests/test_interop_block_masks.py",
        ),
        (
            "stored.py",
            "found.leads == batch * layout.shape[1] + head",
            "found.leads == head * layout.shape[0] + batch",
            "tests/test_interop_bsr.py",
        ),
        ("stored.py", "-block_q, block_kv),", "-block_q, block_kv - 2),", "tests/test_interop_block_masks.py"),
        (
            "bsr.py",
            "row.reshape(sides[0], end - begin, sides[1]).swapaxes(0, 1)",
            "row.reshape(end - begin, sides[0], sides[1])",
            "tests/test_interop_bsr.py",
        ),
        (
            "bsr.py",
            "[pairs[begin:end].swapaxes(0, 1).reshape(-1)",
            "[pairs[begin:end].reshape(-1)",
            "tests/test_interop_bsr.py",
        ),
        (
            "attention_masks.py",
            "misplaced = (is_token[:, 1:] & ~is_token[:, :-1])",
            "misplaced = (is_token[:, 1:] & ~is_token[:, :1])",
            "tests/test_interop_attention_masks.py",
        ),
    ),
    "distributed": _of(
        OURS,
        (
            "distributed/traffic.py",
            "np.lexsort((tile, sender, receiver))",
            "np.lexsort((tile, receiver, sender))",
            "tests/test_traffic.py",
            "a rank reads the moves that it sends, or those that come to it, alone: either order leaves these as they are",
        ),
        (
            "distributed/traffic.py",
            "return np.minimum(length - tiles * TILE, TILE)",
            "return np.full_like(tiles, TILE)",
            "tests/test_traffic.py",
        ),
        (
            "distributed/traffic.py",
            "tokens_by(found.sender[comes]",
            "tokens_by(found.receiver[comes]",
            "tests/test_traffic.py",
        ),
        (
            "distributed/ownership.py",
            "np.bincount(rank[owner[tile] != rank]",
            "np.bincount(rank[owner[tile] >= rank]",
            "tests/test_ownership.py",
        ),
        ("distributed/ownership.py", "np.argsort(-work, kind=", "np.argsort(work, kind=", "tests/test_ownership.py"),
        ("distributed/rows.py", "given = own if i_rank == rank else part", "given = part", "tests/test_rows.py -k sum"),
        (
            "distributed/rows.py",
            "torch.where((places >= 0)[:, None], found, otherwise)",
            "found",
            "tests/test_rows.py -k 'sum or merged'",
        ),
        (
            "kernels/rows.py",
            "b_lse = ((b_high << 16) | b_low)",
            "b_lse = ((b_low << 16) | b_high)",
            "tests/test_rows.py -k merged",
        ),
        (
            "kernels/rows.py",
            "b_out += b_share[:, None] * b_part.to(tl.float32)",
            "b_out += b_part.to(tl.float32)",
            "tests/test_rows.py -k merged",
        ),
        ("merging.py", "pivot + divisor.log())", "divisor.log())", "tests/test_merging.py"),
        (
            "distributed/exchange.py",
            "messages.sent(back, keys.receive, keys.send, walk.group)",
            "messages.sent(back.flip(0), keys.receive, keys.send, walk.group)",
            RANKS,
        ),
        (
            "distributed/exchange.py",
            "items[:, of_q] if items.shape[1] > 1 else items",
            "items[:, of_kv] if items.shape[1] > 1 else items",
            RANKS,
        ),
        (
            "distributed/exchange.py",
            "rows.unpack(flight.arrived(), [k_all, v_all], slots, backend)",
            "rows.unpack(flight.arrived(), [k_all, v_all], slots.flip(0), backend)",
            RANKS,
        ),
        (
            "distributed/context_plan.py",
            "needs[row[mine & (owner[col] != rank)]] = True",
            "needs[row[mine & (owner[col] > rank)]] = True",
            RANKS,
        ),
        ("distributed/context_plan.py", "range(rank * share, (rank + 1) * share)", "range(rank, rank + share)", RANKS),
        (
            "distributed/context_plan.py",
            "np.append(row[owner[col] == rank], shipped[owner[shipped] == rank])",
            "row[owner[col] == rank]",
            RANKS,
        ),
        (
            "distributed/packed_heads.py",
            "x.view(len(x), n_ranks, heads, n_local, dim).permute(1, 3, 0, 2, 4)",
            "x.view(len(x), heads, n_ranks, n_local, dim).permute(2, 3, 0, 1, 4)",
            RANKS,
        ),
    ),
}

"""Single-line faults for tests/support/mutants.py, by area, each with the tests that must fail.

Faults are off-by-one errors, wrong comparisons, swapped axes, missing terms, wrong heads or ranks; none is a mere
crash. `old` must occur once in its file, so a change of such a line needs a change here.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault: in `file` the text `old` becomes `new`, and `tests`, arguments of pytest, must fail.

    why  why no test can detect the fault, if so
    """

    file: str
    old: str
    new: str
    tests: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()} -> {self.new.strip()}"


def _of(folder: str, *rows: tuple[str, ...]) -> list[Mutant]:
    """Mutants of files in a folder."""
    return [Mutant(f"{folder}/{row[0]}", *row[1:]) for row in rows]


PACKAGE = "blocksparse_flash"
# the order of tokens: which layouts get one, and calls in it
ORDERS = "tests/plan/test_reordering.py"
REORDERED = "tests/test_reordering.py -k"


def _zoo(*cases: str) -> str:
    """Cases of the zoo on Triton's interpreter."""
    return f'tests/test_zoo.py -k "{" or ".join(f"triton-{case}" for case in cases)}"'


RANKS = 'tests/distributed/test_distributed.py -k "every_case and 2"'
GROUPS = 'tests/test_zoo.py -k "several_kv and triton"'
BY_INDEX = "tests/kernels/triton/test_block_selection.py -k selection_by_index"
PACKED = "tests/plan/test_packed_builder.py -m 'not thorough'"
BY_TOKEN = "tests/kernels/triton/test_block_selection.py -k by_token"
BY_SCORE = "tests/kernels/triton/test_block_selection.py -k 'selection_by_score or equal_scores'"
OPERATIONS = "tests/plan/test_block_selection.py -k 'host and not triton or bitmasks or scores'"
BY_KEY_BLOCK = "tests/plan/test_selected_builder.py"
MERGED = "tests/kernels/triton/test_merge_selected.py"
MEMORY = "tests/runtime/test_memory.py"
DROPOUT = 'tests/test_zoo.py -k "triton and dropout"'
DENSE = _zoo("dense-113x203-float32-gqa-16", "dense-203x113")
DIAGONAL = "tests/test_zoo.py -k a_diagonal_near"
CACHED = "tests/nn/test_kv_cache.py"
DECODER = "tests/nn/test_decoder.py"
BY_LENGTH = "tests/nn/test_layout_by_length.py"
GATES = 'tests/plan/test_block_bias.py -k "gather or gate or scores"'
LAYERS = 'tests/huggingface/test_layers.py -k "own_layout or checked or saved or token_by_token"'
SAVED = "tests/huggingface/test_saved_layouts.py"
SELECTION = 'tests/huggingface/test_selection.py -k "definition or token_by_token"'
PAIRS, PAIRS_EAGER = (f'tests/test_score_mods.py -k "pair_bias and {name}"' for name in ("triton", "eager"))
LENGTHS, DECODED = _zoo("causal-tall"), _zoo("dense-7x300-float32-gqa")

PAGES = "tests/paged/test_attention.py -k"
IN_PAGES, EAGER_PAGES = f"{PAGES} triton_is_accurate -m 'not thorough'", f"{PAGES} eager_is_the_definition"
GRID, REFUSED_PAGES = f"{PAGES} test_the_grid", f"{PAGES} wrong_calls"
SELECTED_PAGES, APPENDED = "tests/paged/test_selection.py", "tests/paged/test_writing.py"
SCORED, SPLITS = f"{SELECTED_PAGES} -k the_kernel", "tests/kernels/triton/test_paged.py"

MUTANTS: dict[str, list[Mutant]] = {
    "masks": _of(
        "masks",
        (
            "local.py",
            "np.maximum(highest - high, 0)",
            "np.maximum(highest - high - 1, 0)",
            "tests/masks/test_local.py -k 'double_loop or edges'",
        ),
        (
            "local.py",
            "np.minimum(lowest - low, 0)",
            "np.minimum(lowest - low + 1, 0)",
            "tests/masks/test_local.py -k 'double_loop or edges'",
        ),
        ("local.py", "(low <= distance)", "(low < distance)", "tests/masks/test_local.py -k 'double_loop or edges'"),
        (
            "local.py",
            "return first_query - high, last_query - low",
            "return first_query - high + 1, last_query - low",
            "tests/masks/test_local.py -k 'double_loop or edges'",
        ),
        (
            "sinks.py",
            "highest - window + 1, 0,",
            "highest - window, 0,",
            "tests/masks/test_sinks.py -k 'double_loop or edges'",
        ),
        (
            "sinks.py",
            "(distance < window)",
            "(distance <= window)",
            "tests/masks/test_sinks.py -k 'double_loop or edges'",
        ),
        (
            "sinks.py",
            "first_query - window + 1], axis=1)",
            "first_query - window + 2], axis=1)",
            "tests/masks/test_sinks.py -k 'double_loop or edges'",
        ),
        (
            "sinks.py",
            "np.minimum(last_query, sinks - 1)",
            "np.minimum(last_query, sinks - 2)",
            "tests/masks/test_sinks.py -k 'double_loop or edges'",
        ),
        (
            "sinks.py",
            "(n_last == canvas.block_q)",
            "(n_last >= canvas.block_q - 1)",
            "tests/masks/test_sinks.py -k 'double_loop or edges'",
        ),
        (
            "sinks.py",
            "is_kept = (n_sinks == canvas.block_kv)",
            "is_kept = (n_sinks >= canvas.block_kv - 1)",
            "tests/masks/test_sinks.py -k 'double_loop or edges'",
        ),
        (
            "canvas.py",
            "np.clip(last_key // self.block_kv + 1, 0",
            "np.clip(-(-last_key // self.block_kv), 0",
            "tests/masks/test_local.py -k 'double_loop or edges'",
        ),
        (
            "canvas.py",
            "corner - (self.block_kv - 1), corner + (self.block_q - 1)",
            "corner - (self.block_q - 1), corner + (self.block_kv - 1)",
            "tests/masks/test_local.py -k 'double_loop or edges'",
        ),
        (
            "butterfly.py",
            "partners = cells[:, None] ^ flips",
            "partners = cells[:, None] + flips",
            "tests/masks/test_butterfly.py -k 'double_loop or stretched'",
        ),
        (
            "butterfly.py",
            "(bounds[1:] - 1) // side + 1",
            "bounds[1:] // side + 1",
            "tests/masks/test_butterfly.py -k 'double_loop or stretched'",
        ),
        (
            "global_tokens.py",
            "is_global_key[canvas.kv_len - shared :]",
            "is_global_key[:shared]",
            "tests/masks/test_global_tokens.py -k double_loop",
        ),
        ("strided.py", "else lowest > -stride)", "else lowest > -stride - 2)", "tests/masks/test_strided.py -k edges"),
        ("strided.py", "& (highest < stride)", "& (highest < stride + 2)", "tests/masks/test_strided.py -k edges"),
        ("dilated.py", "(highest <= high)", "(highest <= high + 1)", "tests/masks/test_dilated.py -k edges"),
        ("strided.py", "canvas.kv_len // stride + 3", "canvas.kv_len // stride + 2", "tests/masks/test_strided.py"),
        ("dilated.py", "canvas.kv_len // dilation + 1", "canvas.kv_len // dilation", "tests/masks/test_dilated.py"),
        ("prefix.py", "(lowest >= 0)", "(lowest >= -1)", "tests/masks/test_prefix.py -k double_loop"),
        (
            "chunks.py",
            "(last_kv_chunk < q_chunk)",
            "(last_kv_chunk <= q_chunk)",
            "tests/masks/test_sparse_transformer.py -k double_loop",
        ),
        (
            "block_diagonal.py",
            "np.minimum(canvas.distances(row, col)[0], 0)",
            "np.minimum(canvas.distances(row, col)[0] + 1, 0)",
            "tests/masks/test_block_diagonal.py -k double_loop",
        ),
        (
            "hierarchical.py",
            "np.minimum(canvas.distances(row, col)[0], 0)",
            "np.minimum(canvas.distances(row, col)[0] + 1, 0)",
            "tests/masks/test_hierarchical.py -k edges",
        ),
        (
            "longnet.py",
            "np.minimum(lowest, 0)",
            "np.minimum(lowest + 1, 0)",
            "tests/masks/test_longnet.py -k double_loop",
        ),
        (
            "sparse_transformer.py",
            "np.minimum(canvas.distances(row, col)[0], 0)",
            "np.minimum(canvas.distances(row, col)[0] + 1, 0)",
            "tests/masks/test_sparse_transformer.py -k double_loop",
        ),
        (
            "vertical_slash.py",
            "np.minimum(lowest, 0)",
            "np.minimum(lowest + 1, 0)",
            "tests/masks/test_vertical_slash.py -k edges",
        ),
        (
            "grid.py",
            "np.minimum(begin + width, side) - 1",
            "np.minimum(begin + width, side - 1)",
            "tests/masks/test_grid.py -k any_swin",
        ),
        (
            "documents.py",
            "packed.ends[packed.numbers[last_query]] - 1",
            "packed.ends[packed.numbers[last_query]] - 2",
            "tests/masks/test_documents.py -k double_loop",
        ),
        (
            "shared_prefix.py",
            "n_full_cols = prefix // own",
            "n_full_cols = (prefix + 1) // own",
            "tests/masks/test_shared_prefix.py",
        ),
        ("tree.py", "n_full_cols = prompt //", "n_full_cols = (prompt + 1) //", "tests/masks/test_tree.py"),
        (
            "block_diffusion.py",
            "(across.last[col] < down.first[row] + down.is_clean[row])",
            "(across.last[col] <= down.first[row] + down.is_clean[row])",
            "tests/masks/test_block_diffusion.py",
        ),
    ),
    "blocks": _of(
        PACKAGE,
        (
            "blocks/key_runs.py",
            "is_full = crossing == heights",
            "is_full = crossing >= heights - 1",
            "tests/interop/test_key_runs.py -k 'runs or few_pairs or from_flashmask'",
        ),
        (
            "blocks/key_runs.py",
            "np.bincount(line).max(initial=0) <= 1",
            "np.bincount(line).max(initial=0) <= 2",
            "tests/interop/test_key_runs.py -k 'runs or few_pairs or from_flashmask'",
        ),
        (
            "blocks/key_runs.py",
            "np.minimum(block_q, frame.q_len - rows % max(frame.n_rows, 1) * block_q)",
            "np.minimum(block_q, frame.q_len - rows * block_q)",
            "tests/interop/test_key_runs.py -k 'runs or few_pairs or from_flashmask'",
        ),
        (
            "blocks/block_list.py",
            'packbits(bits, axis=-1, bitorder="little")',
            'packbits(bits, axis=-1, bitorder="big")',
            "tests/blocks/test_block_list.py",
        ),
        ("blocks/block_list.py", "bits[1::2, :, (frame", "bits[1:, :, (frame", "tests/blocks/test_block_list.py"),
        (
            "blocks/block_list.py",
            "(keys // n_cols % n_rows == n_rows - 1)",
            "(keys // n_cols == n_rows - 1)",
            "tests/blocks/test_block_list.py",
        ),
        (
            "blocks/block_list.py",
            'order = used[np.argsort(first[used], kind="stable")]',
            "order = used",
            "tests/blocks/test_block_list.py",
        ),
        (
            "blocks/block_list.py",
            "if np.array_equal(codes[twins], codes):",
            "if True:",
            "tests/blocks/test_block_list.py",
        ),
        ("blocks/block_list.py", "= number + self._n_words", "= number", "tests/blocks/test_block_list.py"),
        (
            "blocks/block_list.py",
            "down = place // n_across * SIDE_UNIT - old[0]",
            "down = place // n_across * SIDE_UNIT - new[0]",
            "tests/blocks/test_block_list.py",
        ),
        (
            "blocks/block_list.py",
            "words &= in_bounds[kinds[first]]",
            "words &= in_bounds[0]",
            "tests/blocks/test_block_list.py",
        ),
        (
            "blocks/block_list.py",
            "bitmasks[values // 4] & in_bounds[values % 4]",
            "bitmasks[values // 4]",
            "tests/blocks/test_block_list.py",
        ),
        (
            "blocks/predicates.py",
            "-block_q, block_kv),",
            "-block_q, block_kv - 2),",
            "tests/blocks/test_set_operations.py",
        ),
        (
            "blocks/set_operations.py",
            "(np.arange(len(batch_heads)) - batch_heads) * frame.blocks_per_batch_head",
            "np.arange(len(batch_heads)) * frame.blocks_per_batch_head",
            "tests/blocks/test_block_list.py",
        ),
        (
            "blocks/set_operations.py",
            "hit = blocks.keys[where] == keys",
            "hit = blocks.keys[where] >= keys",
            "tests/blocks/test_block_list.py",
        ),
        (
            "blocks/set_operations.py",
            "turned = (batch_heads * frame.n_cols + cols)",
            "turned = (batch_heads * frame.n_rows + cols)",
            "tests/blocks/test_block_list.py",
        ),
        (
            "blocks/set_operations.py",
            "found.ids + n_words, found.ids)",
            "found.ids, found.ids)",
            "tests/blocks/test_set_operations.py",
        ),
        (
            "blocks/set_operations.py",
            "batch_head = batch * total + before + head if",
            "batch_head = batch * frame.heads + before + head if",
            "tests/blocks/test_set_operations.py",
        ),
        (
            "blocks/set_operations.py",
            "counts = in_edge[edge_kinds(found.keys, frame)]",
            "counts = in_edge[0 * found.keys]",
            "tests/blocks/test_set_operations.py",
        ),
        (
            "blocks/set_operations.py",
            "stays[found.keys[is_full]] = False",
            "stays[found.keys] = False",
            "tests/blocks/test_block_list.py",
        ),
        (
            "blocks/reindexing.py",
            "codes = position % block_q * block_q + token % block_q",
            "codes = token % block_q * block_q + position % block_q",
            "tests/blocks/test_reindexing.py -k 'shifting or permuting or crops'",
        ),
        (
            "blocks/reindexing.py",
            "(first <= col) & (col < stop)",
            "(first <= col) & (col <= stop)",
            "tests/blocks/test_reindexing.py -k 'shifting or permuting or crops'",
        ),
        (
            "blocks/reindexing.py",
            "min(stop * block_kv, frame.kv_len) - first * block_kv",
            "(stop - first) * block_kv",
            "tests/blocks/test_reindexing.py -k 'shifting or permuting or crops'",
            "keys beyond the crop are never read, whatever kv_len the frame has",
        ),
    ),
    "plan": _of(
        PACKAGE,
        (
            "kernels/triton/packed_plan.py",
            "b_position = b_end - (b_q_end - o_q)",
            "b_position = b_first + (b_q_end - o_q)",
            PACKED,
        ),
        (
            "kernels/triton/packed_plan.py",
            "tl.minimum(column + n_after + 1, q_tiles)",
            "tl.minimum(column + n_after, q_tiles)",
            PACKED,
        ),
        (
            "kernels/triton/packed_plan.py",
            "m_row = i_row * TILE + o_row < q_len",
            "m_row = i_row * TILE + o_row <= q_len",
            PACKED,
        ),
        (
            "kernels/triton/packed_plan.py",
            "first_bits(b_stop[:, None] - b_key) & ~",
            "first_bits(b_stop[:, None] - b_key) | ~",
            PACKED,
        ),
        (
            "kernels/triton/packed_plan.py",
            "(b_end - b_begin <= longest)",
            "(b_end - b_begin <= longest + 1)",
            PACKED,
        ),
        (
            "kernels/triton/packed_plan.py",
            "is_past = tl.load(starts_ptr + middle * (n_runs + 1) + run) > column",
            "is_past = tl.load(starts_ptr + middle * (n_runs + 1) + run) >= column",
            PACKED,
        ),
        (
            "plan/packed_builder.py",
            "return left + 2 + (",
            "return left + 1 + (",
            PACKED,
        ),
        (
            "plan/packed_builder.py",
            "most = 1 + sum(",
            "most = sum(",
            PACKED,
        ),
        (
            "packed.py",
            "position = cu_kv[ends] - (cu_q[ends] - q_pos)",
            "position = cu_kv[document] + (q_pos - cu_q[document])",
            "tests/masks/test_documents.py",
        ),
        # on the host
        (
            "plan/host_builder.py",
            "edge = 2 * (q_is_ragged",
            "edge = 1 * (q_is_ragged",
            "tests/plan/test_host_builder.py",
        ),
        ("plan/host_builder.py", "rank[partial] -= 1", "rank[partial] -= 0", "tests/plan/test_host_builder.py"),
        (
            "plan/host_builder.py",
            "begin[n_of_rows:] -= begin[n_of_rows] if n_of_rows < len(work) else 0",
            "begin[n_of_rows:] -= 0",
            "tests/plan/test_host_builder.py",
        ),
        (
            "plan/host_builder.py",
            "is_long = work * work.size > 2 * n_tiles",
            "is_long = work * work.size >= 2 * n_tiles",
            "tests/plan/test_host_builder.py",
        ),
        (
            "plan/host_builder.py",
            "int(is_long.sum(axis=1).max()), work.shape[1] - 1)",
            "int(is_long.sum(axis=1).max()), work.shape[1])",
            "tests/plan/test_host_builder.py",
        ),
        (
            "plan/host_builder.py",
            "range(16, (limit - 1).bit_length(), 16)",
            "range(32, (limit - 1).bit_length(), 16)",
            "tests/plan/test_host_builder.py",
        ),
        (
            "plan/host_builder.py",
            "(length % frame.block_size[0] != 0",
            "(length % TILE != 0",
            "tests/plan/test_host_builder.py",
        ),
        (
            "plan_format.py",
            "n_indices + 8 * (n_split +",
            "n_indices + 8 * (min(n_split, 1) +",
            "tests/plan/test_host_builder.py",
        ),
        (
            "plan_format.py",
            "// 8 % SPLIT_SHARE",
            "// 8",
            "tests/plan/test_host_builder.py",
        ),
        (
            "plan/host_builder.py",
            "(side - 1 + frame.kv_len - frame.q_len) // side",
            "(frame.kv_len - frame.q_len) // side",
            "tests/plan/test_host_builder.py",
        ),
        (
            "plan/host_builder.py",
            "(last - row).max()",
            "(last - row).min()",
            "tests/plan/test_host_builder.py",
        ),
        (
            "plan/host_builder.py",
            "(n_cols * np.arange(batch_heads)).repeat",
            "(frame.n_rows * np.arange(batch_heads)).repeat",
            "tests/plan/test_host_builder.py",
        ),
        (
            "plan/tile_choice.py",
            "return FINE_TILE if fine <= 1 else TILE",
            "return FINE_TILE if fine >= 1 else TILE",
            "tests/plan/test_tile_choice.py",
        ),
        (
            "plan/tile_choice.py",
            "len(rows.bitmasks) + edge_kinds(keys, frame)",
            "len(rows.bitmasks)",
            "tests/plan/test_tile_choice.py",
        ),
        (
            "plan/tile_choice.py",
            "kinds = (every, (every[0], exists[1]), (exists[0], every[1]), exists)",
            "kinds = (every, (exists[0], every[1]), (every[0], exists[1]), exists)",
            "tests/plan/test_tile_choice.py",
        ),
        (
            "plan/tile_choice.py",
            "(batch_heads[block] * tiled.n_rows + row)",
            "(batch_heads[block] + row)",
            "tests/plan/test_tile_choice.py",
        ),
        (
            "plan/tile_choice.py",
            "not len(rows.bitmasks) and _tiled_by(frame, (TILE, TILE))",
            "_tiled_by(frame, (TILE, TILE))",
            "tests/plan/test_tile_choice.py",
        ),
        # another order of tokens
        (
            "plan/reordering.py",
            "yield best[0], np.where(is_read[best[1]], best[1], NONE)",
            "yield best",
            f"{REORDERED} may_hold_nan",
        ),
        ("plan/reordering.py", "(read & ~words).any(axis=1)", "(read & words).any(axis=1)", ORDERS),
        ("plan/reordering.py", "step // far))", "step))", ORDERS),
        ("plan/reordering.py", "2 * counts.max() < len(steps)", "2 * counts.max() > len(steps)", ORDERS),
        (
            "plan/reordering.py",
            "- group * size * frame.blocks_per_batch_head",
            "- group * frame.blocks_per_batch_head",
            f"{REORDERED} same_pairs",
        ),
        (
            "plan/layout_plans.py",
            "layout = self._causal() if causal else self",
            "layout = self",
            f"{REORDERED} same_pairs",
        ),
        ("plan/layout_plans.py", '1 if self._cache["axes"][1] == 1 else kv_heads', "1", f"{REORDERED} same_pairs"),
        (
            "dispatch.py",
            "(has_dropout or has_kv_lengths or has_positions)",
            "(has_dropout or has_kv_lengths)",
            f"{REORDERED} keep_the_order",
        ),
        (
            "gathering.py",
            "_launch(grad, inverse, order) if",
            "_launch(grad, order, order) if",
            f"{REORDERED} missing_or_expanded",
        ),
        (
            "functional.py",
            "TokenOrder(by_q.inverse, by_q.order)",
            "TokenOrder(by_q.order, by_q.order)",
            f"{REORDERED} 'accurate and has_sinks and 128'",
        ),
        (
            "explanation/memory.py",
            "reads += own if name in copied else ordered",
            "reads += own",
            f"{REORDERED} explain",
        ),
        ("kernels/triton/gather_tokens.py", "o_from >= 0", "o_from > 0", "tests/kernels/triton/test_gather_tokens.py"),
        (
            "kernels/triton/gather_tokens.py",
            "i_head // heads_of_order",
            "i_head % heads_of_order",
            "tests/kernels/triton/test_gather_tokens.py",
        ),
        (
            "dispatch.py",
            "any(side % TILE for side in bias_blocks)",
            "all(side % TILE for side in bias_blocks)",
            "tests/test_dispatch.py -k 'hopper_refuses or traced_calls'",
        ),
        (
            "explanation/advice.py",
            "if call.has_bias_gradient:",
            "if False:",
            "tests/explanation/test_explanation.py -k advice",
        ),
        (
            "dispatch.py",
            "max(head_dim, v_dim) <= MAX_FINE_HEAD_DIM and not has_block_bias",
            "head_dim <= MAX_FINE_HEAD_DIM and not has_block_bias",
            "tests/plan/test_tile_choice.py",
        ),
        (
            "plan/tile_choice.py",
            "(FINE_TILE, GATHERED_TILE), (GATHERED_TILE, FINE_TILE)",
            "(FINE_TILE, GATHERED_TILE), (FINE_TILE, GATHERED_TILE)",
            "tests/plan/test_tile_choice.py",
        ),
        (
            "plan/tile_choice.py",
            "if gathered < min(fine, 1.0):",
            "if gathered < fine:",
            "tests/plan/test_tile_choice.py",
        ),
        (
            "dispatch.py",
            "None if tile in (GATHERED_TILE, BY_KEY_BLOCK) else _too_small",
            "None if tile not in (GATHERED_TILE, BY_KEY_BLOCK) else _too_small",
            "tests/test_dispatch.py",
        ),
        *(
            ("plan/gathered_builder.py", old, new, "tests/plan/test_gathered_builder.py")
            for old, new in [
                ("is_partial = (ids != FULL) | (kinds > 0)", "is_partial = ids != FULL"),
                ("np.uint32(0x10001)", "np.uint32(0x10000)"),
                ("side.ids + first * (side.ids > 0)", "side.ids + first"),
                ("(np.cumsum(steps) - steps) + n_empty", "(np.cumsum(steps) - steps)"),
                ("n_full < TILES_PER_STEP", "n_full < 1"),
                ("begins.sum() <= GATHERED_STEP", "begins.sum() >= GATHERED_STEP"),
                ("(n_empty + np.bincount(line[is_partial]", "(np.bincount(line[is_partial]"),
            ]
        ),
        # on the device, by kernels
        ("kernels/triton/plan_builder.py", "behind < TILE - 1", "behind < TILE", BY_INDEX),
        (
            "kernels/triton/plan_builder.py",
            "(last_q // ROWS_PER_TOKEN + ahead",
            "(last_q // ROWS_PER_TOKEN + ahead - 1",
            BY_INDEX,
        ),
        ("kernels/triton/plan_builder.py", "o_row * TILE // ROWS_PER_TOKEN", "o_row * TILE", BY_TOKEN),
        ("kernels/triton/plan_builder.py", "b_query // ROWS_PER_TOKEN +", "b_query +", BY_TOKEN),
        ("kernels/triton/plan_builder.py", "b_q // ROWS_PER_TOKEN +", "b_q +", BY_TOKEN),
        ("kernels/triton/block_selection.py", "counts_ptr + n_lines - 1", "counts_ptr + n_lines - 2", BY_TOKEN),
        (
            "kernels/triton/plan_builder.py",
            "(o_other[None, :] < o_line[:, None])",
            "(o_other[None, :] > o_line[:, None])",
            BY_INDEX,
        ),
        (
            "kernels/triton/plan_builder.py",
            "tl.minimum(n_long, n_major - 1)",
            "tl.minimum(n_long, n_major)",
            "tests/kernels/triton/test_block_selection.py -k one_line_of_a_head",
        ),
        ("kernels/triton/plan_builder.py", "- TOKENS * (b_diagonal - STEPS)", "- TOKENS * b_diagonal", BY_INDEX),
        (
            "kernels/triton/plan_builder.py",
            "b_next_partial += tl.sum(b_is_partial, 1)",
            "b_next_partial += tl.sum(b_stored, 1)",
            "tests/kernels/triton/test_block_selection.py -k many_iterations",
        ),
        (
            "kernels/triton/plan_builder.py",
            "(b_bits & 0xFFFF) | (b_high << 16)",
            "b_bits",
            "tests/kernels/triton/test_block_selection.py -k fine_plans",
        ),
        # selection: kernels, operations
        (
            "kernels/triton/block_selection.py",
            "(o_col * block_kv <= last_kv)",
            "(o_col * block_kv < last_kv)",
            BY_SCORE,
        ),
        ("kernels/triton/block_selection.py", "(b_place <= k - n_above)", "(b_place < k - n_above)", BY_SCORE),
        (
            "kernels/triton/block_selection.py",
            "b_key ^ ((b_key >> 31) & 0x7FFFFFFF)",
            "b_key ^ ((b_key >> 31) & 0)",
            BY_SCORE,
        ),
        (
            "kernels/triton/block_selection.py",
            "(b_col >= 0) & (b_col < n_cols)",
            "(b_col >= 0) & (b_col <= n_cols)",
            "tests/kernels/triton/test_block_selection.py -k out_of_range",
        ),
        ("plan/block_selection.py", "first = ahead + block_q - 1", "first = ahead + block_q", OPERATIONS),
        ("plan/block_selection.py", "(cols[:, 1:] != cols[:, :-1])", "(cols[:, 1:] >= cols[:, :-1])", OPERATIONS),
        ("plan/block_selection.py", "indptr[1:, 0] = indptr[:-1, -1]", "indptr[1:, 0] = indptr[:-1, 0]", OPERATIONS),
        (
            "plan/block_selection.py",
            "row % blocks_per_tile[0] * blocks_per_tile[1] + col",
            "row % blocks_per_tile[0] * blocks_per_tile[0] + col",
            OPERATIONS,
        ),
        ("plan/block_selection.py", "- self.tokens * (diagonal - self.steps)", "- self.tokens * diagonal", OPERATIONS),
        ("plan/block_selection.py", "unit = min(32, self.sides[1])", "unit = 32", OPERATIONS),
        ("plan/block_selection.py", "for least in (tile - 1, 0):", "for least in (tile, 0):", BY_INDEX),
        # plans by key block: operations, kernels, sizes of launches, the choice
        *(
            (file, old, new, "tests/kernels/hopper/test_selected.py -k plans_by_key_block")
            for file, old, new in [
                ("dispatch.py", "v_dim) <= MAX_FINE_HEAD_DIM and not has_options", "1) <= MAX_FINE_HEAD_DIM"),
                ("dispatch.py", 'backend in ("hopper", "auto")', 'backend in ("hopper", "triton")'),
                ("plan/layout_plans.py", "self._frame[:2] != tuple(batch_heads)", "self._frame[:1] != batch_heads[:1]"),
            ]
        ),
        *(
            ("plan/selected_builder.py", old, new, BY_KEY_BLOCK)
            for old, new in [
                ("(last_token_stop > key_start) &", "(last_token_stop >= key_start) &"),
                ("& (first_token_start < key_stop)", "& (first_token_start <= key_stop)"),
                ("(last_token_start <= key_start)", "(last_token_start < key_start)"),
                ("(first_token_stop >= key_stop)", "(first_token_stop > key_stop)"),
                ("has_keys = last_token_stop > first_token_start", "has_keys = last_token_stop > 0"),
                ("first_token + (tokens - 1)", "first_token + tokens"),
                ("(batch_head // heads).clamp_", "(batch_head % heads).clamp_"),
                ("torch.arange(kv_len - n_tokens + 1, kv_len + 1,", "torch.arange(kv_len - n_tokens, kv_len,"),
                ("(key_block[:, None] * subblocks + i_sub)", "(key_block[:, None] * subblocks + i_sub // 2)"),
                (
                    "first_batch_head = i_round * query_blocks_per_round // n_query_blocks",
                    "first_batch_head = i_round * (query_blocks_per_round // n_query_blocks)",
                ),
                (
                    "(batch_head - first_batch_head)) * n_key_blocks + key_block",
                    "(batch_head - first_batch_head)) * n_key_blocks + n_key_blocks - 1 - key_block",
                ),
                ("+ (max_item_blocks - 1)) // max_item_blocks", "+ max_item_blocks) // max_item_blocks"),
                (
                    "batch_head = round_of_item * query_blocks_per_round // n_query_blocks + within",
                    "batch_head = first_batch_head[0] + within",
                ),
                ("(block - PARTIAL * (~is_full)", "(block - PARTIAL * is_full"),
                (
                    "has_sides and n_selected > 0 and n_query_blocks < PARTIAL",
                    "has_sides and n_selected > 0 and n_query_blocks <= PARTIAL",
                ),
                ("kv_len >= MIN_KEYS_RATIO * n_selected * keys", "kv_len > MIN_KEYS_RATIO * n_selected * keys"),
            ]
        ),
        *(
            ("kernels/triton/selected_plan.py", old, new, BY_KEY_BLOCK)
            for old, new in [
                ("(last_token_stop > key_start)", "(last_token_stop >= key_start)"),
                ("(first_token_start < key_stop)", "(first_token_start <= key_stop)"),
                ("(last_token_start <= key_start)", "(last_token_start < key_start)"),
                ("first_token + (TOKENS - 1), n_tokens - 1", "first_token + TOKENS, n_tokens - 1"),
                ("batch_head // heads * range_batch_stride", "batch_head % heads * range_batch_stride"),
                ("(kv_len - n_tokens + 1), 0", "(kv_len - n_tokens), 0"),
                ("(i_batch * 3 + 1) * n_tokens", "(i_batch * 3) * n_tokens"),
                (
                    "first_batch_head = i_round * query_blocks_per_round // n_query_blocks",
                    "first_batch_head = i_round * (query_blocks_per_round // n_query_blocks)",
                ),
                ("b_key_block = b_index * SUBBLOCKS + i_sub", "b_key_block = b_index * SUBBLOCKS"),
                ("end = lower_bound(lists_ptr, i_list + 1,", "end = lower_bound(lists_ptr, i_list + 2,"),
                ("tl.static_range(STEPS + 1)", "tl.static_range(STEPS - 1)"),
                ("begin + i * MAX_ITEM_BLOCKS", "begin + i * (MAX_ITEM_BLOCKS - 1)"),
                ("tl.minimum(b_begin + MAX_ITEM_BLOCKS, end)", "b_begin + MAX_ITEM_BLOCKS"),
                (
                    "i_round * query_blocks_per_round // n_query_blocks + i_within // n_key_blocks",
                    "i_round * query_blocks_per_round // n_query_blocks",
                ),
            ]
        ),
        *(
            ("plan_format.py", old, new, BY_KEY_BLOCK)
            for old, new in [
                (
                    "(self.query_blocks_per_round - 1) // self.n_query_blocks + 2)",
                    "(self.query_blocks_per_round - 1) // self.n_query_blocks + 1)",
                ),
                ("self.lists_per_round + self.max_slots", "self.lists_per_round // 2 + self.max_slots"),
                (
                    "self.query_blocks_per_round * self.max_key_blocks",
                    "(self.query_blocks_per_round - 1) * self.max_key_blocks",
                ),
                (
                    "Round(i, i * blocks, i * lists, (i + 1) * lists)",
                    "Round(i, i, i * lists, (i + 1) * lists)",
                ),
            ]
        ),
        # rows of query blocks: heads of a token, or queries of a head
        *(
            ("kernels/selected_shapes.py", old, new, "tests/kernels/hopper/test_selected.py -k 'accurate and many'")
            for old, new in [
                ("return batch, head, self.query_rows * query, query", "return batch, head, query, query"),
                ("return batch, self.query_rows * head, query, head", "return batch, head, query, head"),
                (
                    "RowLayout(heads // rows, rows, queries * rows, True)",
                    "RowLayout(heads // rows, rows, queries, True)",
                ),
                (
                    "RowLayout(heads // rows, rows, queries * rows, True)",
                    "RowLayout(heads, rows, queries * rows, True)",
                ),
            ]
        ),
        *(
            ("selection.py", old, new, "tests/kernels/hopper/test_selected.py -k in_place")
            for old, new in [
                ("group == rows_per_token and query_block_size == 1", "query_block_size == 1"),
                ("group == rows_per_token and query_block_size == 1", "group == rows_per_token"),
                ("v_cast = (tensor.to(dtype) for", "v_cast = (tensor.to(q.dtype) for"),
                ("if group == rows_per_token", "if False and group == rows_per_token"),
            ]
        ),
    ),
    "eager": _of(
        f"{PACKAGE}/kernels",
        (
            "eager/attention.py",
            "head_idx // (sizes.heads // sizes.kv_heads)",
            "head_idx % sizes.kv_heads",
            "tests/kernels/eager/test_attention.py",
        ),
        (
            "eager/attention.py",
            "(batch_idx * sizes.heads + head_idx) * sizes.n_rows",
            "(head_idx * sizes.batch + batch_idx) * sizes.n_rows",
            "tests/kernels/eager/test_attention.py",
        ),
        (
            "eager/attention.py",
            "(row * TILE + offset + 1) // TILE",
            "(row * TILE + offset + 2) // TILE",
            "tests/kernels/eager/test_attention.py",
        ),
        (
            "eager/attention.py",
            "(last_query + offset) // TILE + 1)",
            "(last_query + offset - 1) // TILE + 1)",
            "tests/kernels/eager/test_attention.py",
        ),
        (
            "eager/attention.py",
            ": TILE * n_partial] <= diagonal",
            ": TILE * n_partial] < diagonal",
            "tests/kernels/eager/test_attention.py",
        ),
        (
            "eager/attention.py",
            "kv_pos < self.kv_lengths[batch_idx]",
            "kv_pos <= self.kv_lengths[batch_idx]",
            "tests/kernels/eager/test_attention.py",
        ),
        ("eager/attention.py", "delta = delta - dlse", "delta = delta + dlse", "tests/kernels/eager/test_attention.py"),
        (
            "eager/attention.py",
            "dscores.sub_(delta_chunk)",
            "dscores.sub_(0 * delta_chunk)",
            "tests/kernels/eager/test_attention.py",
        ),
        (
            "eager/attention.py",
            "b.total.mul_(decay_b).addcmul_(a.total, decay_a)",
            "b.total.mul_(decay_b).add_(a.total)",
            "tests/kernels/eager/test_attention.py",
        ),
        (
            "eager/attention.py",
            "1 / philox.kept_share(self.dropout_p)",
            "1 / (1 - self.dropout_p)",
            "tests/kernels/eager/test_attention.py",
        ),
        (
            "eager/attention.py",
            "device=tensor.device) >= kv_lengths[:, None]",
            "device=tensor.device) > kv_lengths[:, None]",
            "tests/kernels/eager/test_attention.py",
        ),
        (
            "eager/attention.py",
            "highest = sinks[index // sizes.n_rows % sizes.heads]",
            "highest = sinks[index % sizes.heads]",
            "tests/test_score_mods.py -k eager",
        ),
        (
            "eager/attention.py",
            "diagonal = q_pos + (sizes.kv_len - sizes.q_len)",
            "diagonal = q_pos",
            "tests/test_score_mods.py -k eager",
        ),
        (
            "eager/attention.py",
            "dscores.view(span.shape).mul_(span.keep)",
            "dscores.view(span.shape).mul_(1)",
            "tests/kernels/eager/test_attention.py",
        ),
        (
            "eager/score_mods.py",
            "head_idx[:, :, None] % n_heads",
            "batch_idx[:, :, None] % n_heads",
            PAIRS_EAGER,
        ),
        (
            "eager/score_mods.py",
            "(scores.dtype), LOWEST_BIAS, -torch.inf)",
            "(scores.dtype), 2 * LOWEST_BIAS, -torch.inf)",
            PAIRS_EAGER,
        ),
    ),
    "kernels": _of(
        f"{PACKAGE}/kernels",
        *(
            ("triton/merge_selected.py", old, new, MERGED)
            for old, new in [
                ("first_query_block + first_query_block // n_query_blocks)", "first_query_block)"),
                ("for i_entry in tl.range(begin, end,", "for i_entry in tl.range(begin, end - 1,"),
                (
                    "is_used = tl.load(key_blocks_ptr + i_entry) >= 0",
                    "is_used = tl.load(key_blocks_ptr + i_entry) >= -1",
                ),
                ("b_out * b_decay[:, None] +", "b_out +"),
                ("b_sum = b_sum * b_decay + b_weight", "b_sum = b_sum + b_weight"),
                ("(b_out / b_sum[:, None])", "b_out"),
                ('float("-inf"), log_sum(b_max, b_sum)', "0.0, log_sum(b_max, b_sum)"),
                ("to(tl.int64) * strides[2]", "to(tl.int64) * strides[3]"),
                ("to(tl.int64) * strides[3]", "to(tl.int64) * strides[2]"),
                ("is_query = i_block * BLOCK_ROWS + o_row < n_queries", "is_query = o_row >= 0"),
                (
                    "tl.range(begin * KEY_SPLITS, end * KEY_SPLITS,",
                    "tl.range(begin * KEY_SPLITS, end * KEY_SPLITS - 1,",
                ),
                (
                    "tl.load(key_blocks_ptr + i_partial // KEY_SPLITS) >= 0",
                    "tl.load(key_blocks_ptr + i_partial // KEY_SPLITS) >= -1",
                ),
                ("(i_partial - first_entry * KEY_SPLITS)", "(i_partial - first_entry)"),
                ("(i_list >= first_list) &", "(i_list >= 0) &"),
                ("& (i_list < end_list)", "& (i_list <= end_list)"),
                ("n_items > 0 or not ADD", "n_items > 1 or not ADD"),
                ("for i_item in tl.range(0, end - begin):", "for i_item in tl.range(1, end - begin):"),
                ("(begin - first_item + i_item)", "(begin + i_item)"),
                ("o_dim[None, :]) * scale", "o_dim[None, :])"),
                ("p_partial + KEYS * DIM + o_row", "p_partial + o_row"),
                ("first_batch_head = first_query_block // n_query_blocks", "first_batch_head = 0"),
            ]
        ),
        (
            "triton/forward.py",
            "i_kv_head = i_head // C.GROUP",
            "i_kv_head = i_head % (n_heads // C.GROUP)",
            GROUPS,
        ),
        (
            "triton/forward.py",
            "NUMBER) * C.TILE + i_split",
            "NUMBER) * 128 + i_split",
            "tests/test_zoo.py -k smaller_tiles",
        ),
        (
            "triton/tile.py",
            "load_words(p_words, o_q * (TILE // 32) + i_word)",
            "load_words(p_words, o_q * 4 + i_word)",
            "tests/test_zoo.py -k smaller_tiles",
        ),
        ("triton/tile.py", "b_sum = b_sum * b_decay + tl.sum(b_p, 1)", "b_sum = b_sum + tl.sum(b_p, 1)", DENSE),
        ("triton/tile.py", "b_sum, b_out * b_decay[:, None]", "b_sum, b_out", DENSE),
        ("triton/forward.py", "if LIMITED and HAS_LAYOUT:", "if False:", LENGTHS),
        ("triton/tile.py", "tl.load(kv_lengths_ptr + i_batch)", "tl.load(kv_lengths_ptr)", LENGTHS),
        ("triton/forward.py", "(keep_scale / b_sum)[:, None]", "(1.0 / b_sum)[:, None]", _zoo("global-float32")),
        (
            "triton/tile.py",
            'tl.where(b_sink == float("-inf"), 0.0, 1.0)',
            'tl.where(b_sink == float("-inf"), 1.0, 1.0)',
            "tests/test_score_mods.py -k triton",
        ),
        (
            "triton/tile.py",
            "n_full = tl.maximum(tl.minimum(diagonal, limit), 0)",
            "n_full = tl.maximum(tl.minimum(diagonal + 1, limit), 0)",
            DIAGONAL,
        ),
        (
            "triton/tile.py",
            "tl.minimum(diagonal + BLOCK_Q - 1, limit)",
            "tl.minimum(diagonal + BLOCK_Q - 2, limit)",
            DIAGONAL,
        ),
        (
            "triton/tile.py",
            "full = tl.cdiv(tl.maximum(kv_start + BLOCK_KV - 1 - (kv_len - q_len), 0), BLOCK_Q)",
            "full = tl.maximum(kv_start + BLOCK_KV - 1 - (kv_len - q_len), 0) // BLOCK_Q",
            DIAGONAL,
        ),
        (
            "triton/tile.py",
            "first = tl.maximum(kv_start - (kv_len - q_len), 0) // BLOCK_Q",
            "first = tl.cdiv(tl.maximum(kv_start - (kv_len - q_len), 0), BLOCK_Q)",
            DIAGONAL,
        ),
        ("triton/tile.py", "(o_kv <= o_q + (kv_len - q_len))", "(o_kv < o_q + (kv_len - q_len))", DIAGONAL),
        (
            "triton/tile.py",
            "return ((b_bits >> (o_col % 32)[None, :]) & 1) != 0",
            "return ((b_bits >> (31 - o_col % 32)[None, :]) & 1) != 0",
            GROUPS,
        ),
        (
            "triton/tile.py",
            "o_word = (q_start + tl.arange(0, ROWS)) * (TILE // 32)",
            "o_word = tl.arange(0, ROWS) * (TILE // 32)",
            GROUPS,
        ),
        (
            "triton/tile.py",
            "permute(0, 5, 1, 2, 7, 6, 4, 3)",
            "permute(0, 5, 1, 2, 6, 7, 4, 3)",
            DROPOUT,
        ),
        ("triton/tile.py", "(o_row // 8 % 4 * VALUE", "(o_row // 8 % 2 * VALUE", DROPOUT),
        ("triton/tile.py", "(kv_start // 32 % 2 * (2 *", "(kv_start // 32 % 2 * (1 *", _zoo("global-float32")),
        (
            "triton/tile.py",
            "(batch_head % n_heads * GROUP)",
            "(batch_head % n_heads)",
            "tests/kernels/triton/test_combine_splits.py -k columns_are_added",
        ),
        (
            "triton/tile.py",
            "i_split * size + tl.minimum(i_split, n_larger)",
            "i_split * size",
            "tests/kernels/triton/test_split_kv.py -k test_any_number_of_queries",
        ),
        ("triton/tile.py", "(b_new - b_sum) - b_step", "b_step - (b_new - b_sum)", "tests/kernels/triton/test_tile.py"),
        (
            "triton/tile.py",
            "tl.load(p_head + i_line * RECORD + POSITION)",
            "tl.load(p_head + i_line * RECORD)",
            GROUPS,
        ),
        (
            "triton/backward_kernels.py",
            "i_head = i_kv_head * C.GROUP + i_member",
            "i_head = i_member * sizes.n_heads + i_kv_head",
            GROUPS,
        ),
        (
            "triton/backward_kernels.py",
            "b_dk, b_dv = b_dk * factors.keep_scale, b_dv * factors.keep_scale",
            "b_dk, b_dv = b_dk * factors.keep_scale, b_dv",
            DROPOUT,
        ),
        ("triton/backward_preprocess.py", "b_delta *= kept_share", "pass", DROPOUT),
        ("triton/backward.py", "delta = delta / philox.kept_share(dropout_p)", "pass", DROPOUT),
        ("triton/pair_bias_gradient.py", "b_sum *= keep_scale", "pass", DROPOUT),
        ("triton/backward_kernels.py", "b_dslope = b_dslope * factors.keep_scale", "pass", DROPOUT),
        ("triton/backward_kernels.py", "b_ds * factors.keep_scale if C.DROPOUT else b_ds", "b_ds", DROPOUT),
        ("triton/backward_kernels.py", "b_ds = b_p * (b_dp - b_delta[None, :])", "b_ds = b_p * b_dp", DENSE),
        ("triton/backward_kernels.py", "b_ds = b_p * (b_dp - b_delta[:, None])", "b_ds = b_p * b_dp", DENSE),
        (
            "triton/backward_kernels.py",
            "b_p = tl.where(m_kv[:, None], b_p, 0.0)",
            "b_p = tl.where(m_kv[:, None], b_p, b_p)",
            LENGTHS,
        ),
        (
            "triton/backward_kernels.py",
            "i_batch, i_head, kv_start // C.TILE)",
            "i_batch, i_kv_head, kv_start // C.TILE)",
            GROUPS,
        ),
        (
            "triton/backward_kernels.py",
            "b_dslope -= tl.sum(",
            "b_dslope += tl.sum(",
            _zoo("one-head-float16-mha-32-causal-has_slopes"),
        ),
        ("triton/backward_preprocess.py", "b_delta -= tl.where(b_lse", "b_delta += tl.where(b_lse", DENSE),
        (
            "triton/split_kv.py",
            "(o_kv[None, :] <= o_q[:, None] + (kv_len - q_len))",
            "(o_kv[None, :] < o_q[:, None] + (kv_len - q_len))",
            DECODED,
        ),
        (
            "triton/split_kv.py",
            "o_q // C.CELL_Q * (C.TILE // C.CELL_KV)",
            "o_q // C.CELL_Q * (C.TILE // C.CELL_Q)",
            "tests/kernels/triton/test_split_kv.py -k split_rows",
        ),
        (
            "triton/combine_splits.py",
            "b_out = b_out * b_decay + tl.sum(b_split",
            "b_out = b_out + tl.sum(b_split",
            "tests/kernels/triton/test_split_kv.py -k merged_by_weight",
        ),
        (
            "triton/combine_splits.py",
            "i_tile = n_lines - 1 - i_line // n_batch_heads",
            "i_tile = i_line // n_batch_heads",
            "tests/kernels/triton/test_combine_splits.py -k rows_are_merged",
        ),
        (
            "triton/combine_splits.py",
            "tl.load(p_split + SIDE * DIM + o_row[:, None]",
            "tl.load(p_split + SIDE * DIM_V + o_row[:, None]",
            "tests/kernels/triton/test_combine_splits.py -k columns_are_added",
        ),
        (
            "triton/score_mods.py",
            "p_table, kv_start % TILE, q_start % TILE, 1, TILE // CELL_KV, BLOCK_KV, CELL_KV, BLOCK_Q, CELL_Q",
            "p_table, kv_start % TILE, q_start % TILE, 1, TILE // CELL_Q, BLOCK_KV, CELL_KV, BLOCK_Q, CELL_Q",
            _zoo("blocks-of-64x32-float16"),
        ),
        (
            "triton/score_mods.py",
            "p_sums += q_start % TILE // GRAIN_Q * (TILE // GRAIN_KV)",
            "p_sums += q_start % TILE // GRAIN_Q * (TILE // GRAIN_Q)",
            _zoo("blocks-of-64x32-float16", "blocks-of-48-float32"),
        ),
        (
            "triton/score_mods.py",
            "q_start + ahead - kv_start, BLOCK_KV, TRANSPOSED)",
            "q_start - kv_start, BLOCK_KV, TRANSPOSED)",
            _zoo("causal-wide-float16"),
        ),
        (
            "triton/score_mods.py",
            "i_head.to(tl.int64) * strides.pair_head",
            "i_batch.to(tl.int64) * strides.pair_head",
            PAIRS,
        ),
        ("triton/pair_bias_gradient.py", "b_sum += b_p *", "b_sum = b_p *", PAIRS),
        ("triton/pair_bias_gradient.py", "first_head + i_member % heads", "first_head + i_member // heads", PAIRS),
        (
            "triton/pair_bias_gradient.py",
            "found = tl.where((b_col == i_col) & (o_tile < n_tiles)",
            "found = tl.where((b_col == i_col)",
            _zoo("random-blocks-float32-mha-32-pairs", "blocks-of-48x80-float32-mha-16"),
        ),
    ),
    "interop": _of(
        f"{PACKAGE}/interop",
        (
            "cudnn.py",
            "place < q2k_block_nums[..., None]",
            "place <= q2k_block_nums[..., None]",
            "tests/interop/test_cudnn.py",
        ),
        (
            "cudnn.py",
            "sizes[-1] = layout.kv_len % side",
            "sizes[0] = layout.kv_len % side",
            "tests/interop/test_cudnn.py",
        ),
        (
            "flashmask.py",
            "np.minimum(array, min(q_len, np.iinfo(array.dtype).max)).astype",
            "array.astype",
            "tests/interop/test_key_runs.py -k flashmask",
        ),
        (
            "flashmask.py",
            "is_suffix = end == q_len",
            "is_suffix = end >= q_len - 1",
            "tests/interop/test_key_runs.py -k flashmask",
        ),
        (
            "flashmask.py",
            "[columns[0], end], [zero, columns[1]]",
            "[columns[1], end], [zero, columns[0]]",
            "tests/interop/test_key_runs.py -k flashmask",
        ),
        (
            "flashmask.py",
            "bounds = np.repeat(bounds, group, axis=1)",
            "bounds = np.tile(bounds, (1, group, 1, 1))",
            "tests/interop/test_key_runs.py -k flashmask",
        ),
        (
            "magi.py",
            "(q1[which] - 1 - lines)",
            "(q1[which] - lines)",
            "tests/interop/test_key_runs.py -k from_magi",
        ),
        (
            "kv_lists.py",
            "batch_step = heads * n_rows * n_cols",
            "batch_step = n_rows * n_cols",
            "tests/interop/test_kv_lists.py -k 'attention_and_back or taken_apart'",
        ),
        (
            "kv_lists.py",
            "(word >> (key % 32))",
            "(word >> (31 - key % 32))",
            "tests/interop/test_kv_lists.py -k 'attention_and_back or taken_apart'",
        ),
        (
            "kv_lists.py",
            "np.minimum(down, fine.n_rows - rows * down)",
            "np.full_like(rows, down)",
            "tests/interop/test_kv_lists.py -k 'attention_and_back or taken_apart'",
        ),
        (
            "block_masks.py",
            "(col >= ends - local) & (col < ends)",
            "(col > ends - local) & (col < ends)",
            "tests/interop/test_block_masks.py",
        ),
        (
            "block_masks.py",
            "q_pos + kv_len - q_len - kv_pos < locals_[head]",
            "q_pos + kv_len - q_len - kv_pos <= locals_[head]",
            "tests/interop/test_block_masks.py",
        ),
        (
            "block_masks.py",
            "-(-max(ahead, 0) // _MIT_BLOCK) + 1",
            "max(ahead, 0) // _MIT_BLOCK + 1",
            "tests/interop/test_block_masks.py",
        ),
        (
            "block_arrays.py",
            'layout.batch(batch).head(checks.position(head, layout.shape[1], "head", hint))',
            'layout.batch(batch).head(min(batch, checks.position(head, layout.shape[1], "head", hint)))',
            "tests/interop/test_bsr.py",
        ),
        (
            "bsr.py",
            "bits.reshape(n_queries, block_kv)[_query_by_query(rows, block_q)]",
            "bits.reshape(len(rows), block_q, block_kv)",
            "tests/interop/test_bsr.py",
        ),
        (
            "bsr.py",
            "begins[rows] * block_q + in_row",
            "begins[rows] * block_q + 0 * in_row",
            "tests/interop/test_bsr.py",
        ),
        (
            "attention_masks.py",
            "misplaced = (is_token[:, 1:] & ~is_token[:, :-1])",
            "misplaced = (is_token[:, 1:] & ~is_token[:, :1])",
            "tests/interop/test_attention_masks.py",
        ),
    ),
    "distributed": _of(
        PACKAGE,
        (
            "distributed/routing.py",
            "np.lexsort((tile, sender, receiver))",
            "np.lexsort((tile, receiver, sender))",
            "tests/distributed/test_routing.py",
            "a rank reads only the moves that it sends or that it receives, and their order is the same in both",
        ),
        (
            "distributed/routing.py",
            "return np.minimum(length - tiles * TILE, TILE)",
            "return np.full_like(tiles, TILE)",
            "tests/distributed/test_routing.py",
        ),
        (
            "distributed/routing.py",
            "tokens_by(found.sender[comes]",
            "tokens_by(found.receiver[comes]",
            "tests/distributed/test_routing.py",
        ),
        (
            "distributed/ownership.py",
            "np.bincount(rank[owner[tile] != rank]",
            "np.bincount(rank[owner[tile] >= rank]",
            "tests/distributed/test_ownership.py",
        ),
        (
            "distributed/ownership.py",
            "np.argsort(-work, kind=",
            "np.argsort(work, kind=",
            "tests/distributed/test_ownership.py",
        ),
        (
            "distributed/gather_scatter.py",
            "given = own if i_rank == rank else part",
            "given = part",
            "tests/kernels/triton/test_gather_scatter.py -k sum",
        ),
        (
            "distributed/gather_scatter.py",
            "torch.where((places >= 0)[:, None], found, otherwise)",
            "found",
            "tests/kernels/triton/test_gather_scatter.py -k 'sum or merged'",
        ),
        (
            "kernels/triton/gather_scatter.py",
            "b_lse = ((b_high << 16) | b_low)",
            "b_lse = ((b_low << 16) | b_high)",
            "tests/kernels/triton/test_gather_scatter.py -k merged",
        ),
        (
            "kernels/triton/gather_scatter.py",
            "b_out += b_share[:, None] * b_part.to(tl.float32)",
            "b_out += b_part.to(tl.float32)",
            "tests/kernels/triton/test_gather_scatter.py -k merged",
        ),
        ("merging.py", "pivot + divisor.log())", "divisor.log())", "tests/test_merging.py"),
        (
            "distributed/pass_kv.py",
            "AllToAll(back, keys.receive, keys.send, context.group)",
            "AllToAll(back.flip(0), keys.receive, keys.send, context.group)",
            RANKS,
        ),
        (
            "distributed/local_attention.py",
            "x.chunk(n_chunks, dim=1) if x.shape[1] > 1 else (x,) * n_chunks",
            "x.chunk(n_chunks, dim=1)[:1] * n_chunks if x.shape[1] > 1 else (x,) * n_chunks",
            RANKS,
        ),
        (
            "distributed/pass_kv.py",
            "gather_scatter.unpack(message.wait(), [k_all, v_all], self.slots, backend)",
            "gather_scatter.unpack(message.wait(), [k_all, v_all], self.slots.flip(0), backend)",
            RANKS,
        ),
        (
            "distributed/exchange_plan.py",
            "needs[row[mine & (owner[col] != rank)]] = True",
            "needs[row[mine & (owner[col] > rank)]] = True",
            RANKS,
        ),
        ("distributed/context_plan.py", "range(rank * share, (rank + 1) * share)", "range(rank, rank + share)", RANKS),
        (
            "distributed/exchange_plan.py",
            "np.append(row[owner[col] == rank], pass_q_rows[owner[pass_q_rows] == rank])",
            "row[owner[col] == rank]",
            RANKS,
        ),
        (
            "distributed/all_to_all.py",
            "batch (ranks heads) tokens dim -> ranks tokens batch heads dim",
            "batch (heads ranks) tokens dim -> ranks tokens batch heads dim",
            RANKS,
        ),
    ),
    "models": _of(
        PACKAGE,
        (
            "plan/block_bias.py",
            "of_head = batch_head % heads if batch_heads[1] > 1 else torch.zeros_like(batch_head)",
            "of_head = batch_head % heads",
            GATES,
        ),
        (
            "plan/block_bias.py",
            "of_batch = batch_head // heads if batch_heads[0] > 1",
            "of_batch = batch_head // batch if batch_heads[0] > 1",
            GATES,
        ),
        (
            "plan/layout_plans.py",
            "return values if is_used is None else torch.where(is_used, values, values.new_zeros(()))",
            "return values",
            GATES,
        ),
        (
            "nn/video_sparse.py",
            "min(k_blocks, scores.shape[3])",
            "min(k_blocks + 1, scores.shape[3])",
            "tests/nn/test_video_sparse.py",
        ),
        (
            "nn/video_sparse.py",
            "(pooled_q * q.shape[3] ** -0.5) @ pooled_k.mT",
            "pooled_q @ pooled_k.mT",
            "tests/nn/test_video_sparse.py",
        ),
        ("nn/video_sparse.py", "b (h group) n d", "b (group h) n d", "tests/nn/test_video_sparse.py"),
        (
            "nn/video_sparse.py",
            "x[:, :, whole:].mean(2",
            "x[:, :, whole - 1 :].mean(2",
            "tests/nn/test_video_sparse.py",
        ),
        (
            "nn/video_sparse.py",
            "positions = positions[self.order]",
            "positions = positions[self.place]",
            "tests/nn/test_video_sparse.py",
        ),
        (
            "nn/native_sparse.py",
            "kv_pos * stride + size - 1 <= q_pos",
            "kv_pos * stride + size <= q_pos",
            "tests/nn/test_native_sparse.py",
        ),
        (
            "nn/block_choice.py",
            "(col > own - always[1])",
            "(col >= own - always[1])",
            "tests/nn/test_native_sparse.py",
        ),
        ("nn/block_choice.py", "(per_key - 1, n_strides", "(0, n_strides", "tests/nn/test_native_sparse.py"),
        ("nn/block_choice.py", "range(1, per_key)", "range(per_key - 1)", "tests/nn/test_native_sparse.py"),
        ("nn/native_sparse.py", "window=(window - 1, 0)", "window=(window, 0)", "tests/nn/test_native_sparse.py"),
        (
            "nn/block_choice.py",
            "(col > own) |",
            "(col > own + 1) |",
            "tests/nn/test_mixture_of_blocks.py",
        ),
        (
            "nn/block_choice.py",
            " | (col < earliest)",
            "",
            "tests/nn/test_mixture_of_blocks.py",
        ),
        (
            "nn/block_choice.py",
            "masked_fill_(best.values == -torch.inf, -1)",
            "masked_fill_(best.values == torch.inf, -1)",
            "tests/nn/test_mixture_of_blocks.py",
        ),
        *(
            ("kernels/triton/block_choice.py", old, new, "tests/kernels/triton/test_block_choice.py")
            for old, new in (
                ("b_col > own - ALWAYS_LAST", "b_col >= own - ALWAYS_LAST"),
                ("b_col < earliest + ALWAYS_FIRST", "b_col <= earliest + ALWAYS_FIRST"),
                ("& (b_key >= earliest * PER_BLOCK)", ""),
                ("& (b_key < n_keys)", "& (b_key < n_keys - 1)"),
                ("i + 1, PER_KEY, PER_BLOCK", "i + 1, PER_BLOCK"),
                ("(b_bits >> 31) & 0x7FFFFFFF", "0"),
                ("(batch_head * n_rows_out + first_row + row)", "(batch_head * n_rows_out + row)"),
                ("own + 1, COLS", "own, COLS"),
                ("LOW_WORD - b_col.to(tl.int64)", "b_col.to(tl.int64)"),
            )
        ),
        *(
            ("kernels/triton/index_scores.py", old, new, "tests/nn/test_shared_index.py -k kernel_finds")
            for old, new in (
                ("first_block * SIDE + step * BLOCK_N", "first_block * SIDE"),
                ("* q_strides[0] + batch_head % n_heads", "* q_strides[0] + 0 * n_heads"),
                ("SIDE <= first + query_start + BLOCK_T - 1", "SIDE <= query_start + BLOCK_T - 1"),
                ("tl.maximum(b_best, tl.max", "(b_best * 0 + tl.max"),
                ("(batch_head * n_queries + o_query[:, None]) * n_blocks", "(o_query[:, None]) * n_blocks"),
            )
        ),
        *(
            ("kernels/triton/tile.py", old, new, "tests/test_zoo.py -k triton-dense")
            for old, new in (
                ("length * n_heads + batch_head % n_heads", "length * n_heads"),
                ("* HEAD_DIM, n_heads * HEAD_DIM", "* HEAD_DIM, HEAD_DIM"),
                ("to(tl.int64) * length * n_heads", "to(tl.int64) * length"),
            )
        ),
        (
            "kernels/triton/backward_preprocess.py",
            "o_q.to(tl.int64)[:, None] * out_strides[2]",
            "o_q.to(tl.int64)[:, None] * out_strides[1]",
            "tests/test_zoo.py -k triton-window",
        ),
        (
            "kernels/triton/merge_selected.py",
            "[:, None] * dv_strides[2]",
            "[:, None] * V_DIM",
            MERGED,
        ),
        ("runtime/tensor_spec.py", "0 < strides[1] < strides[2]", "0 <= strides[1] < strides[2]", MEMORY),
        ("runtime/tensor_spec.py", "shape[1] > 1 and shape[2] > 1 and", "shape[2] > 1 and", MEMORY),
        (
            "runtime/launch.py",
            "(strides[0], strides[2], strides[1], 1)",
            "(strides[0], strides[1], strides[2], 1)",
            MEMORY,
        ),
        ("nn/mixture_of_blocks.py", "b (h group) n d", "b (group h) n d", "tests/nn/test_mixture_of_blocks.py"),
        (
            "nn/shared_index.py",
            "q.detach(), k.detach(), index_k_per_head",
            "q, k, index_k_per_head",
            "tests/nn/test_shared_index.py",
        ),
        ("nn/shared_index.py", "self.index(x.detach())", "self.index(x)", "tests/nn/test_shared_index.py"),
        (
            "selection.py",
            "[:, :, :, :group].transpose",
            "[:, :, :, -group:].transpose",
            "tests/test_selection.py -k definition",
        ),
        ("nn/kv_cache.py", "None, 0 if causal else None", "None, None", CACHED),
        (
            "nn/kv_cache.py",
            "layout_crops.Crop(cache.length, n_tokens, 0, stop, device)",
            "layout_crops.Crop(cache.length - cache.length % 2, n_tokens, 0, stop, device)",
            CACHED,
        ),
        (
            "nn/kv_cache.py",
            "if self._length + k.shape[2] > max_length:",
            "if self._length + k.shape[2] > max_length + 1:",
            CACHED,
        ),
        ("nn/kv_cache.py", "self._v[:, :, self._length : stop] = v", "self._v[:, :, self._length : stop] = k", CACHED),
        (
            "nn/kv_cache.py",
            "if self._length and owner is not None and owner is not layer:",
            "if self._length and owner is None:",
            CACHED,
        ),
        (
            "validation.py",
            "if torch.is_grad_enabled() and tensor.requires_grad:",
            "if torch.is_grad_enabled() and tensor.is_cuda:",
            CACHED,
        ),
        ("nn/layers.py", "self.project(x, positions, first=cache.length)", "self.project(x, positions)", CACHED),
        (
            "nn/layers.py",
            "layout = self.layout_for(cache.max_length)",
            "layout = self.layout_for(cache.length + q.shape[2])",
            CACHED,
        ),
        ("nn/decoder.py", "gate, up = self.gate_up", "up, gate = self.gate_up", DECODER),
        (
            "nn/decoder.py",
            "x = block(x, kv_lengths, positions, cache=cache)",
            "x = block(x, kv_lengths, cache=cache)",
            DECODER,
        ),
        (
            "nn/layout_by_length.py",
            "functools.lru_cache(maxsize=maxsize)",
            "functools.lru_cache(maxsize=None)",
            BY_LENGTH,
        ),
        (
            "nn/layout_by_length.py",
            "masks.build(spec, length, block_size=block_size)",
            "masks.build(spec, length)",
            BY_LENGTH,
        ),
        (
            "huggingface/config_layouts.py",
            "tuple(checked[kind] for kind in types)",
            "tuple(checked[kind] for kind in reversed(types))",
            LAYERS,
        ),
        ("huggingface/config_layouts.py", "setattr(config, CONFIG_KEY, given)", "pass", SAVED),
        ("huggingface/config_layouts.py", "if len(given) != n_layers:", "if len(given) < n_layers:", LAYERS),
        ("huggingface/saved_layouts.py", "validate=True), n_bytes + 1)", "validate=True))", SAVED),
        ("huggingface/saved_layouts.py", 'astype("<i4")', 'astype(">i4")', SAVED),
        (
            "huggingface/registration.py",
            "vars(changed)[key] = _with_replaced(value, function)",
            "vars(changed)[key] = value",
            SAVED,
        ),
        ("huggingface/attention.py", "mask = of_layer(mask.of_layers, module)", "mask = mask.of_layers[0]", LAYERS),
        ("huggingface/selection.py", "_ALWAYS = 1, 2", "_ALWAYS = 1, 1", SELECTION),
        ("huggingface/selection.py", "mask.kv_lengths.clamp(min=1)", "mask.kv_lengths", SELECTION),
        ("huggingface/selection.py", "crop(q_start)", "crop(0, q.shape[2])", SELECTION),
        (
            "nn/mixture_of_blocks.py",
            '"block_size": block_size, "q_start": q_start}',
            '"block_size": block_size}',
            SELECTION,
        ),
        ("nn/native_sparse.py", "q_start + rows.stop, q_start + first", "q_start + rows.stop, first", SELECTION),
        (
            "blocks/drawing.py",
            "(end - begin).tolist()",
            "(end - begin + 1).tolist()",
            "tests/blocks/test_notebook_drawing.py",
        ),
        (
            "dispatch.py",
            "_log(backend, chosen, device, dtype, against_hopper)",
            "_log.__wrapped__(backend, chosen, device, dtype, against_hopper)",
            "tests/test_dispatch_log.py",
        ),
        (
            "dispatch.py",
            "chosen, is_named = _chosen(backend, device, dtype, against_hopper), ",
            "chosen, is_named = choose(backend, device, dtype, against_hopper), ",
            "tests/test_dispatch_log.py",
        ),
    ),
    "paged": _of(
        PACKAGE,
        ("kernels/triton/paged.py", "< o_entry[:, None])", "<= o_entry[:, None])", IN_PAGES),
        ("kernels/triton/paged.py", "i_batch * table_stride + b_number", "i_list * table_stride + b_number", IN_PAGES),
        (
            "kernels/triton/paged.py",
            "tl.minimum(o_key // PAGE, last)",
            "tl.minimum((o_key + 1) // PAGE, last)",
            IN_PAGES,
        ),
        ("kernels/triton/paged.py", "- q_len - window + 1, 0)", "- q_len - window, 0)", IN_PAGES),
        ("kernels/triton/paged.py", "(o_kv < limit) & (o_kv >= begin)", "(o_kv <= limit) & (o_kv >= begin)", IN_PAGES),
        ("kernels/triton/paged.py", "<= o_q[:, None] + ahead)", "< o_q[:, None] + ahead)", IN_PAGES),
        (
            "kernels/triton/paged.py",
            "> o_q[:, None] + (ahead - window)",
            ">= o_q[:, None] + (ahead - window)",
            IN_PAGES,
        ),
        ("kernels/triton/paged.py", "(start % PAGE if PAGE >= BLOCK_KV else 0)", "0", IN_PAGES),
        ("kernels/triton/paged.py", "tl.where(m_list, o_kv, kv_len)", "o_kv", IN_PAGES),
        ("kernels/triton/paged.py", "end = tl.cdiv(limit, BLOCK_KV)", "end = limit // BLOCK_KV", IN_PAGES),
        (
            "kernels/triton/paged.py",
            "packed = group if lists.n_lists in (1, kv_heads) else 1",
            "packed = group",
            IN_PAGES,
        ),
        ("kernels/triton/paged.py", "most_keys = min(most_keys, window + q_len)", "most_keys = window + q_len", GRID),
        ("kernels/triton/paged.py", "tl.cumsum(b_splits, 0) <= i_slot", "tl.cumsum(b_splits, 0) < i_slot", IN_PAGES),
        ("kernels/triton/paged.py", "tl.cdiv(b_steps, MIN_STEPS)), 1)", "tl.cdiv(b_steps, MIN_STEPS)), 0)", SPLITS),
        ("kernels/triton/paged.py", "b_steps = (end - first).to(tl.int64)", "b_steps = end - first", SPLITS),
        ("kernels/triton/page_scores.py", "row = batch_head * n_rows + i_row", "row = batch_head + i_row", SCORED),
        ("kernels/triton/page_scores.py", "o_page = i_chunk * PAGES", "o_page = i_chunk", SCORED),
        (
            "kernels/triton/page_scores.py",
            "tl.minimum(tl.maximum(b_id, 0), n_pages - 1)",
            "tl.maximum(b_id, 0)",
            SCORED,
        ),
        ("kernels/eager/paged.py", "kv_pos > q_pos - pages.window", "kv_pos >= q_pos - pages.window", EAGER_PAGES),
        ("kernels/eager/paged.py", "kv_pos < lengths[..., None]", "kv_pos <= lengths[..., None]", EAGER_PAGES),
        ("kernels/eager/paged.py", "* kv_heads // max(1, n_copied)", "% kv_heads", EAGER_PAGES),
        ("kernels/eager/paged.py", "is_repeated, max_pages)", "is_repeated & False, max_pages)", EAGER_PAGES),
        ("paged/checks.py", "-(-kv_lengths[:, None] // page)", "kv_lengths[:, None] // page", REFUSED_PAGES),
        ("paged/selection.py", "number > own - last", "number >= own - last", SELECTED_PAGES),
        ("paged/selection.py", "page_size) - 1) // page_size)", "page_size)) // page_size)", SELECTED_PAGES),
        ("paged/selection.py", "fill(number > own, -torch.inf)", "fill(number > own + 1, -torch.inf)", SELECTED_PAGES),
        ("paged/selection.py", "q.clamp(min=0), q.clamp(max=0)", "q.clamp(max=0), q.clamp(min=0)", SELECTED_PAGES),
        ("paged/writing.py", "is_stored = (pos >= 0)", "is_stored = (pos > 0)", APPENDED),
        ("paged/writing.py", "- tokens + torch.arange", "- tokens + 1 + torch.arange", APPENDED),
        ("paged/writing.py", "torch.where(is_stored.any(), rows", "torch.where(is_stored.any() | True, rows", APPENDED),
    ),
}

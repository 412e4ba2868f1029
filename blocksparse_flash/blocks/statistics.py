"""Statistics of a layout: density, balance, connectedness, and cost compared with dense attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import block_list, checks, set_operations
from .block_list import FULL, Array, BlockList, Frame, Size

# edges that all searches for `hops` may visit, 1 to 4 s
_SEARCH_EDGES = 1 << 25
# at most _SMALL_GRAPH blocks: all eigenvalues; more than _LARGE_GRAPH: none, which would take minutes and gigabytes
_SMALL_GRAPH, _LARGE_GRAPH = 64, 1 << 14
_LANCZOS_RESTARTS = 100


class Balance(NamedTuple):
    """Stored blocks per row (or col) over all heads: most, mean, most / mean (1.0 if none), number of empty rows."""

    most: int
    mean: float
    imbalance: float
    idle: int


class Mixing(NamedTuple):
    """How fast information spreads through the graph of blocks; `Description` has the definitions.

    hops        None: some block never reaches another
    is_sampled  True: searched from some blocks only, so `hops` is a lower bound
    gap         None: the graph is too large
    """

    hops: int | None
    is_sampled: bool
    gap: float | None


@dataclass(frozen=True)
class Description:
    """Result of `BlockLayout.describe`; prints as a report. Counts are over all batches and heads of the layout.

    batch, heads, q_len, kv_len, block_size  as the layout's
    nnz, full_share, density   stored blocks; full / stored (0.0 if none); stored / all
    pairs, pair_density        attending pairs, exact; attending / all
    distinct_bitmasks, metadata_bytes  of the layout's own tensors
    head_dim, flops, dense_flops  one forward: 4 * head_dim operations per pair of the stored blocks (of all blocks)
    bytes, dense_bytes         one forward: q read and out written once, k and v read once per stored block;
                               dense_bytes: once per block
    rows, cols                 `Balance` of the work
    idle_queries, idle_keys    tokens that attend to nothing; tokens that nothing attends to
    mixing                     None unless q_len == kv_len. Blocks i and j are joined if any head of the batch stores
                               (i, j); unequal sides are regrouped to squares of the longer one. Values of the batch
                               that mixes worst.
                               hops: layers until every block has reached every other; a lower bound for tokens if
                               blocks are partial. Searched from every block, or from evenly spaced ones if that
                               would visit more than 2**25 edges.
                               gap: second smallest eigenvalue of the normalized Laplacian, 1 minus the second largest
                               of D^-1/2 A D^-1/2 (A joins blocks in either direction, D counts them per row). 0 if A
                               is disconnected, 1 if it is complete. Not computed beyond 16,384 blocks
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_size: Size
    nnz: int
    full_share: float
    density: float
    pairs: int
    pair_density: float
    distinct_bitmasks: int
    metadata_bytes: int
    head_dim: int
    flops: int
    dense_flops: int
    bytes: int
    dense_bytes: int
    rows: Balance
    cols: Balance
    idle_queries: int
    idle_keys: int
    mixing: Mixing | None

    def __str__(self) -> str:
        blocks = "blocks of {} x {}".format(*self.block_size)
        lines = [
            f"layout    {self.q_len} x {self.kv_len} tokens, {blocks}, batch {self.batch}, heads {self.heads}",
            f"blocks    {self.nnz} stored, density {self.density:.4g}; {self.full_share:.1%} of them full",
            f"pairs     {self.pairs} attend, density {self.pair_density:.4g}",
            f"bitmasks  {self.distinct_bitmasks} distinct; metadata {amount(self.metadata_bytes, 'B')}",
            f"forward   {self._said_cost()}",
        ]
        for name, side in (("rows", self.rows), ("cols", self.cols)):
            lines.append(
                f"{name}      {side.most} blocks at most, {side.mean:.4g} on average, imbalance {side.imbalance:.3g}; "
                f"{side.idle} empty"
            )
        lines.append(f"tokens    {self.idle_queries} queries without a key, {self.idle_keys} keys without a query")
        return "\n".join([*lines, f"mixing    {self._said_mixing()}"])

    def _said_cost(self) -> str:
        flops = f"{amount(self.flops, 'FLOP')} ({_share(self.flops, self.dense_flops)} of dense)"
        moved = f"{amount(self.bytes, 'B')} moved ({_share(self.bytes, self.dense_bytes)} of dense)"
        return f"{flops}, {moved} at head_dim {self.head_dim}"

    def _said_mixing(self) -> str:
        if self.mixing is None:
            return "only for q_len == kv_len"
        hops, is_sampled, gap = self.mixing
        if hops is None:
            reach = "some block never reaches another"
        else:
            reach = f"every block reaches every other in {'at least ' * is_sampled}{hops} hops"
        return f"{reach}; spectral gap {'not computed, the graph is too large' if gap is None else f'{gap:.3g}'}"


def amount(number: int, unit: str, digits: int = 3) -> str:
    """A number with a decimal prefix.

    >>> amount(64_260_000_000, "FLOP")
    '64.3 GFLOP'
    """
    scaled, prefixes = float(number), ["", "k", "M", "G", "T", "P", "E"]
    while float(f"{scaled:.{digits}g}") >= 1000 and len(prefixes) > 1:
        scaled, prefixes = scaled / 1000, prefixes[1:]
    return f"{scaled:.{digits}g} {prefixes[0]}{unit}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole if whole else 0.0:.4g}"


# ------------------------------------------------------------------------------------------------------------- counting


def _balance(lines: Array, n_lines: int) -> Balance:
    work = np.bincount(lines, minlength=n_lines)
    mean = len(lines) / n_lines if n_lines else 0.0
    most = int(work.max(initial=0))
    return Balance(most, mean, most / mean if mean else 1.0, int((work == 0).sum()))


def _idle_queries(found: BlockList, frame: Frame) -> int:
    """Queries of all heads that attend to no key."""
    block_q = frame.block_size[0]
    # the last entry is a full block
    has_key = np.concatenate([(found.bitmasks != 0).any(axis=2), np.ones((1, block_q), np.bool_)])
    line, ids = found.keys // max(frame.n_cols, 1), found.ids
    # each bitmask counts once per row
    n_ids = len(found.bitmasks) + 1
    pairs = np.unique(line * n_ids + np.where(ids == FULL, n_ids - 1, ids))
    attends = np.zeros((frame.batch_heads * frame.n_rows, block_q), np.bool_)
    for part in block_list.chunks(len(pairs), block_q):
        here = pairs[part] // n_ids
        starts, _ = block_list.run_lengths(here)
        attends[here[starts]] |= np.logical_or.reduceat(has_key[pairs[part] % n_ids], starts, axis=0)
    has_key_by_query = attends.reshape(frame.batch_heads, frame.n_rows * block_q)[:, : frame.q_len]
    return int(has_key_by_query.size - np.count_nonzero(has_key_by_query))


def describe(found: BlockList, frame: Frame, *, head_dim: int, element_bytes: int) -> Description:
    """The description of a canonical list. O(nnz log nnz), plus the searches of `Mixing`."""
    for value, name in ((head_dim, "head_dim"), (element_bytes, "element_bytes")):
        if checks.integer(value, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    nnz, n_blocks = len(found.keys), frame.n_blocks
    block_q, block_kv = frame.block_size
    pairs = int(set_operations.counts_of_pairs(found, frame).sum())
    n_pairs = frame.batch_heads * frame.q_len * frame.kv_len
    line, col = np.divmod(found.keys, max(frame.n_cols, 1))
    queries = 2 * frame.batch_heads * frame.q_len
    return Description(
        **frame._asdict(),
        nnz=nnz,
        full_share=float((found.ids == FULL).mean()) if nnz else 0.0,
        density=frame.density(nnz),
        pairs=pairs,
        pair_density=pairs / n_pairs if n_pairs else 0.0,
        distinct_bitmasks=len(found.bitmasks),
        metadata_bytes=4 * (frame.batch_heads * (frame.n_rows + 1) + 2 * nnz) + found.bitmasks.nbytes,
        head_dim=head_dim,
        flops=4 * head_dim * nnz * block_q * block_kv,
        dense_flops=4 * head_dim * n_blocks * block_q * block_kv,
        bytes=head_dim * element_bytes * (queries + 2 * nnz * block_kv),
        dense_bytes=head_dim * element_bytes * (queries + 2 * n_blocks * block_kv),
        rows=_balance(line, frame.batch_heads * frame.n_rows),
        cols=_balance(line // max(frame.n_rows, 1) * frame.n_cols + col, frame.batch_heads * frame.n_cols),
        idle_queries=_idle_queries(found, frame),
        idle_keys=_idle_queries(set_operations.transpose(found, frame), frame.transposed),
        mixing=_mixing(found, frame) if frame.q_len == frame.kv_len else None,
    )


# ---------------------------------------------------------------------------------------------------------------- graph


def _mixing(found: BlockList, frame: Frame) -> Mixing:
    """`Mixing` of the batch that mixes worst."""
    import scipy.sparse

    side = max(frame.block_size)
    keys = block_list.regroup(found, frame, (side, side)).keys
    n = -(-frame.q_len // side)
    if n == 0:
        return Mixing(0, False, 1.0)
    batch_head, place = np.divmod(keys, n * n)
    batch = batch_head // frame.heads
    joined = np.unique(batch * n * n + place)
    each = []
    for index in range(frame.batch):
        places = joined[joined // (n * n) == index] % (n * n)
        graph = scipy.sparse.csr_array((np.ones(len(places)), np.divmod(places, n)), shape=(n, n))
        each.append(Mixing(*_hops(graph), _spectral_gap(graph)))
    never = any(mixing.hops is None for mixing in each)
    gaps = [mixing.gap for mixing in each if mixing.gap is not None]
    return Mixing(
        None if never else max(mixing.hops or 0 for mixing in each),
        not never and any(mixing.is_sampled for mixing in each),
        min(gaps) if len(gaps) == len(each) else None,
    )


def _hops(graph: Any) -> tuple[int | None, bool]:
    """(diameter of the graph, whether only some starts were searched); None if some block is unreachable."""
    from scipy.sparse import csgraph

    n = graph.shape[0]
    if csgraph.connected_components(graph, connection="strong")[0] > 1:
        return None, False
    n_starts = max(1, min(n, _SEARCH_EDGES // (n + graph.nnz)))
    starts = np.arange(n_starts) * n // n_starts
    hops = 0.0
    for part in block_list.chunks(n_starts, 8 * n):
        ways = csgraph.shortest_path(graph, method="D", unweighted=True, indices=starts[part])
        hops = max(hops, ways.max())
    return int(hops), n_starts < n


def _spectral_gap(graph: Any) -> float | None:
    """Spectral gap of the graph with both directions joined; None if it is too large."""
    import scipy.sparse
    from scipy.sparse import csgraph, linalg

    n = graph.shape[0]
    either = graph.maximum(graph.T)
    if csgraph.connected_components(either, directed=False)[0] > 1:
        return 0.0
    if n == 1:
        return 1.0
    if n > _LARGE_GRAPH:
        return None
    scale = scipy.sparse.diags_array(either.sum(axis=1) ** -0.5)
    normal = scale @ either @ scale
    if n <= _SMALL_GRAPH:
        return float(1 - np.linalg.eigvalsh(normal.toarray())[-2])
    # a fixed start gives the same digits every time; all ones could be the first eigenvector
    start = np.sin(np.arange(1, n + 1))
    try:
        values = linalg.eigsh(normal, k=2, which="LA", v0=start, maxiter=_LANCZOS_RESTARTS, return_eigenvectors=False)
        return float(1 - values.min())
    except linalg.ArpackNoConvergence:
        # many eigenvalues close to 1, as in long chains: shift-invert separates them, and chains factorize sparsely
        laplacian = (scipy.sparse.eye_array(n) - normal).tocsc()
        values = linalg.eigsh(laplacian, k=2, sigma=-1e-3 / n, which="LM", v0=start, return_eigenvectors=False)
        return float(values.max())

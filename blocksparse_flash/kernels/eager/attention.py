"""Block-sparse flash attention in plain PyTorch, on any device.

A chunk is a set of query tiles with equally many key tiles; its scores are one batched matrix product. With
s = scale q k^T, per query:

    forward    m = max s,  p = exp(s - m),  l = sum p,  out = (p / l) v,  lse = m + log(l)
               tile rows too long for one chunk are split into spans, merged by the factor exp(m - new m)
    backward   p = exp(s - lse),  dp = dout v^T,  ds = p (dp - delta),
               delta = rowsum(p dp) - dlse = rowsum(dout out) - dlse
               dq = scale ds k,  dk = scale ds^T q,  dv = p^T dout

Score mods change s before the mask; a sink is a partial result from which every row starts. Dropout multiplies p (in
p v) and dp by keep / philox.kept_share. Half types are computed in float32.

Only stored tiles are computed. Memory is O(tokens) for the float32 copies and the gradients, plus a bounded chunk. Each
chunk owns its rows of out and dq; dk and dv are accumulated in a fixed order, so results are bitwise reproducible. A
row without keys writes out 0, lse -inf and gradients 0.

Masks are applied with torch.minimum and clamped exponents, since on CPUs masked_fill_ is 25 times slower than minimum
(2.1 and 0.08 ns an element, AVX-512) and exp of -inf or with subnormal results 20 to 90 times slower than other exps.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ... import philox
from ...plan_format import PARTIAL, TILE
from ...runtime.tensor_spec import in_order_of, new_in_order_of
from ...score_mods import Scores
from ..inputs import BackwardInputs
from .score_mods import CallMods, Sizes, SpanMods, add_tiles

# exp of this is still a normal number; lower exponents give weight 0
LOWEST_EXPONENT = {torch.float32: -87.0, torch.float64: -708.0}
# score tiles of a chunk, 64 KB each in float32. On a CPU those of a thread should stay in its cache (8 and 128 are 10 %
# slower with 2 MB); a GPU needs large launches
TILES_PER_THREAD = 32
TILES_ON_GPU = 1024


class _Rows(NamedTuple):
    """Tile rows with equally many tiles, each processed once per head that shares the plan.

    batch_idx, head_idx, rows  (items,) of each tile row; 0 for a dimension that the plan broadcasts
    begins  (items,): place of each row in the lists of the plan, or None without a plan
    n_partial, n_tiles  tiles of each row; the partial ones come first
    """

    batch_idx: Tensor
    head_idx: Tensor
    rows: Tensor
    begins: Tensor | None
    n_partial: int
    n_tiles: int

    def split(self, n_rows: int) -> Iterator[_Rows]:
        """Parts of up to n_rows rows."""
        for begin in range(0, len(self.rows), n_rows):
            part = slice(begin, begin + n_rows)
            begins = None if self.begins is None else self.begins[part]
            axes = self.batch_idx[part], self.head_idx[part], self.rows[part]
            yield _Rows(*axes, begins, self.n_partial, self.n_tiles)


class _Span(NamedTuple):
    """The key tiles of one matrix product with the query tiles of a chunk.

    kv_tiles  (items * tiles,) indices of the key tiles
    shape     (sharing heads, rows, queries, keys) of the scores
    limit     (rows, queries, keys of the partial tiles), or None
    length_limit  broadcasts to shape, or None
    keep      dropout factors of that shape, 0 or 1 / philox.kept_share(dropout_p), or None
    mods      the score mods, or None
    """

    kv_tiles: Tensor
    shape: tuple[int, int, int, int]
    limit: Tensor | None
    length_limit: Tensor | None
    keep: Tensor | None
    mods: SpanMods | None


class _Chunks:
    """All chunks of a call in a fixed order, as (query tiles, whether they have a single span, iterator over spans)."""

    def __init__(
        self,
        sizes: Sizes,
        plan: list[Tensor],
        kv_lengths: Tensor | None,
        seed: Tensor | None,
        causal: bool,
        dropout_p: float,
        mods: CallMods | None,
        *,
        like: Tensor,
    ) -> None:
        self.mods = mods
        self.sizes, self.seed, self.dropout_p = sizes, seed, dropout_p
        self.device, self.dtype = like.device, like.dtype
        is_on_cpu = like.device.type == "cpu"
        self.tiles_at_once = TILES_PER_THREAD * torch.get_num_threads() if is_on_cpu else TILES_ON_GPU
        self.kv_lengths = self._needed_lengths(kv_lengths, is_dense=not plan)
        self.plan = plan
        self.groups = self._plan_groups() if plan else self._dense_groups(causal)
        plan_batch, plan_heads = plan[0].shape[:2] if plan else (1, 1)
        # every (batch, head) with the same rows; 0 for a dimension along which rows differ
        shared_batch = torch.arange(sizes.batch if plan_batch == 1 else 1, device=self.device)
        shared_head = torch.arange(sizes.heads if plan_heads == 1 else 1, device=self.device)
        self.shared = torch.cartesian_prod(shared_batch, shared_head)

    def _needed_lengths(self, kv_lengths: Tensor | None, *, is_dense: bool) -> Tensor | None:
        """kv_len of each batch entry if tiles exceed it; the last tile of a plan is already masked by its bitmask."""
        kv_len = self.sizes.kv_len
        if kv_lengths is not None:
            return kv_lengths.to(torch.int64).clamp(0, kv_len)
        if is_dense and kv_len % TILE:
            return torch.full((self.sizes.batch,), kv_len, device=self.device)
        return None

    def __iter__(self) -> Iterator[tuple[Tensor, bool, Callable[[], Iterator[_Span]]]]:
        sizes = self.sizes
        for group in self.groups:
            is_single = group.n_tiles <= self.tiles_at_once
            for rows in group.split(max(1, self.tiles_at_once // group.n_tiles)):
                shared_at_once = max(1, self.tiles_at_once // (group.n_tiles * len(rows.rows)))
                # one entry, reused by the heads that share these rows
                memory: dict[int, Tensor] = {}
                for shared in self.shared.split(shared_at_once):
                    # (sharing heads, rows)
                    batch_idx, head_idx = shared[:, :1] + rows.batch_idx, shared[:, 1:] + rows.head_idx
                    q_tiles = (batch_idx * sizes.heads + head_idx) * sizes.n_rows + rows.rows
                    spans = functools.partial(self._spans, rows, batch_idx, head_idx, memory)
                    yield q_tiles.flatten(), is_single, spans

    def _spans(self, rows: _Rows, batch_idx: Tensor, head_idx: Tensor, memory: dict[int, Tensor]) -> Iterator[_Span]:
        sizes = self.sizes
        kv_head_idx = head_idx // (sizes.heads // sizes.kv_heads)
        first_kv_tile = (batch_idx * sizes.kv_heads + kv_head_idx) * sizes.n_cols
        # (rows, queries, 1)
        q_pos = _positions(rows.rows[:, None])[:, : sizes.q_side, None]
        # the key at the position of each query, aligned bottom-right
        diagonal = q_pos + (sizes.kv_len - sizes.q_len)
        for first in range(0, rows.n_tiles, self.tiles_at_once):
            last = min(first + self.tiles_at_once, rows.n_tiles)
            # (rows, tiles)
            cols, entries = self._listed(rows, first, last)
            # (rows, 1, keys)
            kv_pos = _positions(cols)[:, None]
            if first < rows.n_partial and first not in memory:
                memory.clear()
                memory[first] = self._limit_of(min(last, rows.n_partial) - first, entries, diagonal, kv_pos)
            mods = None
            if self.mods is not None:
                mods = self.mods.of_span(batch_idx, head_idx, rows.rows, cols, entries, diagonal, kv_pos)
            yield _Span(
                kv_tiles=(first_kv_tile[:, :, None] + cols).flatten(),
                shape=(*batch_idx.shape, sizes.q_side, TILE * (last - first)),
                limit=memory.get(first),
                length_limit=self._length_limit(batch_idx, kv_pos),
                keep=self._keep(batch_idx, head_idx, q_pos, kv_pos),
                mods=mods,
            )

    def _listed(self, rows: _Rows, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        """(rows, last - first): tile columns of rows, and their places in the lists of the plan, None without one."""
        steps = torch.arange(first, last, device=self.device)
        if rows.begins is None:
            # all columns in order, but the partial ones, which are the last, come first
            return ((steps - rows.n_partial) % rows.n_tiles).expand(len(rows.rows), -1), None
        entries = rows.begins[:, None] + steps
        # a partial tile is listed with a sign
        return self.plan[1][entries].to(torch.int64) & (PARTIAL - 1), entries

    def _limit_of(self, n_partial: int, entries: Tensor | None, diagonal: Tensor, kv_pos: Tensor) -> Tensor:
        """(rows, queries, 128 * n_partial): +inf attends, -inf does not, for the first tiles of a span."""
        if entries is None:
            return _limit(kv_pos[..., : TILE * n_partial] <= diagonal, self.dtype)
        ids, words = self.plan[2][entries[:, :n_partial]].to(torch.int64), self.plan[-1]
        return _unpacked(words[:, : self.sizes.q_side][ids], self.dtype)

    def _length_limit(self, batch_idx: Tensor, kv_pos: Tensor) -> Tensor | None:
        if self.kv_lengths is None:
            return None
        # (sharing heads, rows, 1, keys)
        exists = kv_pos < self.kv_lengths[batch_idx][:, :, None, None]
        if self.device.type == "cpu" and bool(exists.all()):
            return None
        return _limit(exists, self.dtype)

    def _keep(self, batch_idx: Tensor, head_idx: Tensor, q_pos: Tensor, kv_pos: Tensor) -> Tensor | None:
        if self.dropout_p == 0:
            return None
        assert self.seed is not None, "dropout_p > 0 needs a seed"
        batch_idx, head_idx = batch_idx[:, :, None, None], head_idx[:, :, None, None]
        is_kept = philox.keep_mask(self.seed.to(self.device), batch_idx, head_idx, q_pos, kv_pos, self.dropout_p)
        return is_kept.to(self.dtype).mul_(1 / philox.kept_share(self.dropout_p))

    def _plan_groups(self) -> Iterator[_Rows]:
        records = self.plan[0]
        n_heads, n_rows = records.shape[1:3]
        # on a GPU this is the only synchronization of a call
        items = records.cpu().numpy().reshape(-1, records.shape[3]).astype(np.int64)
        owner = np.repeat(np.arange(len(items) // max(1, n_rows)), n_rows)
        items = np.column_stack([owner // n_heads, owner % n_heads, items[:, :4]])
        items = items[items[:, 4] > 0]
        # stable: rows of one kind stay in launch order
        items = items[np.lexsort((items[:, 5], items[:, 4]))]
        borders = np.flatnonzero(np.any(np.diff(items[:, 4:6], axis=0), axis=1)) + 1
        for kind in np.split(items, borders) if len(items) else ():
            n_tiles, n_partial = (int(count) for count in kind[0, 4:6])
            batch_idx, head_idx, rows, begins, *_ = torch.from_numpy(kind.T.copy()).to(self.device)
            yield _Rows(batch_idx, head_idx, rows, begins, n_partial, n_tiles)

    def _dense_groups(self, causal: bool) -> Iterator[_Rows]:
        sizes, rows = self.sizes, torch.arange(self.sizes.n_rows, device=self.device)
        zeros = torch.zeros_like(rows)
        if not causal:
            yield _Rows(zeros, zeros, rows, None, 0, sizes.n_cols)
            return
        offset = sizes.kv_len - sizes.q_len
        for row in range(sizes.n_rows):
            last_query = min((row + 1) * TILE, sizes.q_len) - 1
            n_full = min(max(0, (row * TILE + offset + 1) // TILE), sizes.n_cols)
            n_tiles = min(max(0, (last_query + offset) // TILE + 1), sizes.n_cols)
            if n_tiles:
                yield _Rows(zeros[:1], zeros[:1], rows[row : row + 1], None, n_tiles - n_full, n_tiles)


def _positions(tiles: Tensor) -> Tensor:
    """(items, tiles) -> (items, 128 * tiles): the positions of the tokens of tiles."""
    return (tiles[:, :, None] * TILE + torch.arange(TILE, device=tiles.device)).flatten(1)


def _limit(attends: Tensor, dtype: torch.dtype) -> Tensor:
    """+inf where True, -inf where False."""
    return torch.full(attends.shape, -torch.inf, dtype=dtype, device=attends.device).masked_fill_(attends, torch.inf)


def _unpacked(words: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, tiles, queries, 4) bitmask words -> (rows, queries, 128 * tiles) limits."""
    bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    # (rows, tiles, queries, 4, 32) -> (rows, queries, tiles, 4, 32); 0 and 1 become -inf and +inf
    return bits.transpose(1, 2).to(dtype).flatten(2).sub_(0.5).mul_(torch.inf)


def _tiles(tensor: Tensor, dtype: torch.dtype, side: int = TILE, beyond: float = 0.0) -> Tensor:
    """(batch, heads, length, dim) -> (batch * heads * tiles, side, dim), `beyond` past the end."""
    batch, heads, length, dim = tensor.shape
    n_tiles = -(-length // side)
    tensor = tensor.to(dtype)
    if length % side:
        tensor = F.pad(tensor, (0, 0, 0, n_tiles * side - length), value=beyond)
    return tensor.reshape(batch * heads * n_tiles, side, dim)


def _untiled(tiles: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_tiles`: a fresh tensor of the shape, dtype and memory order of `like`."""
    batch, heads, length, dim = like.shape
    return in_order_of(like, tiles.view(batch, heads, -1, dim)[:, :, :length].to(like.dtype))


def _kv_tiles(tensor: Tensor, dtype: torch.dtype, kv_lengths: Tensor | None) -> Tensor:
    """Tiles of k or v; rows past a length are zeros, even if they hold NaN."""
    if kv_lengths is not None:
        is_missing = torch.arange(tensor.shape[2], device=tensor.device) >= kv_lengths[:, None]
        tensor = tensor.masked_fill(is_missing[:, None, :, None], 0)
    return _tiles(tensor, dtype)


def _scores(q_chunk: Tensor, k_chunk: Tensor, scale: float, span: _Span) -> tuple[Tensor, Tensor | None]:
    """(items, queries, keys) scores, -inf for pairs that do not attend; and the tanh of a cap, by head."""
    if abs(scale) <= 1:
        # baddbmm scales for free; with beta=0 its first argument only gives a shape
        nothing = q_chunk.new_zeros(1, 1, 1).expand(*q_chunk.shape[:2], k_chunk.shape[1])
        scores = torch.baddbmm(nothing, q_chunk, k_chunk.transpose(1, 2), beta=0, alpha=scale)
    else:
        # baddbmm may scale an operand first, which could overflow where the scores do not
        scores = torch.bmm(q_chunk, k_chunk.transpose(1, 2)).mul_(scale)
    by_head = scores.view(span.shape)
    tanh = None if span.mods is None else span.mods.apply(by_head)
    if span.limit is not None:
        _mask(by_head[..., : span.limit.shape[-1]], span.limit)
    if span.length_limit is not None:
        _mask(by_head, span.length_limit)
    return scores, tanh


def _mask(scores: Tensor, limit: Tensor) -> None:
    """minimum(scores, limit), in place. NaN becomes +inf first, since minimum would keep NaN of masked pairs."""
    scores.nan_to_num_(torch.inf, torch.inf, -torch.inf)
    torch.minimum(scores, limit, out=scores)


def _weights(scores: Tensor, pivot: Tensor) -> Tensor:
    """exp(scores - pivot), in place; exactly 0 for a score of -inf, which a pair that attends may have too."""
    lowest = LOWEST_EXPONENT[scores.dtype]
    weights = scores.sub_(pivot).clamp_min_(lowest).exp_()
    # factor 2: independent of how exp rounds
    return torch.threshold_(weights, 2 * math.exp(lowest), 0.0)


def _finite(highest: Tensor) -> Tensor:
    """Finite pivot for a row without keys so far, since -inf - (-inf) = nan."""
    return highest.clamp_min(torch.finfo(highest.dtype).min)


def _nonzero(total: Tensor) -> Tensor:
    """1 for the total of a row without keys: 0 / 1 = 0, and -inf + log 1 = -inf."""
    return total.masked_fill(total == 0, 1)


def _gathered(tiles: Tensor, span: _Span) -> Tensor:
    """(items, keys, dim): the key tiles of a span."""
    n_sharing, n_rows, _, n_keys = span.shape
    return tiles.index_select(0, span.kv_tiles).view(n_sharing * n_rows, n_keys, tiles.shape[2])


class _Partial(NamedTuple):
    """Partial result of a chunk over some spans, each tensor (items, queries, ...).

    out      sum of exp(score - highest) v; divided by total if is_divided
    highest  maximum score, -inf before the first key
    total    sum of the weights
    """

    out: Tensor
    highest: Tensor
    total: Tensor
    is_divided: bool


def _attended(
    q_chunk: Tensor, k_tiles: Tensor, v_tiles: Tensor, scale: float, span: _Span, *, is_all: bool
) -> _Partial:
    """The partial result of one span; is_all if it is the whole row."""
    dtype = q_chunk.dtype
    scores, _ = _scores(q_chunk, _gathered(k_tiles, span).to(dtype), scale, span)
    highest = scores.amax(dim=-1, keepdim=True)
    weights = _weights(scores, _finite(highest))
    total = weights.sum(dim=-1, keepdim=True)
    if is_all:
        # like the reference; rounds less than dividing the product
        weights.div_(_nonzero(total))
    if span.keep is not None:
        weights.view(span.shape).mul_(span.keep)
    return _Partial(torch.bmm(weights, _gathered(v_tiles, span).to(dtype)), highest, total, is_all)


def _merged(a: _Partial, b: _Partial) -> _Partial:
    highest = torch.maximum(a.highest, b.highest)
    decay_a, decay_b = torch.exp(a.highest - _finite(highest)), torch.exp(b.highest - _finite(highest))
    out = b.out.mul_(decay_b).addcmul_(a.out, decay_a)
    return _Partial(out, highest, b.total.mul_(decay_b).addcmul_(a.total, decay_a), is_divided=False)


def _sink_partial(sinks: Tensor, index: Tensor, sizes: Sizes, v_dim: int) -> _Partial:
    """The sinks as a partial result; a sink of -inf gets no weight in `_merged`."""
    highest = sinks[index // sizes.n_rows % sizes.heads][:, None, None].expand(-1, sizes.q_side, 1)
    return _Partial(
        highest.new_zeros(len(index), sizes.q_side, v_dim), highest, torch.ones_like(highest), is_divided=False
    )


def _pairs(
    q_chunk: Tensor, dout_chunk: Tensor, pivot: Tensor, k_tiles: Tensor, v_tiles: Tensor, scale: float, span: _Span
) -> tuple[Tensor, Tensor, Tensor | None]:
    """p (before dropout), dp (after dropout) and the tanh of a softcap."""
    scores, tanh = _scores(q_chunk, _gathered(k_tiles, span), scale, span)
    dscores = torch.bmm(dout_chunk, _gathered(v_tiles, span).transpose(1, 2))
    if span.keep is not None:
        dscores.view(span.shape).mul_(span.keep)
    return _weights(scores, pivot), dscores, tanh


def _unrounded(delta: Tensor, dout_out: Tensor, summed: Tensor, total: Tensor) -> Tensor:
    """delta with rowsum(p dp) in place of rowsum(dout out), for rows whose weights p add up to 1.

    For other rows, out and lse cover more keys than this call, as in context parallelism. 2^-14 is an eighth of a
    float16 ulp.
    """
    return torch.where((total - 1).abs() < 2**-14, delta + (summed - dout_out), delta)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: list[Tensor],
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    scores: Scores | None = None,
) -> tuple[Tensor, Tensor]:
    """Block-sparse attention.

    q        (batch, heads, q_len, head_dim), any floating type
    k, v     (batch, kv_heads, kv_len, head_dim) and (..., v_head_dim)
    plan     the tensors of a plan.Plan on q's device, or [] for every pair
    causal   keeps kv_pos <= q_pos + kv_len - q_len; only without a plan
    kv_lengths (batch,), seed (1,) int64 or None; keys at and beyond a length are not read
    returns  out (batch, heads, q_len, v_head_dim) in q's dtype and memory order, lse (batch, heads, q_len) float32 or
             float64, contiguous
    """
    sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = new_in_order_of(q, v.shape[3]).zero_()
    lse = torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)
    sinks = None if scores is None else scores.sinks
    if sinks is not None:
        lse.copy_(sinks[:, None].expand_as(lse))
    if sizes.is_empty:
        return out, lse
    q_tiles = _tiles(q, dtype, sizes.q_side)
    mods = None if scores is None else CallMods(scores, sizes, plan, like=q_tiles)
    chunks = _Chunks(sizes, plan, kv_lengths, seed, causal, dropout_p, mods, like=q_tiles)
    # with one tile row each key tile is read once per head, so only the tiles in use are converted
    stored = k.dtype if sizes.n_rows == 1 else dtype
    k_tiles, v_tiles = (_kv_tiles(tensor, stored, kv_lengths) for tensor in (k, v))
    out_tiles = q_tiles.new_zeros(*q_tiles.shape[:2], v.shape[3])
    lse_tiles = _tiles(lse[..., None], dtype, sizes.q_side)
    for index, is_single, spans in chunks:
        q_chunk = q_tiles.index_select(0, index)
        is_all = is_single and sinks is None
        partials: Iterable[_Partial] = (
            _attended(q_chunk, k_tiles, v_tiles, scale, span, is_all=is_all) for span in spans()
        )
        if sinks is not None:
            partials = itertools.chain([_sink_partial(sinks, index, sizes, v.shape[3])], partials)
        merged = functools.reduce(_merged, partials)
        total = _nonzero(merged.total)
        out_tiles.index_copy_(0, index, merged.out if merged.is_divided else merged.out.div_(total))
        lse_tiles.index_copy_(0, index, merged.highest.add_(total.log_()))
    # copied, since a view of the tiles would refuse methods such as detach_ as an output of autograd
    batch, heads, length, dim_v = out.shape
    out.copy_(out_tiles.view(batch, heads, -1, dim_v)[:, :, :length])
    lse.copy_(lse_tiles.view(batch, heads, -1)[:, :, :length])
    return out, lse


def backward(
    inputs: BackwardInputs,
    plan: list[Tensor],
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    scores: Scores | None = None,
    wanted: Sequence[bool] = (False, False, False, False),
) -> tuple[Tensor, ...]:
    """Gradients of `forward`'s q, k and v; the other arguments as there.

    returns  dq, dk, dv of the shapes, dtypes and memory orders of q, k, v; with score mods also the gradients of sinks,
             slopes and biases, empty where not wanted
    """
    dout, dlse, q, k, v, out, lse = inputs
    sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    if sizes.is_empty:
        assert scores is None, "the reference handles calls without keys"
        dq, dk, dv = (new_in_order_of(each, each.shape[3]).zero_() for each in (q, k, v))
        return dq, dk, dv
    dtype = lse.dtype
    dout_out = (dout.to(dtype) * out.to(dtype)).sum(dim=-1)
    # half types: rowsum(p dp) instead, since the rounding of out dominates the gradients of rows with one or two keys
    is_rounded = out.dtype != dtype
    delta = dout_out
    if dlse is not None:
        # the lse of a row without keys is constant: its gradient is ignored
        delta = delta - dlse.masked_fill(lse == -torch.inf, 0)
    # +inf for a row without keys: exp(s - inf) = 0
    pivot = lse.masked_fill(lse == -torch.inf, torch.inf)
    q_tiles = _tiles(q, dtype, sizes.q_side)
    mods = None
    if scores is not None:
        mods = CallMods(scores, sizes, plan, like=q_tiles, wanted=wanted[1:])
    chunks = _Chunks(sizes, plan, kv_lengths, seed, causal, dropout_p, mods, like=q_tiles)
    k_tiles, v_tiles = (_kv_tiles(tensor, dtype, kv_lengths) for tensor in (k, v))
    dout_tiles, delta_tiles, dout_out_tiles = (
        _tiles(tensor, dtype, sizes.q_side) for tensor in (dout, delta[..., None], dout_out[..., None])
    )
    # +inf also for padding queries, where ALiBi could overflow exp, and 0 * inf = nan
    pivot_tiles = _tiles(pivot[..., None], dtype, sizes.q_side, beyond=torch.inf)
    dq_tiles, dk_tiles, dv_tiles = (torch.zeros_like(tiles) for tiles in (q_tiles, k_tiles, v_tiles))
    for index, is_single, spans in chunks:
        q_chunk, dout_chunk, delta_chunk, pivot_chunk = (
            tiles.index_select(0, index) for tiles in (q_tiles, dout_tiles, delta_tiles, pivot_tiles)
        )
        total, summed = torch.zeros_like(delta_chunk), torch.zeros_like(delta_chunk)
        if scores is not None and scores.sinks is not None:
            total += torch.exp(scores.sinks[index // sizes.n_rows % sizes.heads][:, None, None] - pivot_chunk)
        if is_rounded and not is_single:
            for span in spans():
                weights, dscores, _ = _pairs(q_chunk, dout_chunk, pivot_chunk, k_tiles, v_tiles, scale, span)
                total += weights.sum(dim=-1, keepdim=True)
                summed += weights.mul_(dscores).sum(dim=-1, keepdim=True)
            delta_chunk = _unrounded(delta_chunk, dout_out_tiles.index_select(0, index), summed, total)
        dq_chunk = torch.zeros_like(q_chunk)
        for span in spans():
            weights, dscores, tanh = _pairs(q_chunk, dout_chunk, pivot_chunk, k_tiles, v_tiles, scale, span)
            if is_rounded and is_single:
                total += weights.sum(dim=-1, keepdim=True)
                summed += (weights * dscores).sum(dim=-1, keepdim=True)
                delta_chunk = _unrounded(delta_chunk, dout_out_tiles.index_select(0, index), summed, total)
            kept = weights
            if span.keep is not None:
                kept = (weights.view(span.shape) * span.keep).view(weights.shape)
            add_tiles(dv_tiles, span.kv_tiles, torch.bmm(kept.transpose(1, 2), dout_chunk))
            dscores.sub_(delta_chunk).mul_(weights)
            if mods is not None and span.mods is not None:
                mods.collect(span.mods, dscores.view(span.shape), index)
                if tanh is not None:
                    dscores.view(span.shape).mul_(tanh.square_().neg_().add_(1))
            add_tiles(dk_tiles, span.kv_tiles, torch.bmm(dscores.transpose(1, 2), q_chunk))
            dq_chunk.baddbmm_(dscores, _gathered(k_tiles, span))
        dq_tiles.index_copy_(0, index, dq_chunk)
        delta_tiles.index_copy_(0, index, delta_chunk)
    grads = _untiled(dq_tiles.mul_(scale), q), _untiled(dk_tiles.mul_(scale), k), _untiled(dv_tiles, v)
    if scores is None or mods is None:
        return grads
    of_slopes = mods.distance_sums
    if of_slopes is not None:
        of_slopes = _untiled(of_slopes, lse[..., None].double())[..., 0]
    delta = _untiled(delta_tiles, lse[..., None])[..., 0]
    return *grads, *scores.gradients(wanted, lse, delta, of_slopes, mods.bias_sums, mods.pair_bias_gradient())

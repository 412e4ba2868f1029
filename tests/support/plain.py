"""Dense PyTorch attention in the type of the inputs: the error that closeness.assert_as_accurate compares with.

Gradients are computed by autograd through the reference and by the backward of FlashAttention, which all backends use:

    forward    s = scale q k^T   lse = log sum exp s   out = softmax(s) v
    backward   p = exp(s - lse)   delta = rowsum(dout out) - dlse   ds = p (dout v^T - delta)

The two round differently. With a large lse, p loses digits; where one key has nearly all of the weight,
dout v^T - delta cancels and magnifies the rounding of out. Autograd through a softmax has neither problem. Exponentials
are computed by exp2, as on a GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse_flash import BlockLayout, reference

ORDERS = 4
ROUNDINGS = 8


class BlockOfPairs(NamedTuple):
    """The stored block of each pair.

    index       int64 (batch | 1, heads | 1, n_rows, n_cols): the block, or layout.capacity if it is not stored
    block_size  (block_q, block_kv)
    lengths     (q_len, kv_len)
    more_rows   queries in front that are in no block
    """

    index: Tensor
    block_size: tuple[int, int]
    lengths: tuple[int, int]
    more_rows: int = 0


def block_of_pairs(layout: BlockLayout) -> BlockOfPairs:
    index = torch.full((*layout.shape[:2], layout.n_rows, layout.n_cols), layout.capacity)
    for batch, head in torch.cartesian_prod(*map(torch.arange, layout.shape[:2])).tolist():
        for row, (begin, end) in enumerate(layout.indptr[batch, head].unfold(0, 2, 1).tolist()):
            index[batch, head, row, layout.indices[begin:end].long()] = torch.arange(begin, end)
    return BlockOfPairs(index, layout.block_size, layout.shape[2:])


def bias_of_pairs(block_bias: Tensor, blocks: BlockOfPairs) -> Tensor:
    """Block bias as a bias of pairs, broadcastable to (batch, heads, q_len, kv_len)."""
    padded, index = F.pad(block_bias, (0, 1)), blocks.index.to(block_bias.device)
    of_blocks = padded[index] if padded.dim() == 1 else padded[..., index[0, 0]]
    (block_q, block_kv), (q_len, kv_len) = blocks.block_size, blocks.lengths
    # not an index for each pair, whose gradient takes minutes in deterministic mode: PyTorch adds repeats one by one
    pairs = of_blocks[..., :, None, :, None].expand(*of_blocks.shape[:-1], block_q, of_blocks.shape[-1], block_kv)
    return F.pad(pairs.flatten(-4, -3).flatten(-2)[..., :q_len, :kv_len], (0, 0, blocks.more_rows, 0))


@contextlib.contextmanager
def dropout_drawn_once() -> Iterator[None]:
    """Draws once which weights dropout keeps, which takes longer than all the rest."""
    with mock.patch.object(reference, "_keep", cache(reference._keep)):
        yield


def truths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor,
    mask: Tensor | None = None,
    *,
    score_mods: Mapping[str, Tensor] | None = None,
    blocks: BlockOfPairs | None = None,
    **options: Any,
) -> list[Tensor]:
    """out, lse and the gradients of q, k, v and the score mods: the reference in float64, and autograd through it.

    The arguments are those of `results`, in any type.
    """
    tensors = [tensor.double() for tensor in (q, k, v, dout, dlse)]
    mods = {name: tensor.double() for name, tensor in (score_mods or {}).items()}
    _, found = _by_autograd(*tensors, mask, mods, blocks, **options)
    return found


@dropout_drawn_once()
def results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor,
    mask: Tensor | None = None,
    *,
    score_mods: Mapping[str, Tensor] | None = None,
    blocks: BlockOfPairs | None = None,
    roundings: Sequence[int] | None = None,
    **options: Any,
) -> list[list[Tensor]]:
    """Valid values of out, lse, dq, dk and dv: one list each, which begins with that of the reference.

    dout, dlse  gradients of out and lse; lse is computed from q and k in float32 or float64
    score_mods  sinks, alibi_slopes, block_bias and pair_bias, if any; their gradients follow in this order
    blocks      block of each pair, from block_of_pairs; needed with block_bias
    roundings   seeds. In half types each draws one way in which kernels may round; by default ROUNDINGS seeds with
                `score_mods`, else none. In other types each changes the last bit of lse: odd ones up, even ones down
    options     those of reference.attention

    All values have the type of q, and are computed by autograd through the reference and by the backward of
    FlashAttention. In half types the latter runs twice, with the reference's out and with one from float32 weights. In
    other types both run twice, summing q k^T from the first and from the last component, and with score_mods in ORDERS
    more orders; and out is also summed from the last key to the first, since small weights after large ones round more.
    lse is computed in ORDERS more orders of q k^T in every type: it has no other rounding, and with few keys a
    single order may be exact by chance.
    """
    score_mods = score_mods or {}
    all_options = options | _reference_options(score_mods, blocks)
    if q.dtype in (torch.float16, torch.bfloat16):
        wide = (tensor.detach().float() for tensor in (q, k, v))
        others: list[Tensor | int] = [reference.attention(*wide, mask, **all_options)[0].to(q.dtype)]
        # rounding may dominate a gradient that is summed over all pairs of a block or head, and a single rounding may
        # be exact by chance
        others += roundings if roundings is not None else range(ROUNDINGS if score_mods else 0)
        found = _by_both_methods(q, k, v, dout, dlse, mask, others, score_mods, blocks, **options)
    else:
        # rows with equally many keys round lse alike, so one lse may be exact by chance
        found = _by_both_methods(q, k, v, dout, dlse, mask, list(roundings or []), score_mods, blocks, **options)
        orders = [torch.arange(q.shape[-1] - 1, -1, -1, device=q.device)]
        # a gradient summed over all pairs of a block or head has few elements, which one order may hit by chance
        orders += _orders(q.shape[-1], q.device) if score_mods else []
        for order in orders:
            back = order.argsort()
            for result in _by_both_methods(
                q[..., order], k[..., order], v, dout, dlse, mask, [], score_mods, blocks, **options
            ):
                result[2], result[3] = result[2][..., back], result[3][..., back]
                found.append(result)
    outs, lses, *grads = map(list, zip(*found, strict=True))
    if q.dtype in (torch.float32, torch.float64):
        outs.append(_from_the_last_key(q.detach(), k.detach(), v.detach(), mask, **all_options))
    # lse does not depend on the values
    q, k, no_values = q.detach(), k.detach(), v.detach()[..., :0]
    for order in _orders(q.shape[-1], q.device):
        lses.append(reference.attention(q[..., order], k[..., order], no_values, mask, **all_options)[1])
    return [outs, lses, *grads]


def _from_the_last_key(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """The reference's out, with weights times values summed from the last key to the first."""
    unit_vectors = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
    weights, _ = reference.attention(q, k, unit_vectors, mask, **options)
    # values that no query attends to may be NaN
    values = v.nan_to_num(0.0).repeat_interleave(q.shape[1] // max(1, k.shape[1]), dim=1)
    return weights.flip(-1) @ values.flip(-2)


def _orders(head_dim: int, device: torch.device) -> list[Tensor]:
    """ORDERS permutations of the components of q and k."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(head_dim, generator=generator).to(device) for _ in range(ORDERS)]


def _by_both_methods(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor,
    mask: Tensor | None,
    other_outs: list[Tensor | int],
    score_mods: Mapping[str, Tensor],
    blocks: BlockOfPairs | None,
    **options: Any,
) -> list[list[Tensor]]:
    """Results by autograd, by the backward of FlashAttention, and by the latter with other values of out."""
    leaves, by_autograd = _by_autograd(q, k, v, dout, dlse, mask, score_mods, blocks, **options)
    out, lse = by_autograd[:2]
    score_mods = dict(zip(score_mods, leaves[3:], strict=True))
    dlse = dlse.to(lse.dtype)
    found = [by_autograd]
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    for rounded in (out, *other_outs):
        if is_half or not isinstance(rounded, int):
            found.append(_by_flash_attention(leaves, rounded, lse, dout, dlse, mask, score_mods, blocks, **options))
        else:
            stepped = torch.nextafter(lse, lse.new_tensor(torch.inf if rounded % 2 else -torch.inf))
            stepped = stepped.where(lse.isfinite(), lse)
            grads = _by_flash_attention(leaves, out, stepped, dout, dlse, mask, score_mods, blocks, **options)[2:]
            found.append([out, lse, *grads])
    return found


def _by_autograd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor,
    mask: Tensor | None,
    score_mods: Mapping[str, Tensor],
    blocks: BlockOfPairs | None,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v and the score mods as leaves; the reference's out and lse, and its gradients by autograd."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v, *score_mods.values())]
    mods = dict(zip(score_mods, leaves[3:], strict=True))
    out, lse = reference.attention(*leaves[:3], mask, **options, **_reference_options(mods, blocks))
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse.to(lse.dtype)))
    return leaves, [out.detach(), lse.detach(), *grads]


def _reference_options(score_mods: Mapping[str, Tensor], blocks: BlockOfPairs | None) -> dict[str, Tensor]:
    """Score mods as options of reference.attention, which takes a bias of pairs instead of block_bias."""
    options = dict(score_mods)
    if blocks is not None and "block_bias" in options:
        options["bias"] = bias_of_pairs(options.pop("block_bias"), blocks)
    return options


def _by_flash_attention(
    leaves: list[Tensor],
    out: Tensor | int,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
    mask: Tensor | None,
    score_mods: Mapping[str, Tensor],
    blocks: BlockOfPairs | None,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    causal: bool = False,
    kv_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> list[Tensor]:
    """out, lse and the gradients of the leaves by the backward of FlashAttention: lse and delta are constants.

    If `out` is a number, it seeds the roundings of kernels in half types. out comes from weights that are rounded
    before normalization by a running maximum, and tensor cores read rounded operands: the weights for dv, ds for dq and
    dk. Below 6e-5 float16 has fixed steps, and a gradient may consist of these roundings alone.
    """
    q, k, v = leaves[:3]
    dtype, kv_len, group = lse.dtype, k.shape[2], q.shape[1] // max(1, k.shape[1])
    keys, values = k, v
    if kv_lengths is not None:
        is_missing = (torch.arange(kv_len, device=q.device) >= kv_lengths[:, None])[:, None, :, None]
        keys, values = keys.masked_fill(is_missing, 0), values.masked_fill(is_missing, 0)
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    attends = reference._attending_pairs(q, kv_len, mask, causal, kv_lengths)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mods = _reference_options(score_mods, blocks)
    sinks = mods.pop("sinks", None)
    rounds_operands = isinstance(out, int)
    if mods or softcap is not None or rounds_operands:
        modifiers = [mods.get(name) for name in ("alibi_slopes", "bias", "pair_bias")]
        products = (q.to(dtype) * scale) @ keys.to(dtype).mT
        if rounds_operands:
            products.register_hook(lambda ds: ds.to(q.dtype).to(dtype))
        scores = reference._modified(products, softcap, *modifiers) * math.log2(math.e)
    else:
        scores = (q.to(dtype) * (scale * math.log2(math.e))) @ keys.to(dtype).mT
    total = lse.masked_fill(lse == -torch.inf, 0)[..., None] * math.log2(math.e)
    weights = torch.exp2((scores - total).masked_fill(~attends, -torch.inf))
    kept = weights
    if dropout_p > 0:
        kept = weights * reference._keep(seed, weights.shape, dropout_p) / reference.philox.kept_share(dropout_p)
    if isinstance(out, int):
        largest = weights.detach().amax(dim=-1, keepdim=True)
        later = torch.rand(largest.shape, generator=torch.Generator().manual_seed(out)).to(largest)
        largest = largest.masked_fill(largest == 0, 1) * torch.exp2(later)
        out = ((kept.detach() / largest).to(v.dtype).to(dtype) @ values.detach().to(dtype) * largest).to(q.dtype)
    delta = (dout.to(dtype) * out.to(dtype)).sum(dim=-1) - dlse.masked_fill(lse == -torch.inf, 0)
    # kernels keep dout v^T in float32
    product = (_rounded(kept, q.dtype) if rounds_operands else kept) @ values.to(dtype)
    results, grads = [product, weights.sum(dim=-1)], [dout.to(dtype), -delta]
    if sinks is not None:
        # a sink has no value, so the gradient of its weight is -delta
        results.append(torch.exp2(sinks[:, None] * math.log2(math.e) - total[..., 0]))
        grads.append(-delta)
    return [out, lse, *torch.autograd.grad(results, leaves, grads)]


def _rounded(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights rounded to a smaller type; the gradient passes through unchanged."""
    return weights + (weights.detach().to(dtype).to(weights.dtype) - weights.detach())

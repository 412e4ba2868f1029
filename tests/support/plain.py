"""How far off is an honest computation in the same type? Dense PyTorch, in several forms, for closeness.assert_as_accurate.

Knows the reference, and the textbook form of flash attention's backward, which every backend must use to stay within its
memory and which rounds elsewhere than autograd through a softmax does:

    forward    s = scale q k^T   lse = log sum exp s   out = softmax(s) v
    backward   p = exp(s - lse)   delta = rowsum(dout out) - dlse   ds = p (dout v^T - delta)

A large lse costs p digits, and where one key has nearly all of the weight, dout v^T - delta cancels, and with it what rounding
left of out; a softmax keeps all of that. Exponentials are powers of two, as on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blocksparse_flash import BlockLayout, reference

ORDERS = 4
ROUNDINGS = 8


def block_of_pairs(layout: BlockLayout) -> Tensor:
    """Which stored block each pair lies in: int64 (batch | 1, heads | 1, q_len, kv_len), layout.capacity where none is."""
    (block_q, block_kv), capacity = layout.block_size, layout.capacity
    found = torch.full(layout.shape, capacity)
    for batch, head in torch.cartesian_prod(*map(torch.arange, layout.shape[:2])).tolist():
        for row, (begin, end) in enumerate(layout.indptr[batch, head].unfold(0, 2, 1).tolist()):
            for block in range(begin, end):
                col = int(layout.indices[block])
                rows = slice(row * block_q, (row + 1) * block_q)
                found[batch, head, rows, col * block_kv : (col + 1) * block_kv] = block
    return found


def of_pairs(block_bias: Tensor, blocks: Tensor) -> Tensor:
    """A bias of blocks as one of pairs, that broadcasts to (batch, heads, q_len, kv_len); blocks as block_of_pairs."""
    padded = torch.nn.functional.pad(block_bias, (0, 1))
    return padded[blocks.to(padded.device)] if padded.dim() == 1 else padded[..., blocks[0, 0].to(padded.device)]


def results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor,
    mask: Tensor | None = None,
    *,
    added: Mapping[str, Tensor] | None = None,
    blocks: Tensor | None = None,
    roundings: Sequence[int] | None = None,
    **options: Any,
) -> list[list[Tensor]]:
    """The values that out, lse, dq, dk and dv may honestly take: for each a list, the reference's first.

    added    sinks, alibi_slopes, block_bias, as far as there are: their gradients follow, in this order
    blocks   of block_bias, as block_of_pairs
    roundings  numbers that draw how kernels may round in half types; None: ROUNDINGS of them where something is added, else none.
               In float32 the last bit of lse: an odd number rounds it up, an even one down

    By autograd through the reference, and by the textbook, in the type of q: of half types the textbook twice, with the
    reference's out and with one from float32 weights; of the others all twice, the products of q and k summed from the
    first and from the last component, and where there is something added in ORDERS more orders. lse in ORDERS more orders of that sum: it rounds nowhere else, and where a row has
    few keys one order alone is near by accident.

    dout, dlse  gradients of out and lse; lse has at least float32, and is computed from q and k in that type
    options     those of reference.attention
    """
    added = added or {}
    given = options | _as_reference_has(added, blocks)
    if q.dtype in (torch.float16, torch.bfloat16):
        wide = (tensor.detach().float() for tensor in (q, k, v))
        others: list[Tensor | int] = [reference.attention(*wide, mask, **given)[0].to(q.dtype)]
        # a gradient that is a sum over all pairs of a block or a head may be little else than what rounding left of out, in
        # which one rounding is near by accident
        others += roundings if roundings is not None else range(ROUNDINGS if added else 0)
        found = _both(q, k, v, dout, dlse, mask, others, added, blocks, **options)
    else:
        # lse rounds every row with as many keys alike, so that one lse is near by accident
        found = _both(q, k, v, dout, dlse, mask, list(roundings or []), added, blocks, **options)
        orders = [torch.arange(q.shape[-1] - 1, -1, -1, device=q.device)]
        # a gradient that is a sum over all pairs of a block or a head has few numbers, near by accident in one order or two
        orders += _orders(q.shape[-1], q.device) if added else []
        for order in orders:
            back = order.argsort()
            for result in _both(q[..., order], k[..., order], v, dout, dlse, mask, [], added, blocks, **options):
                result[2], result[3] = result[2][..., back], result[3][..., back]
                found.append(result)
    outs, lses, *grads = map(list, zip(*found, strict=True))
    for order in _orders(q.shape[-1], q.device):
        lses.append(reference.attention(q[..., order].detach(), k[..., order].detach(), v.detach(), mask, **given)[1])
    return [outs, lses, *grads]


def _orders(head_dim: int, device: torch.device) -> list[Tensor]:
    """ORDERS orders of the sum over the components of q and k."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(head_dim, generator=generator).to(device) for _ in range(ORDERS)]


def _both(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor,
    mask: Tensor | None,
    other_outs: list[Tensor | int],
    added: Mapping[str, Tensor],
    blocks: Tensor | None,
    **options: Any,
) -> list[list[Tensor]]:
    """By autograd, by the textbook, and by the textbook with other outs."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    added = {name: tensor.detach().requires_grad_() for name, tensor in added.items()}
    out, lse = reference.attention(*leaves, mask, **options, **_as_reference_has(added, blocks))
    leaves += added.values()
    dlse = dlse.to(lse.dtype)
    by_autograd = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    out, lse = out.detach(), lse.detach()
    found = [[out, lse, *by_autograd]]
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    for rounded in (out, *other_outs):
        if is_half or not isinstance(rounded, int):
            found.append(_textbook(leaves, rounded, lse, dout, dlse, mask, added, blocks, **options))
        else:
            stepped = torch.nextafter(lse, lse.new_tensor(torch.inf if rounded % 2 else -torch.inf))
            stepped = stepped.where(lse.isfinite(), lse)
            grads = _textbook(leaves, out, stepped, dout, dlse, mask, added, blocks, **options)[2:]
            found.append([out, lse, *grads])
    return found


def _as_reference_has(added: Mapping[str, Tensor], blocks: Tensor | None) -> dict[str, Tensor]:
    """The reference knows pairs, not blocks."""
    given = dict(added)
    if blocks is not None and "block_bias" in given:
        given["bias"] = of_pairs(given.pop("block_bias"), blocks)
    return given


def _textbook(
    leaves: list[Tensor],
    out: Tensor | int,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
    mask: Tensor | None,
    added: Mapping[str, Tensor],
    blocks: Tensor | None,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    causal: bool = False,
    kv_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> list[Tensor]:
    """out, lse and the gradients of the leaves, by autograd too: constants in place of lse and delta leave the textbook's
    products to it. For a number, kernels' roundings of half types: out of weights that are rounded before they are normalised,
    with a maximum so far (the number draws how much larger it will be), and the operands that tensor cores read in the type of
    q, the weights under dv and ds under dq and dk. Below 6e-5 float16 has fixed steps, and there the sum of these roundings is
    all that is left of a gradient.
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
    given = _as_reference_has(added, blocks)
    sinks = given.pop("sinks", None)
    rounds_operands = isinstance(out, int)
    if given or softcap is not None or rounds_operands:
        changed = [given.get(name) for name in ("alibi_slopes", "bias")]
        products = (q.to(dtype) * scale) @ keys.to(dtype).mT
        if rounds_operands:
            products.register_hook(lambda ds: ds.to(q.dtype).to(dtype))
        scores = reference._modified(products, softcap, *changed) * math.log2(math.e)
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
        # a key without a value: its weight has the gradient -delta alone
        results.append(torch.exp2(sinks[:, None] * math.log2(math.e) - total[..., 0]))
        grads.append(-delta)
    return [out, lse, *torch.autograd.grad(results, leaves, grads)]


def _rounded(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights in a smaller type, with the gradient of the weights themselves."""
    return weights + (weights.detach().to(dtype).to(weights.dtype) - weights.detach())

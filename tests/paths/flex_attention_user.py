"""A user of FlexAttention converts a mask_mod to a layout and compares with dense attention."""

import torch

from blocksparse_flash import BlockLayout, attention


def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 200) | (kv_idx < 4))


n = 1000
layout = BlockLayout.from_predicate(lambda q, kv: mask_mod(0, 0, q, kv), n, n, block_size=128)
q, k, v = torch.randn(3, 1, 4, n, 64).unbind()
out = attention(q, k, v, layout)
mask = mask_mod(0, 0, torch.arange(n)[:, None], torch.arange(n))
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)

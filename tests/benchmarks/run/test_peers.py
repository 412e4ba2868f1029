"""Every adapter gets the same mask; stand-ins replace the packages."""

from __future__ import annotations

import itertools
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.run import attention as benchmark
from benchmarks.run import patterns, peers, sweeps
from benchmarks.run.peers import Peer, Shape
from blocksparse_flash import interop
from tests.support.pattern_cases import CASES, DIM, HEADS, N, inputs, mask_of, plain


def flex_by_lists(*, is_autotuned: bool = False) -> Any:
    """flex_attention as its kernels compute it: full blocks whole, partial ones by mask_mod, no others."""

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: Any = None, kernel_options: Any = None
    ) -> torch.Tensor:
        length = q.shape[2]
        if block_mask is None:
            return plain(q, k, v, torch.ones(length, length, dtype=torch.bool))
        side, position = block_mask.BLOCK_SIZE[0], torch.arange(length)
        assert is_autotuned == (side < 128)
        if is_autotuned:
            assert kernel_options == {"fwd_BLOCK_M": side, "fwd_BLOCK_N": side}
        zero = torch.zeros((), dtype=torch.int64)
        pairs = torch.vmap(torch.vmap(block_mask.mask_mod, (None, None, None, 0)), (None, None, 0, None))(
            zero, zero, position, position
        )
        mask = torch.zeros(length, length, dtype=torch.bool)
        for counts, cols, allowed in (
            (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, torch.ones_like(mask)),
            (block_mask.kv_num_blocks, block_mask.kv_indices, pairs),
        ):
            for row, count in enumerate(counts[0, 0].tolist()):
                for col in cols[0, 0, row, :count].tolist():
                    block = slice(row * side, row * side + side), slice(col * side, col * side + side)
                    mask[block] |= allowed[block]
        return plain(q, k, v, mask)

    return call


@pytest.mark.parametrize("peer", [peers.ours("eager"), peers.flex(flex_by_lists)], ids=lambda peer: peer.provider)
def test_all_patterns_reach_the_call_as_they_are(peer: Peer) -> None:
    q, k, v = inputs()
    block_sizes = [case for case in sweeps.over_block_size(N) if case.pattern.block_size in (32, 128, 256)]
    for case in [*CASES, *block_sizes]:
        call = peer.prepare(case.pattern, Shape(1, HEADS, DIM, "cpu"))
        torch.testing.assert_close(call(q, k, v), plain(q, k, v, mask_of(case.pattern)), msg=case.name)


@pytest.mark.parametrize("peer", [peers.ours("eager"), peers.flex(flex_by_lists)], ids=lambda peer: peer.provider)
def test_selected_masks_keep_the_highest(peer: Peer) -> None:
    q, k, v = inputs()
    scores = torch.tensor([[1.0, 3, 2, 0], [5, 1, 2, 9], [0, 1, 2, 3], [7, 8, 1, 0]])
    blocks = np.array([[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1], [1, 1, 0, 0]], dtype=bool)
    assert peer.select is not None
    found = peer.select(scores, 2)(q, k, v)
    torch.testing.assert_close(found, plain(q, k, v, mask_of(patterns.Pattern("by hand", blocks))))


def test_kernels_of_sdpa_refuse_block_layouts() -> None:
    peer, shape = peers.sdpa("math", "sdpa", "MATH"), Shape(1, HEADS, DIM, "cpu")
    assert [case.name for case in CASES if peer.refuses(case.pattern, shape) is None] == ["dense", "causal"]
    q, k, v = inputs()
    for case in CASES[:2]:
        torch.testing.assert_close(peer.prepare(case.pattern, shape)(q, k, v), plain(q, k, v, mask_of(case.pattern)))


def test_math_is_timed_with_few_scores() -> None:
    """Its backward does not fit into a GPU with 2^33 scores, and would end the whole run."""
    math, cudnn = peers.sdpa("math", "sdpa", "MATH"), peers.sdpa("cudnn", "cudnn", "CUDNN_ATTENTION")
    dense, longer = (patterns.Pattern("dense", np.ones((side, side), dtype=bool)) for side in (32, 128))
    few, many = Shape(1, 32, 64, "cuda"), Shape(2, 32, 64, "cuda")
    assert math.refuses(dense, few) is None and cudnn.refuses(longer, many) is None
    assert math.refuses(dense, many) == "keeps all scores in memory: timed with up to 2^29 of them only"
    assert math.refuses(longer, few) is not None


def test_hopper_is_compared_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "is_installed", lambda package: package == "natten")
    there, absent = peers.peers((9, 0))
    assert [peer.backend for peer in there if peer.is_ours] == ["hopper", "triton"]
    assert [peer.backend for peer in peers.peers((8, 0))[0] if peer.is_ours] == ["triton"]
    assert there[-1].provider == "natten" and len(absent) == len(peers.PACKAGES) - 1


def test_a_package_is_looked_for_without_importing_it() -> None:
    assert peers.is_installed("email.mime") and "email.mime.audio" not in sys.modules
    assert not peers.is_installed("no_such_package.at_all") and not peers.is_installed("email.no_such_module")


# ---- packages, by what their documentation says of their arguments ----


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = types.ModuleType(name)
    for word, function in functions.items():
        setattr(module, word, function)
    monkeypatch.setitem(sys.modules, name, module)


def heads_first(function: Any) -> Any:
    """A function of (batch, heads, length, head_dim) as one of (batch, length, heads, head_dim)."""
    return lambda q, k, v, *rest: function(*(x.transpose(1, 2) for x in (q, k, v)), *rest).transpose(1, 2)


def blocks_to_mask(rows: list[list[int]], length: int, side: int = 128) -> torch.Tensor:
    blocks = np.zeros((length // side,) * 2, dtype=bool)
    for row, cols in enumerate(rows):
        blocks[row, cols] = True
    return mask_of(patterns.Pattern("lists", blocks, block_size=side))


def fake_flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(q, k, v, causal, tensors, backward):
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
        if tensors is not None:
            assert tensors.mask_block_cnt.sum() == 0
            lists = [
                [
                    index[:count].tolist()
                    for index, count in zip(side.full_block_idx[0, 0], side.full_block_cnt[0, 0], strict=True)
                ]
                for side in (tensors, backward)
            ]
            mask = blocks_to_mask(lists[0], q.shape[2])
            assert torch.equal(blocks_to_mask(lists[1], q.shape[2]), mask.T)
        return plain(q, k, v, mask & torch.ones_like(mask).tril() if causal else mask)

    def flash_attn_func(q, k, v, causal=False, block_sparse_tensors=None, block_sparse_tensors_bwd=None):
        return heads_first(of)(q, k, v, causal, block_sparse_tensors, block_sparse_tensors_bwd), None

    fake(monkeypatch, "flash_attn")
    fake(monkeypatch, "flash_attn.cute", flash_attn_func=flash_attn_func)
    fake(monkeypatch, "flash_attn.cute.block_sparsity", BlockSparseTensorsTorch=interop.BlockSparseTensors)


def fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        def __init__(self, workspace):
            assert workspace.dtype == torch.uint8

        def plan(
            self,
            indptr,
            indices,
            M,
            N,
            R,
            C,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            mask=None,
            packed_mask=None,
            q_data_type=None,
        ):
            assert (M, N, num_qo_heads, num_kv_heads, head_dim) == (N_TOKENS, N_TOKENS, HEADS, HEADS, DIM) and R == C
            assert mask is None and packed_mask is None
            ends = indptr.tolist()
            self.mask = blocks_to_mask([indices[a:b].tolist() for a, b in itertools.pairwise(ends)], M, R)

        def run(self, q, k, v):
            return plain(*(x.transpose(0, 1) for x in (q, k, v)), self.mask).transpose(0, 1)

    def single_prefill_with_kv_cache(q, k, v, causal=False):
        mask = torch.ones(len(q), len(k), dtype=torch.bool)
        return plain(*(x.transpose(0, 1) for x in (q, k, v)), mask.tril() if causal else mask).transpose(0, 1)

    N_TOKENS = N
    fake(
        monkeypatch,
        "flashinfer",
        BlockSparseAttentionWrapper=Wrapper,
        single_prefill_with_kv_cache=single_prefill_with_kv_cache,
    )


def fake_block_sparse_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(
        q, k, v, cu_q, cu_k, head_mask_type, streaming_info, base_blockmask, max_q, max_k, p_dropout, is_causal=False
    ):
        assert cu_q.tolist() == cu_k.tolist() == [0, N] and (max_q, max_k, p_dropout) == (N, N, 0.0)
        assert head_mask_type.tolist() == [1] * HEADS and base_blockmask.shape == (1, HEADS, N // 128, N // 128)
        out = torch.empty_like(q)
        for head in range(HEADS):
            mask = blocks_to_mask([row.nonzero()[:, 0].tolist() for row in base_blockmask[0, head]], N)
            out[:, head] = plain(
                q[:, head], k[:, head], v[:, head], mask & torch.ones_like(mask).tril() if is_causal else mask
            )
        return out

    fake(monkeypatch, "block_sparse_attn", block_sparse_attn_func=function)


def lists_to_mask(cols: torch.Tensor, counts: torch.Tensor, side: int) -> torch.Tensor:
    """Of the first head; all heads have the same lists."""
    assert cols.dtype == counts.dtype == torch.int32 and cols.is_contiguous() and counts.is_contiguous()
    assert torch.equal(cols, cols[:1, :1].expand_as(cols)) and cols.shape[:3] == counts.shape
    rows = [row[:count].tolist() for row, count in zip(cols[0, 0], counts[0, 0].tolist(), strict=True)]
    return blocks_to_mask(rows, N, side)


def fake_cudnn_block_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(cols, block_size, counts):
        every = torch.full(cols.shape[:3], cols.shape[3], dtype=torch.int32)
        return lists_to_mask(cols, every if counts is None else counts, block_size)

    def forward(q, k, v, cols, sparse_block_size, q2k_block_nums=None):
        out = plain(q, k, v, listed(cols, sparse_block_size, q2k_block_nums))
        return {"o_tensor": out, "lse_tensor": torch.ones(3)}

    def backward(dout, q, k, v, out, lse, cols, sparse_block_size, q2k_block_nums=None):
        assert torch.equal(lse, torch.ones(3)) and torch.equal(
            out, forward(q, k, v, cols, sparse_block_size, q2k_block_nums)["o_tensor"]
        )
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = forward(*leaves, cols, sparse_block_size, q2k_block_nums)["o_tensor"]
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), torch.autograd.grad(out, leaves, dout), strict=True))

    fake(monkeypatch, "cudnn")
    fake(monkeypatch, "cudnn.block_sparse_attention")
    functions = {"block_sparse_attention_forward": forward, "block_sparse_attention_backward": backward}
    fake(monkeypatch, "cudnn.block_sparse_attention.api", **functions)


def fake_fastvideo(monkeypatch: pytest.MonkeyPatch) -> None:
    def block_sparse_attn_triton(q, k, v, cols, counts, sizes):
        assert sizes.tolist() == [64] * (N // 64) and sizes.dtype == torch.int32
        return plain(q, k, v, lists_to_mask(cols, counts, 64)), None

    fake(monkeypatch, "fastvideo_kernel")
    fake(monkeypatch, "fastvideo_kernel.block_sparse_attn", block_sparse_attn_triton=block_sparse_attn_triton)


def fake_xformers(monkeypatch: pytest.MonkeyPatch) -> None:
    class LowerTriangularMask:
        pass

    def memory_efficient_attention(q, k, v, attn_bias=None):
        mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool)
        assert attn_bias is None or isinstance(attn_bias, LowerTriangularMask)
        return heads_first(plain)(q, k, v, mask if attn_bias is None else mask.tril())

    fake(monkeypatch, "xformers")
    fake(
        monkeypatch,
        "xformers.ops",
        LowerTriangularMask=LowerTriangularMask,
        memory_efficient_attention=memory_efficient_attention,
    )


def fake_natten(monkeypatch: pytest.MonkeyPatch) -> None:
    def na1d(q, k, v, kernel_size, stride):
        """Queries of a stride share the window around their leader, the one in the middle, moved inside (GNA, 3)."""
        length = q.shape[1]
        mask = torch.zeros(length, length, dtype=torch.bool)
        for query in range(length):
            leader = min(query // stride * stride + stride // 2, length - 1)
            first = min(max(leader - kernel_size // 2, 0), length - kernel_size)
            mask[query, first : first + kernel_size] = True
        return heads_first(plain)(q, k, v, mask)

    fake(monkeypatch, "natten", na1d=na1d)


FAKES = {
    "flash_attention_4": fake_flash_attention_4,
    "flashinfer": fake_flashinfer,
    "block_sparse_attention": fake_block_sparse_attention,
    "cudnn_block_sparse": fake_cudnn_block_sparse,
    "fastvideo": fake_fastvideo,
    "xformers": fake_xformers,
    "natten": fake_natten,
}


@pytest.mark.parametrize("peer", peers.PACKAGES, ids=lambda peer: peer.provider)
def test_packages_get_the_same_mask(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    FAKES[peer.provider](monkeypatch)
    shape = Shape(1, HEADS, DIM, "cpu")
    q, k, v = inputs(tokens_first=peer.tokens_first)
    cases = [*CASES, *(case for case in sweeps.over_fine(N) if case.pattern.length == N)]
    able = [case for case in cases if peer.refuses(case.pattern, shape) is None]
    assert able
    for case in able:
        found = peer.prepare(case.pattern, shape)(q, k, v)
        torch.testing.assert_close(found, plain(q, k, v, mask_of(case.pattern)), msg=case.name)


@pytest.mark.parametrize("name", ["local", "random"])
def test_cudnn_has_gradients_for_heads_of_128(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a window have different counts, random ones the same."""
    fake_cudnn_block_sparse(monkeypatch)
    (peer,) = (each for each in peers.PACKAGES if each.provider == "cudnn_block_sparse")
    (pattern,) = (case.pattern for case in CASES if case.name == name)
    run = benchmark.Run(1, HEADS * 128, 128, Path(), device="cpu")
    leaves = [x.detach().float().requires_grad_() for x in benchmark.inputs(run, N)[0]]
    dout = torch.randn_like(leaves[0])
    found = torch.autograd.grad(peer.prepare(pattern, run.shape)(*leaves), leaves, dout)
    torch.testing.assert_close(found, torch.autograd.grad(plain(*leaves, mask_of(pattern)), leaves, dout))
    narrow = peer.prepare(pattern, Shape(1, HEADS, DIM, "cpu"))(*(x.requires_grad_() for x in inputs()))
    assert not narrow.requires_grad


def test_windows_of_natten_are_whole_blocks_in_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_natten(monkeypatch)
    pattern = patterns.neighborhood(2048)
    q, k, v = inputs(2048)
    found = peers.PACKAGES[-1].prepare(pattern, Shape(1, HEADS, DIM, "cpu"))(q, k, v)
    torch.testing.assert_close(found, plain(q, k, v, mask_of(pattern)))


def test_tokens_first_is_an_order_in_memory() -> None:
    run = benchmark.Run(2, HEADS * DIM, DIM, Path(), device="cpu")
    (usual, *_), dout = benchmark.inputs(run, 256)
    (other, *_), other_dout = benchmark.inputs(run, 256, tokens_first=True)
    assert torch.equal(usual, other) and torch.equal(dout, other_dout)
    assert usual.is_contiguous() and other.transpose(1, 2).is_contiguous()


# ---- rebuilt masks ----


@pytest.mark.parametrize("case", [case for case in CASES if not case.pattern.causal], ids=lambda case: case.name)
def test_a_rebuilt_mask_of_flex_attention_is_the_pattern(case: Any) -> None:
    """create_block_mask, which evaluates every pair, finds the blocks of the table, and no partial one."""
    mask = peers.flex_table_mask(case.pattern, "cpu", is_compiled=False)
    assert np.array_equal(mask.to_dense()[0, 0].numpy().astype(bool), case.pattern.blocks)
    assert not mask.kv_num_blocks.any() and mask.BLOCK_SIZE == (case.pattern.block_size,) * 2


def test_flex_attention_rebuilds_its_mask_in_two_ways() -> None:
    assert [*peers.flex().rebuilds] == ["new mask, create_block_mask", "new mask, create_block_mask, compiled"]
    assert not peers.ours("triton").rebuilds

"""benchmarks/attention.py and what it stands on: are all given the same mask, is wrong work caught, is each figure a line?"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import attention as benchmark
from benchmarks import correctness, measure, patterns, peers, sweeps
from benchmarks.peers import Peer, Shape

N, HEADS, DIM = 512, 2, 16
CASES = list(sweeps.grid(N))
TIMES = dict.fromkeys(("ms", "ms_p20", "ms_p80"), 2.0)


def inputs(length: int = N, batch: int = 1, *, tokens_first: bool = False) -> list[torch.Tensor]:
    run = benchmark.Run(batch, HEADS * DIM, DIM, Path(), device="cpu")
    return [x.detach().float() for x in benchmark.inputs(run, length, tokens_first=tokens_first)[0]]


def mask_of(pattern: patterns.Pattern) -> torch.Tensor:
    """bool (length, length), pair by pair from the blocks."""
    blocks = np.kron(pattern.blocks, np.ones((pattern.block_size,) * 2, dtype=bool))
    mask = torch.from_numpy(blocks)
    return mask & torch.ones_like(mask).tril() if pattern.causal else mask


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention by its definition; mask (queries, keys), True attends."""
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made, not timed: there is no GPU."""

    def called(call: Any, **options: Any) -> dict[str, float]:
        for _ in range(options.get("warmup", 0) + options.get("runs", 1)):
            call()
        return TIMES

    monkeypatch.setattr(measure, "milliseconds", called)
    monkeypatch.setattr(measure, "wall_milliseconds", called)
    monkeypatch.setattr(measure, "first_call_milliseconds", lambda call: call() is None or 1.0)
    monkeypatch.setattr(measure, "peak_bytes", lambda call: call() is None or 7)
    monkeypatch.setattr(measure, "environment", lambda: dict.fromkeys(("device", "torch", "triton", "commit"), "here"))


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---- cases ----


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_flops_count_stored_blocks(case: sweeps.Case) -> None:
    pattern, counted = case.pattern, 0
    for row in range(len(pattern.blocks)):
        for col in range(len(pattern.blocks)):
            # q k^T and p v: 128 x 128 x head_dim multiplications and additions each
            counted += 2 * 2 * 128 * 128 * DIM if pattern.blocks[row, col] else 0
    assert pattern.flops(3, HEADS, DIM) == 3 * HEADS * counted and pattern.length == N


@pytest.mark.parametrize("length", [512, 2048, 4096])
def test_neighborhoods_are_those_of_the_definition(length: int) -> None:
    """A window of 9 blocks around each block, moved inside at the ends; all of a sequence that is shorter."""
    blocks = patterns.neighborhood(length).blocks
    n_blocks = length // 128
    for row in range(n_blocks):
        nearest = sorted(range(n_blocks), key=lambda col: (abs(col - row), col))
        window = {col for col in nearest if abs(col - row) <= 4} | set(nearest[: min(9, n_blocks)])
        assert set(np.flatnonzero(blocks[row])) == window


def test_sweeps_hold_fixed_what_they_say() -> None:
    by_length = [case for case in sweeps.over_length(16384) if case.name == "local"]
    assert [case.pattern.length for case in by_length] == [2048, 4096, 8192, 16384]
    # 9 blocks of keys, but near the ends
    assert all(case.pattern.blocks.sum(1).max() == 9 for case in by_length)
    assert max(case.pattern.length for case in sweeps.over_length(2**18) if case.name == "dense") == sweeps.DENSE_UP_TO
    densities = [case.pattern.density for case in sweeps.over_density(16384)]
    assert densities[0] == 1 and np.allclose(densities[1:], sweeps.DENSITIES, atol=1 / 128 / 2)
    for case in sweeps.over_block_size(4096):
        assert case.name.endswith(f", {case.pattern.block_size}") and case.pattern.length == 4096
        assert abs(case.pattern.density - sweeps.FIXED_DENSITY) < 0.07
    assert not np.array_equal(sweeps.changing(4096, seed=0).blocks, sweeps.changing(4096, seed=1).blocks)


def test_no_two_cases_share_a_line() -> None:
    for sweep in (None, *sweeps.NAMES):
        names = [(case.bench, case.name, case.pattern.length) for case in sweeps.cases(sweep, 2048)]
        assert len(names) == len(set(names)) and {bench for bench, *_ in names} == {sweep or "attention"}


# ---- who is compared ----


def flex_by_lists() -> Any:
    """flex_attention as its kernels compute it: full blocks whole, partial ones by mask_mod, no others."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: Any = None) -> torch.Tensor:
        length = q.shape[2]
        if block_mask is None:
            return plain(q, k, v, torch.ones(length, length, dtype=torch.bool))
        side, position = block_mask.BLOCK_SIZE[0], torch.arange(length)
        assert side % 128 == 0
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
                    mask[block] = allowed[block]
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


def blocks_to_mask(rows: list[list[int]], length: int) -> torch.Tensor:
    mask = torch.zeros(length, length, dtype=torch.bool)
    for row, cols in enumerate(rows):
        for col in cols:
            mask[row * 128 : row * 128 + 128, col * 128 : col * 128 + 128] = True
    return mask


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

    from blocksparse_flash import interop

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
            assert (M, N, R, C, num_qo_heads, num_kv_heads, head_dim) == (
                N_TOKENS,
                N_TOKENS,
                128,
                128,
                HEADS,
                HEADS,
                DIM,
            )
            assert mask is None and packed_mask is None
            ends = indptr.tolist()
            self.mask = blocks_to_mask([indices[a:b].tolist() for a, b in itertools.pairwise(ends)], M)

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
    "xformers": fake_xformers,
    "natten": fake_natten,
}


@pytest.mark.parametrize("peer", peers.PACKAGES, ids=lambda peer: peer.provider)
def test_packages_get_the_same_mask(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    FAKES[peer.provider](monkeypatch)
    shape = Shape(1, HEADS, DIM, "cpu")
    q, k, v = inputs(tokens_first=peer.tokens_first)
    able = [case for case in CASES if peer.refuses(case.pattern, shape) is None]
    assert able
    for case in able:
        found = peer.prepare(case.pattern, shape)(q, k, v)
        torch.testing.assert_close(found, plain(q, k, v, mask_of(case.pattern)), msg=case.name)


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


# ---- correctness ----


def spoiled(name: str) -> Any:
    """Attention of which one thing, of one token in the middle, is off by a twentieth of the largest."""

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.clone()

        @staticmethod
        def backward(_ctx, gradient):
            gradient = gradient.clone()
            gradient[0, 1, 100] += gradient.abs().max() / 20
            return gradient

    def call(q, k, v, mask):
        q, k, v = (Spoil.apply(x) if f"d{letter}" == name else x for letter, x in zip("qkv", (q, k, v), strict=True))
        out = plain(q, k, v, mask)
        return out + 0.05 * out.detach().abs().max() * (name == "out")

    return call


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_results_pass(case: sweeps.Case) -> None:
    tensors = tuple(x.bfloat16().requires_grad_() for x in inputs(batch=2))
    call = peers.ours("eager").prepare(case.pattern, Shape(2, HEADS, DIM, "cpu"))
    errors = correctness.worst_errors(call, tensors, case.pattern)
    assert [*errors] == ["out", "dq", "dk", "dv"] and max(errors.values()) < correctness.TOLERANCE


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_each_wrong_result_is_named(name: str) -> None:
    pattern = CASES[1].pattern
    tensors = tuple(x.requires_grad_() for x in inputs())
    call = functools.partial(spoiled(name), mask=mask_of(pattern))
    errors = correctness.worst_errors(call, tensors, pattern)
    assert [wrong for wrong, error in errors.items() if not error <= correctness.TOLERANCE] == [name]


def test_nan_is_wrong_and_an_output_without_gradients_is_compared_alone() -> None:
    pattern = CASES[0].pattern
    tensors = tuple(x.requires_grad_() for x in inputs())
    mask = mask_of(pattern)
    assert [*correctness.worst_errors(lambda q, k, v: plain(q, k, v, mask).detach(), tensors, pattern)] == ["out"]
    errors = correctness.worst_errors(lambda q, k, v: plain(q, k, v, mask) * float("nan"), tensors, pattern)
    assert not any(error <= correctness.TOLERANCE for error in errors.values())


def test_a_mask_that_is_another_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    run = benchmark.Run(1, HEADS * DIM, DIM, Path(), device="cpu")
    tensors, _ = benchmark.inputs(run, N)
    local, butterfly = (next(case.pattern for case in CASES if case.name == name) for name in ("butterfly", "random"))
    assert not benchmark.is_right(peers.ours("eager").prepare(local, run.shape), tensors, butterfly, "it")
    assert "it: WRONG, relative errors out" in capsys.readouterr().out


# ---- lines ----


@pytest.mark.usefixtures("untimed")
def test_a_line_is_written_for_each_figure(tmp_path: Path) -> None:
    run = benchmark.Run(1, HEADS * DIM, DIM, tmp_path / "lines.jsonl", device="cpu")
    case = next(case for case in CASES if case.name == "bigbird")
    benchmark.compare(case, [peers.ours("eager"), peers.sdpa("math", "sdpa", "MATH")], run)
    lines = written(run.out)
    assert all([*line] == measure.KEYS for line in lines)
    # math has no block layouts
    assert [(line["provider"], line["direction"]) for line in lines] == [
        ("blocksparse_flash", direction) for direction in ("mask", "fwd", "bwd")
    ]
    flops = case.pattern.flops(1, HEADS, DIM)
    assert [line["tflops"] for line in lines] == pytest.approx([None, flops * 0.5e-9, 2.5 * flops * 0.5e-9])


@pytest.mark.usefixtures("untimed")
def test_what_fails_is_named_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = benchmark.Run(1, HEADS * DIM, DIM, tmp_path / "lines.jsonl", device="cpu")

    def failing(error: Exception, provider: str = "someone") -> Peer:
        def prepare(pattern: patterns.Pattern, shape: Shape) -> Any:
            raise error

        return Peer(provider, "theirs", lambda pattern, shape: None, prepare)

    among = [
        failing(RuntimeError("no such head_dim\nat line 7")),
        failing(torch.OutOfMemoryError("full")),
        peers.ours("eager"),
    ]
    benchmark.compare(CASES[0], among, run)
    said = capsys.readouterr().out
    assert "refused, RuntimeError: no such head_dim; not timed" in said and "out of memory; not timed" in said
    assert {line["provider"] for line in written(run.out)} == {"blocksparse_flash"}
    with pytest.raises(ValueError, match="ours has no excuse"):
        benchmark.compare(CASES[0], [failing(ValueError("ours has no excuse"), "blocksparse_flash")], run)


@pytest.mark.usefixtures("untimed")
def test_changing_masks_are_timed_three_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = benchmark.Run(1, HEADS * DIM, DIM, tmp_path / "lines.jsonl", device="cpu")
    prepared: list[bytes] = []
    eager = peers.ours("eager")

    def prepare(pattern: patterns.Pattern, shape: Shape) -> Any:
        prepared.append(pattern.blocks.tobytes())
        return eager.prepare(pattern, shape)

    no_gradients = Peer(
        "forward", "only", lambda pattern, shape: None, lambda pattern, shape: lambda q, k, v: q.detach()
    )
    benchmark.change([no_gradients, eager._replace(prepare=prepare)], run, 1024, steps=4)
    lines = written(run.out)
    ways = ["same mask", "new mask from the host", "new mask selected on the GPU"]
    assert [line["pattern"] for line in lines] == ways and all(line["direction"] == "step" for line in lines)
    # one for all, and every step another
    assert len(prepared) == 1 + 4 and len(set(prepared)) == 4
    assert "has no gradients; not timed" in capsys.readouterr().out


@pytest.mark.usefixtures("untimed")
def test_the_matrix_product_is_a_line(tmp_path: Path) -> None:
    run = benchmark.Run(1, HEADS * DIM, DIM, tmp_path / "lines.jsonl", device="cpu")
    benchmark.matmul(run, side=64)
    (line,) = written(run.out)
    assert [*line] == measure.KEYS and line["tflops"] == pytest.approx(2 * 64**3 * 0.5e-9)


def test_wall_clock_is_median_and_percentiles(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 1.0, 5.0, 3.0, 2.0, 4.0])
    monkeypatch.setattr(measure, "first_call_milliseconds", lambda call: next(times))
    calls: list[int] = []
    found = measure.wall_milliseconds(lambda: calls.append(1), warmup=3, runs=6)
    assert calls == [1, 1, 1] and found == {"ms_p20": 2.0, "ms": 3.0, "ms_p80": 5.0}


def test_results_are_lines_of_these_keys() -> None:
    path = Path(benchmark.__file__).parent / "results" / "attention.jsonl"
    assert all([*line] == measure.KEYS for line in written(path))


# ---- the command ----


def test_defaults_are_what_the_help_says() -> None:
    options = benchmark.parsed([])
    assert (options.sweep, options.length, options.head_dims) == (None, 16384, [128, 64])
    assert benchmark.parsed(["--sweep", "length", "--length", "1048576"]).length == 1 << 20


@pytest.mark.parametrize(
    "arguments",
    [
        ["--length", "1000"], ["--head-dims", "128", "96"], ["--patterns", "spiral"], ["--sweep", "moon"],
        ["--patterns", "random", "--sweep", "change"], ["--patterns", "butterfly", "--sweep", "density"],
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parsed(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peers, "is_installed", lambda package: False)
    assert [peer.backend for peer in benchmark.chosen(["blocksparse_flash"], (8, 0))] == ["triton"]
    said = capsys.readouterr().out
    assert all(f"not installed, so not compared: {peer.provider} ({peer.package})" in said for peer in peers.PACKAGES)
    for name, why in (("natten", "is not installed"), ("nobody", "is not known")):
        with pytest.raises(SystemExit, match=f"{name} {why}"):
            benchmark.chosen([name], (8, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        benchmark.main([])

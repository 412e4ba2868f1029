"""Time model of a training step: link, attention and host. It chooses the number of messages and predicts speed-ups.

The rates were measured on two and four H200s (benchmarks/results/context_parallel.md) unless a comment says that they
are assumed. On other machines the choices hold as long as the ratios do, and no speed-up is predicted. `python -m
benchmarks.run.context_choices` compares the model with every measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..plan_format import TILE

# link: bytes per second received by a rank, and seconds per message
LINK, LATENCY = 278e9, 36e-6
# attention: operations per second, forward and backward (random blocks, 262,144 tokens)
FORWARD_RATE, BACKWARD_RATE = 563e12, 500e12
# seconds per tile of the longest row or column: 2 microseconds in one program, shared by up to 16
BACKWARD_TILE = 2e-6 / 16
# a backward computes five products per tile, a forward two
FORWARD_TILE = 0.4 * BACKWARD_TILE
# time for packing and joining, relative to the time on the link. Pass-KV: fitted together with HOST_OVERHEAD to 28
# steps (predictions are 0.79 to 1.18 times the measurements). Packed Ulysses: from local, 262,144 tokens
EXCHANGE_COPIES, ULYSSES_COPIES, DIRECT_COPIES = 0.26, 1.55, 0.1
# seconds per byte that an all-gather joins and splits; 30 measured steps are off by at most 18 %
GATHER_COPY = 1.14e-12
# host seconds per step of pass-KV or an all-gather; with pass-Q rows, PASS_Q_OVERHEAD per direction takes its place
HOST_OVERHEAD, PASS_Q_OVERHEAD = 0.43e-3, 0.45e-3
# host seconds of a further message with its launches, and of a further message of direct Ulysses
CHUNK, ULYSSES_CHUNK = 120e-6, 200e-6
MAX_CHUNKS = 4
# heads are sent directly from this many bytes of one head of a rank's tokens on: direct 9.6 ms, packed 16.4 ms at
# 16 MiB; 5.3 and 4.2 ms at 4 MiB
DIRECT_MIN_BYTES = 8 << 20
# fewest ranks on which today's pass-Q rows and direct Ulysses were timed
TIMED_RANKS = 4
# the timed machines: up to MAX_RANKS of this GPU in one host
GPU, MAX_RANKS = "NVIDIA H200", 4
# fewest and most tokens that were timed
TIMED_TOKENS = 65536, 262144
# copies: bytes per second (joining 2 GiB)
COPY_RATE = 4.05e12
# assumed: host seconds, forward and backward, for computing local rows separately
SPLITTING = 400e-6
# assumed: a further chunk must reduce the time to this share, since messages and attention compete for SMs
CHUNKING_MARGIN = 0.95


class Work(NamedTuple):
    """The work of the busiest rank in a forward of one sequence. Python ints, which torch.compile can read.

    received  heads * tokens, as in cost_model.Costs
    tiles     tiles of one head, over all batches and heads
    row, column  tiles of the longest row and column that one rank computes
    """

    received: int
    tiles: int
    row: int
    column: int


class Call(NamedTuple):
    """Sizes of a call: sequences, query heads, query heads per KV head, head dimension, bytes per element."""

    batch: int
    q_heads: int
    group: int
    head_dim: float
    element_bytes: int


def link(received: float, call: Call, copies: float) -> float:
    """Seconds to receive this many heads * tokens, including packing and unpacking."""
    return (1 + copies) * received * call.batch * call.head_dim * call.element_bytes / LINK


def attention(work: Work, call: Call, q_heads: float) -> tuple[float, float]:
    """Seconds of a forward and a backward of q_heads heads, at least those of the longest row or column."""
    products = call.batch * q_heads * work.tiles * 2 * TILE * TILE * call.head_dim
    forward = max(2 * products / FORWARD_RATE, work.row * FORWARD_TILE)
    backward = max(5 * products / BACKWARD_RATE, max(work.row, work.column * call.group) * BACKWARD_TILE)
    return forward, backward


def _pipelined(work: Work, call: Call, n_chunks: int, message: float, overhead: float) -> float:
    """Seconds of a step whose messages travel while others are computed. overhead: of each further message."""
    total = 0.0
    for compute in attention(work, call, call.q_heads / n_chunks):
        total += message + compute + (n_chunks - 1) * (max(message, compute) + overhead)
    return total


def pass_kv(work: Work, call: Call, n_chunks: int) -> float:
    """Seconds of a step with n_chunks messages."""
    message = LATENCY + link(work.received, call, EXCHANGE_COPIES) / n_chunks
    return _pipelined(work, call, n_chunks, message, CHUNK)


def pass_q(work: Work, call: Call) -> float:
    """Seconds that pass-Q rows add to a step; results can be returned only after their attention."""
    return 2 * (PASS_Q_OVERHEAD + 2 * LATENCY) + sum(attention(work, call, call.q_heads))


def packed_ulysses(work: Work, call: Call, n_ranks: int) -> float:
    """Seconds of a step of Ulysses with packed messages. work.tiles counts the tiles of all ranks."""
    return 2 * (2 * LATENCY + link(work.received, call, ULYSSES_COPIES)) + sum(
        attention(work, call, call.q_heads / n_ranks)
    )


def direct_ulysses(work: Work, call: Call, n_chunks: int) -> float:
    """Seconds of a step of Ulysses with n_chunks direct messages.

    call.q_heads counts the heads of a rank, work.tiles the tiles of all ranks.
    """
    message = 2 * LATENCY + link(work.received, call, DIRECT_COPIES) / n_chunks
    return _pipelined(work, call, n_chunks, message, ULYSSES_CHUNK)


def all_gather(work: Work, call: Call, keys: float) -> float:
    """Seconds of a step with one all-gather. keys: heads * tokens of the keys and values of all ranks."""
    n_bytes = keys * call.batch * call.head_dim * call.element_bytes
    return 2 * (2 * LATENCY + link(work.received, call, 0) + n_bytes * GATHER_COPY) + sum(
        attention(work, call, call.q_heads)
    )


def no_prediction_reason(machines: Sequence[tuple[str, str]]) -> str:
    """Why no speed-up is predicted for these ranks, each (GPU name or "cpu", host name); empty if one is."""
    others = sorted({device for device, _ in machines} - {GPU})
    n_hosts = len({host for _, host in machines})
    what = f"the model is fitted to up to {MAX_RANKS} {GPU} of one host"
    if others:
        return f"{what}, not to {', '.join(others)}"
    if n_hosts > 1:
        return f"{what}, not to a link between {n_hosts} hosts"
    return f"{what}, not to {len(machines)}" if len(machines) > MAX_RANKS else ""


def sends_heads_directly(n_tokens: int, head_dim: float, element_bytes: int) -> bool:
    """Whether Ulysses sends each head of a rank's tokens directly, without packing."""
    return n_tokens * head_dim * element_bytes >= DIRECT_MIN_BYTES


def splitting_pays(n_tokens: int, kv_heads: int, head_dim: int, element_bytes: int) -> bool:
    """Whether computing local rows separately repays its launches.

    It saves the copies that join own and received keys and values, and those that sum their gradients.
    """
    n_bytes = 2 * n_tokens * kv_heads * head_dim * element_bytes
    return 2 * 2 * n_bytes / COPY_RATE > SPLITTING


def best_chunks(work: Work, call: Call, kv_heads: int, seconds: Callable[[Work, Call, int], float] = pass_kv) -> int:
    """The number of messages, a divisor of the KV heads; more only if clearly faster, see CHUNKING_MARGIN.

    seconds  `pass_kv`, or `direct_ulysses` with the heads of a rank
    """
    best, shortest = 1, seconds(work, call, 1)
    for n_chunks in range(2, MAX_CHUNKS + 1):
        if kv_heads % n_chunks == 0 and (found := seconds(work, call, n_chunks)) < CHUNKING_MARGIN * shortest:
            best, shortest = n_chunks, found
    return best

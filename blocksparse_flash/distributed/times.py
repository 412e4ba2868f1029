"""How long would a layer take, and into how many messages is it best cut? A model of link, attention and host.

Knows how much a rank receives and computes. Must not know torch, layouts, owners or process groups. Rates are those measured on
two and four H200s (benchmarks/results/context_parallel.md), but where it says that they are assumed; on other machines the
choices are right as long as the ratios are, and no speed-up is predicted there. `python -m benchmarks.run.context_choices` prints
what the model chooses and predicts for every measured cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..kernels.plan_format import TILE

# bytes a second that a rank receives, and what a message takes besides
LINK, LATENCY = 278e9, 36e-6
# operations a second of attention: random blocks, 262,144 tokens, forward and backward
FORWARD_RATE, BACKWARD_RATE = 563e12, 500e12
# a rank walks its longest row, or the columns of a group of heads, tile by tile: 2 microseconds by one program, and up to 16 share it.
# With these, bigbird on four ranks takes, ms a step, rows shipped and not, 262,144 tokens 12.7 and 18.6, on 4 key heads 7.2 and 9.8;
# 65,536 tokens 4.5 and 5.2, on 4 key heads 2.8 and 2.7. Measured were 10.8 and 16.2, 6.7 and 10.1; 3.2 and 5.0, 2.64 and 2.58
BACKWARD_TILE = 2e-6 / 16
# it computes five products of a tile where a forward has two
FORWARD_TILE = 0.4 * BACKWARD_TILE
# packing and joining, over the time on the link. Of Ulysses: local, 262,144 tokens. Of exchange it is fitted, with HOST, to 28 measured
# steps, which are 0.79 to 1.18 times what was measured
EXCHANGE_COPIES, ULYSSES_COPIES = 0.26, 1.55
# of messages that are sent from where tensors lie. With this and CUT, whole heads of 262,144 tokens on four ranks, ms a step in 1 and
# 2 messages: bigbird 11.2 and 9.4, butterfly 12.1 and 10.3, butterfly on 4 key heads 9.7. Measured were 11.2 and 9.5, 11.3 and 9.6, 10.3
STRETCHES = 0.1
# an all-gather joins all keys and values, and cuts up as many gradients: seconds a byte. With HOST 30 measured steps of PyTorch's
# collectives and the same kernels are off by 11 % at most, but for random blocks of 65,536 tokens, by 18 %. The other two are bigbird
# of 4 key heads on two, of kernels that did not yet split long rows. Our own all-gather, which copies less, was not timed yet
GATHER_COPY = 1.14e-12
# what the host adds to a step of exchange or of an all-gather: fitted to each alone it is 0.45 and 0.41 ms. Where rows are shipped
# SHIPPING holds it
HOST = 0.43e-3
# bytes of one head of a rank's tokens from which on it is sent by itself: butterfly took, ms a step, by itself and packed, 9.6 and 16.4
# with 16 MiB, 5.3 and 4.2 with 4, where the host was busy for 3.4 ms of a forward in 4 messages
WORTH_STRETCHES = 8 << 20
# what the host takes for a further message and its launches: local of 262,144 tokens, where messages are short, on four ranks 4.31, 4.55
# and 4.91 ms a step with 1, 2 and 4; butterfly 16.2, 14.4 and 13.6. And for rows that are shipped, forward or backward: see BACKWARD_TILE
CHUNK, SHIPPING = 120e-6, 0.45e-3
# what a further message of whole heads adds where it hides behind others: in 4 messages bigbird took 9.6 ms, butterfly 10.1
CUT = 200e-6
MOST_CHUNKS = 4
# fewest ranks on which these were timed as they are today: few rows that reach most keys, which travel or not, and heads that are
# sent from where they lie. On two, where both were older, bigbird by exchange took 1.2 to 3.1 times as long as an all-gather
TIMED_RANKS = 4
# the machines that were timed: this GPU, up to so many of one host
GPU, MOST_RANKS = "NVIDIA H200", 4
# tokens that were timed: the least and the most
TIMED_TOKENS = 65536, 262144
# bytes a second of copies: joining 2 GiB, butterfly of 262,144 tokens
MEMORY = 4.05e12
# what the host takes, forward and backward, to compute rows that need no messages apart: an assumption
SPLITTING = 400e-6
# of the time with fewer messages, assumed: messages and attention compete for multiprocessors, which the model leaves out
CONVINCING = 0.95


class Work(NamedTuple):
    """The most that any rank does in one forward of one sequence, in numbers of Python's own: torch.compile reads them.

    received  heads * tokens, as in costs.Costs
    tiles     for one head, whichever needs them
    row, column  tiles of the longest row and column which one rank computes
    """

    received: int
    tiles: int
    row: int
    column: int


class Call(NamedTuple):
    """What a call adds: sequences, query heads, query heads a key head, their dimension, bytes of one number."""

    batch: int
    q_heads: int
    group: int
    head_dim: float
    element_bytes: int


def link(received: float, call: Call, copies: float) -> float:
    """Seconds that receiving takes, with the copies before and behind it."""
    return (1 + copies) * received * call.batch * call.head_dim * call.element_bytes / LINK


def attention(work: Work, call: Call, q_heads: float) -> tuple[float, float]:
    """Seconds of a forward and a backward of so many heads, no faster than their longest walk."""
    products = call.batch * q_heads * work.tiles * 2 * TILE * TILE * call.head_dim
    forward = max(2 * products / FORWARD_RATE, work.row * FORWARD_TILE)
    backward = max(5 * products / BACKWARD_RATE, max(work.row, work.column * call.group) * BACKWARD_TILE)
    return forward, backward


def exchange(work: Work, call: Call, n_chunks: int) -> float:
    """Seconds of a step whose heads are cut into so many messages, each of which travels while another is computed."""
    message = LATENCY + link(work.received, call, EXCHANGE_COPIES) / n_chunks
    total = 0.0
    for compute in attention(work, call, call.q_heads / n_chunks):
        total += message + compute + (n_chunks - 1) * (max(message, compute) + CHUNK)
    return total


def shipping(work: Work, call: Call) -> float:
    """Seconds of a step that shipped rows add: their queries, attended to before the messages back can leave."""
    return 2 * (SHIPPING + 2 * LATENCY) + sum(attention(work, call, call.q_heads))


def ulysses(work: Work, call: Call, n_ranks: int) -> float:
    """Seconds of a step; work.tiles are those of all ranks."""
    return 2 * (2 * LATENCY + link(work.received, call, ULYSSES_COPIES)) + sum(
        attention(work, call, call.q_heads / n_ranks)
    )


def whole_heads(work: Work, call: Call, n_chunks: int) -> float:
    """Seconds of a step of Ulysses, cut into so many messages which are sent from where tensors lie.

    call.q_heads are those of a rank, work.tiles those of all ranks.
    """
    message = 2 * LATENCY + link(work.received, call, STRETCHES) / n_chunks
    total = 0.0
    for compute in attention(work, call, call.q_heads / n_chunks):
        total += message + compute + (n_chunks - 1) * (max(message, compute) + CUT)
    return total


def all_gather(work: Work, call: Call, keys: float) -> float:
    """Seconds of a step, in one message, whose ranks receive all `keys`: heads * tokens of keys and values of all ranks."""
    n_bytes = keys * call.batch * call.head_dim * call.element_bytes
    return 2 * (2 * LATENCY + link(work.received, call, 0) + n_bytes * GATHER_COPY) + sum(
        attention(work, call, call.q_heads)
    )


def unfitted(machines: Sequence[tuple[str, str]]) -> str:
    """Why no speed-up is predicted for these ranks, each (name of its GPU or "cpu", name of its host); empty if one is."""
    others = sorted({device for device, _ in machines} - {GPU})
    n_hosts = len({host for _, host in machines})
    what = f"the model is fitted to up to {MOST_RANKS} {GPU} of one host"
    if others:
        return f"{what}, not to {', '.join(others)}"
    if n_hosts > 1:
        return f"{what}, not to a link between {n_hosts} hosts"
    return f"{what}, not to {len(machines)}" if len(machines) > MOST_RANKS else ""


def goes_by_itself(n_tokens: int, head_dim: float, element_bytes: int) -> bool:
    """Whether a head of a rank's tokens is worth a message of its own."""
    return n_tokens * head_dim * element_bytes >= WORTH_STRETCHES


def splitting_pays(n_tokens: int, kv_heads: int, head_dim: int, element_bytes: int) -> bool:
    """Whether it is worth its launches to compute rows that need no messages where their keys lie.

    It saves joining own keys and values with received ones, and adding up gradients: each is read and written.
    """
    n_bytes = 2 * n_tokens * kv_heads * head_dim * element_bytes
    return 2 * 2 * n_bytes / MEMORY > SPLITTING


def best_chunks(work: Work, call: Call, kv_heads: int, seconds: Callable[[Work, Call, int], float] = exchange) -> int:
    """Into how many messages to cut, a divisor of the key heads: more of them only if that is faster beyond doubt.

    seconds  `exchange`, or `whole_heads` with the heads of a rank
    """
    best = 1
    for n_chunks in range(2, MOST_CHUNKS + 1):
        if kv_heads % n_chunks == 0 and seconds(work, call, n_chunks) < CONVINCING * seconds(work, call, best):
            best = n_chunks
    return best

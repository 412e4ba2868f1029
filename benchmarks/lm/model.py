"""A byte-level decoder with the attention of one of seven arms, by this or other libraries, and its optimizer."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.checkpoint import checkpoint

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.interop import to_flex_attention
from blocksparse_flash.nn import MixtureOfBlockAttention, NativeSparseAttention, SelfAttention

from ..run.peers import compiled_flex, sdpa_call

ARMS = ("dense", "hybrid", "hybrid-local", "local", "dense-short", "nsa", "moba")
# arms without a sparse layer
DENSE = ("dense", "dense-short")
# sdpa: scaled_dot_product_attention with the backend that PyTorch chooses; cudnn: only with its cuDNN backend
IMPLEMENTATIONS = ("ours", "sdpa", "cudnn", "flex")
# in the hybrid arms, every fourth layer is dense
DENSE_EVERY = 4
# the base is for contexts of 131,072 tokens
N_SYMBOLS, ROPE = 256, 500_000.0
# tokens whose logits are in memory at a time
CHUNK = 1 << 14
# of the gradients of all weights together
MAX_NORM = 1.0


def implementations_of(arm: str) -> tuple[str, ...]:
    """The implementations of an arm. For a sparse one, sdpa would need a dense mask, of 17 GB at 131,072 tokens."""
    return IMPLEMENTATIONS if arm in DENSE else ("ours",) if arm in ("nsa", "moba") else ("ours", "flex")


@dataclass(frozen=True)
class Settings:
    """All settings of a run. Runs that differ only in `arm` see the same tokens in the same order.

    arm             see benchmarks/lm/README.md
    attention       implementation of the layers' attention, see IMPLEMENTATIONS
    short           tokens of a context of dense-short, a divisor of length
    keys            a multiple of 128; for nsa and moba 256, 512, or a multiple of 1,024
    validate_every  steps between validations; a checkpoint follows each
    n_validation    windows per validation
    start           folder of a finished run, with whose weights this one begins; "" for random weights
    """

    arm: str = "dense"
    attention: str = "ours"
    length: int = 65536
    short: int = 4096
    keys: int = 2048
    embed_dim: int = 512
    num_heads: int = 8
    kv_heads: int = 2
    n_layers: int = 8
    hidden_dim: int = 1408
    batch_size: int = 1
    steps: int = 2400
    validate_every: int = 120
    n_validation: int = 16
    learning_rate: float = 1e-3
    seed: int = 0
    start: str = ""

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise ValueError(f"arm must be one of {', '.join(ARMS)}, got {self.arm!r}")
        if self.attention not in IMPLEMENTATIONS:
            raise ValueError(f"attention must be one of {', '.join(IMPLEMENTATIONS)}, got {self.attention!r}")
        possible = implementations_of(self.arm)
        if self.attention not in possible:
            raise ValueError(f"attention of {self.arm} must be one of {', '.join(possible)}, got {self.attention!r}")
        for name, value in vars(self).items():
            if type(value) is int and name != "seed" and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, got {self.seed}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")
        if self.steps % self.validate_every:
            raise ValueError(f"steps must be a multiple of validate_every={self.validate_every}, got {self.steps}")
        if self.length % self.short:
            raise ValueError(f"short must divide length={self.length}, got {self.short}")
        if self.keys < 128 or self.keys % 128:
            raise ValueError(f"keys must be a positive multiple of 128, got {self.keys}")
        if "hybrid" in self.arm and self.n_layers % DENSE_EVERY:
            raise ValueError(f"n_layers of {self.arm} must be a multiple of {DENSE_EVERY}, got {self.n_layers}")

    @property
    def name(self) -> str:
        """Name of the variant of the model: its arm, and its implementation unless it is ours."""
        return self.arm if self.attention == "ours" else f"{self.arm}-{self.attention}"


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"short": 128, "embed_dim": 64, "num_heads": 4, "kv_heads": 1, "n_layers": 4, "hidden_dim": 128},
    # its checkpoints have 46 MB
    "small": {"embed_dim": 256, "num_heads": 4, "kv_heads": 1, "hidden_dim": 704},
    "medium": {},
    "gpt2": {"embed_dim": 768, "num_heads": 12, "kv_heads": 12, "n_layers": 12, "hidden_dim": 2048},
}
# for a CPU: about a minute
TINY = Settings(
    length=512, keys=256, batch_size=4, steps=120, validate_every=30, n_validation=8, learning_rate=3e-3,
    **SIZES["tiny"],
)  # fmt: skip


@functools.lru_cache(maxsize=4)
def sparse_layout(length: int, keys: int) -> BlockLayout:
    """The last keys / 2 tokens, a butterfly of blocks of keys / 8 (256 at most), and the first keys / 4; causal."""
    block = min(256, keys // 8)
    found = masks.local(length, window=(keys // 2 - 1, 0), block_size=block)
    found |= masks.butterfly(length, block_size=block)
    found |= masks.global_tokens(length, tokens=min(keys // 4, length), block_size=block)
    return found & masks.causal(length, block_size=block)


@functools.lru_cache(maxsize=4)
def equal_window(length: int, keys: int) -> int:
    """Tokens of the window that gives a query as many keys as `sparse_layout`, on average."""
    pairs = sparse_layout(length, keys).describe().pairs
    # of w tokens: the first w - 1 queries have fewer
    window = keys // 2
    while window * length - window * (window - 1) // 2 < pairs:
        window += 1
    return window


def layout_of(settings: Settings, layer: int) -> BlockLayout | None:
    """The causal layout of a layer; None: causal without a layout."""
    if settings.arm in DENSE or ("hybrid" in settings.arm and layer % DENSE_EVERY == DENSE_EVERY - 1):
        return None
    if settings.arm == "hybrid":
        return sparse_layout(settings.length, settings.keys)
    return masks.local(settings.length, window=(equal_window(settings.length, settings.keys) - 1, 0))


def flex_mask(layout: BlockLayout | None, length: int, window: int) -> Any:
    """The layout as FlexAttention's BlockMask; None is causal.

    window  tokens of the layout's window. Compiled FlexAttention evaluates the mask function only for partial blocks.
            These are cut by the window or the diagonal, so the function needs no table
    """
    mask = to_flex_attention(masks.causal(length) if layout is None else layout)
    mask.mask_mod = lambda _b, _h, q, kv: (q >= kv) & (q - kv < window)
    return mask


class PeerAttention(SelfAttention):
    """SelfAttention with the same weights that computes attention by `call`, a function of q, k, v and options."""

    def __init__(self, *sizes: Any, call: Any, block_mask: Any = None, **options: Any) -> None:
        super().__init__(*sizes, causal=True, **options)
        self.call, self.block_mask = call, block_mask

    def _apply(self, fn: Any, recurse: bool = True) -> PeerAttention:
        super()._apply(fn, recurse)
        if self.block_mask is not None:
            self.block_mask = self.block_mask.to(self.qkv.weight.device)
        return self

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kv_lengths: Any = None, *, cache: Any = None) -> Tensor:
        assert kv_lengths is None and cache is None
        return self.call(q, k, v) if self.block_mask is None else self.call(q, k, v, block_mask=self.block_mask)


def attention_of(settings: Settings, layer: int) -> nn.Module:
    """Causal attention of a layer, (batch, length, embed_dim) to the same shape."""
    sizes: dict[str, Any] = {"kv_heads": settings.kv_heads, "rope": ROPE}
    width, heads, keys = settings.embed_dim, settings.num_heads, settings.keys
    if settings.arm == "nsa":
        sizes |= {"k_blocks": 8, "block_size": keys // 16, "window_size": keys // 2}
        return NativeSparseAttention(width, heads, **sizes)
    if settings.arm == "moba":
        return MixtureOfBlockAttention(width, heads, k_blocks=8, block_size=keys // 8, by_group=True, **sizes)
    layout = layout_of(settings, layer)
    if settings.attention == "ours":
        return SelfAttention(width, heads, layout, causal=True, **sizes)
    options: dict[str, Any] = {"enable_gqa": settings.kv_heads != heads}
    if settings.attention == "flex":
        length = settings.short if settings.arm == "dense-short" else settings.length
        window = keys // 2 if settings.arm == "hybrid" else equal_window(settings.length, keys)
        mask = flex_mask(layout, length, length if layout is None else window)
        call: Any = functools.partial(compiled_flex(), **options)
        return PeerAttention(width, heads, call=call, block_mask=mask, **sizes)
    options["is_causal"] = True
    call = functools.partial(F.scaled_dot_product_attention, **options)
    if settings.attention == "cudnn":
        call = sdpa_call("CUDNN_ATTENTION", **options)
    return PeerAttention(width, heads, call=call, **sizes)


class Block(nn.Module):
    """x + attention(norm(x)), then x + dense(norm(x)): RMSNorm and SwiGLU. As nn.DecoderBlock, for any attention."""

    def __init__(self, attention: nn.Module, norms: tuple[nn.Module, nn.Module], gate_up: nn.Linear, down: nn.Linear):
        super().__init__()
        self.attention_norm, self.dense_norm = norms
        self.attention, self.gate_up, self.down = attention, gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        gate, up = self.gate_up(self.dense_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Head(nn.Module):
    """Loss in nats of each token, (tokens, width) and int64 (tokens,) to float32 (tokens,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.logits = nn.RMSNorm(width), nn.Linear(width, N_SYMBOLS, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(self.norm(x)).float(), targets, reduction="none")


class LanguageModel(nn.Module):
    """A pre-norm decoder. Its initial weights follow settings.seed; those outside attention are equal in all arms."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, hidden = settings.embed_dim, settings.hidden_dim
        self.context = settings.short if settings.arm == "dense-short" else settings.length
        self.has_graph_breaks = settings.arm in ("nsa", "moba")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.embedding, self.head = nn.Embedding(N_SYMBOLS, width), Head(width)
            dense = [
                (nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False))
                for _ in range(settings.n_layers)
            ]
            # last: arms draw different numbers of weights
            self.blocks = nn.ModuleList(
                Block(attention_of(settings, layer), (nn.RMSNorm(width), nn.RMSNorm(width)), *pair)
                for layer, pair in enumerate(dense)
            )

    def compiled(self) -> LanguageModel:
        """This model, whose blocks and head are compiled when first called; equal blocks are compiled once."""
        # all variants of the model share the code of a block; past this limit PyTorch stops compiling it, or fails
        torch._dynamo.config.recompile_limit = 64
        for block in self.blocks:
            block.compile(fullgraph=not self.has_graph_breaks, dynamic=False)
        self.head.compile(fullgraph=True, dynamic=False)
        return self

    def forward(self, window: Tensor) -> Tensor:
        """Loss in nats of each byte but the first: uint8 (batch, length + 1) to float32 (batch, length)."""
        window = window.long()
        targets = window[:, 1:]
        x = self.embedding(window[:, :-1].reshape(-1, self.context))
        for block in self.blocks:
            x = block(x)
        chunks = zip(x.flatten(0, 1).split(CHUNK), targets.flatten().split(CHUNK), strict=True)
        # the backward computes the logits of a chunk again
        losses = [checkpoint(self.head, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat(losses).view_as(targets)


def optimizer_of(model: nn.Module, settings: Settings) -> tuple[AdamW, OneCycleLR]:
    """AdamW, and a learning rate that rises for a tenth of the steps and then falls to 0 as a cosine."""
    optimizer = AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    options: dict[str, Any] = {"max_lr": settings.learning_rate, "pct_start": 0.1, "cycle_momentum": False}
    return optimizer, OneCycleLR(optimizer, total_steps=settings.steps, **options)

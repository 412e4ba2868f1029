"""A decoder of bytes whose attention is one of five arms, and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

import masks
from blocksparse_flash.nn import MixtureOfBlockAttention, NativeSparseAttention, SelfAttention

ARMS = ("dense", "local", "hybrid", "nsa", "moba")
N_SYMBOLS, ROPE = 256, 10_000.0
# of the gradients of all weights together
MAX_NORM = 1.0


@dataclass(frozen=True)
class Settings:
    """All settings of a run. Runs that differ in `arm` alone see the same tokens in the same order.

    arm             dense: every token before; local: the last `keys` tokens; hybrid: layers alternate local and dense;
                    nsa: NativeSparseAttention, 8 blocks of keys / 16 tokens, a window of keys / 2, compressed keys;
                    moba: MixtureOfBlockAttention, 8 blocks of keys / 8 tokens
    keys            256, 512, or a multiple of 1,024 for nsa and moba
    validate_every  steps between validations; a checkpoint follows each
    n_validation    windows of a validation
    """

    arm: str = "dense"
    length: int = 8192
    keys: int = 1024
    embed_dim: int = 512
    num_heads: int = 8
    kv_heads: int = 2
    n_layers: int = 8
    hidden_dim: int = 3072
    batch_size: int = 8
    steps: int = 260
    validate_every: int = 20
    n_validation: int = 64
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise ValueError(f"arm must be one of {', '.join(ARMS)}, got {self.arm!r}")
        if self.steps % self.validate_every:
            raise ValueError(f"steps must be a multiple of validate_every={self.validate_every}, got {self.steps}")


# for a CPU: about a minute
TINY = Settings(
    length=512, keys=256, embed_dim=64, num_heads=4, kv_heads=1, n_layers=2, hidden_dim=128, batch_size=4, steps=120,
    validate_every=30, n_validation=8, learning_rate=3e-3,
)  # fmt: skip


def attention_of(settings: Settings, layer: int) -> nn.Module:
    """Causal attention of a layer, (batch, length, embed_dim) to the same shape."""
    sizes: dict[str, Any] = {"kv_heads": settings.kv_heads, "rope": ROPE}
    width, heads, keys = settings.embed_dim, settings.num_heads, settings.keys
    if settings.arm == "nsa":
        sizes |= {"n_blocks": 8, "block_size": keys // 16, "window_size": keys // 2}
        return NativeSparseAttention(width, heads, **sizes)
    if settings.arm == "moba":
        return MixtureOfBlockAttention(width, heads, k_blocks=8, block_size=keys // 8, by_group=True, **sizes)
    is_local = settings.arm == "local" or (settings.arm == "hybrid" and layer % 2 == 0)
    layout = masks.local(settings.length, window=(keys - 1, 0)) if is_local else None
    return SelfAttention(width, heads, layout, causal=True, **sizes)


class LanguageModel(nn.Module):
    """A pre-norm decoder. Its initial weights follow settings.seed; those outside attention are equal in all arms."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, hidden = settings.embed_dim, settings.hidden_dim
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.embedding = nn.Embedding(N_SYMBOLS, width)
            self.dense = nn.ModuleList(
                nn.Sequential(nn.RMSNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
                for _ in range(settings.n_layers)
            )
            self.logits = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, N_SYMBOLS, bias=False))
            # last: arms draw different numbers of weights
            self.attention = nn.ModuleList(
                nn.Sequential(nn.RMSNorm(width), attention_of(settings, layer)) for layer in range(settings.n_layers)
            )

    def forward(self, window: Tensor) -> Tensor:
        """Loss in nats of each byte but the first: uint8 (batch, length + 1) to float32 (batch, length)."""
        window = window.long()
        x = self.embedding(window[:, :-1])
        for attention, dense in zip(self.attention, self.dense, strict=True):
            x = x + attention(x)
            x = x + dense(x)
        logits = self.logits(x).flatten(0, 1).float()
        return F.cross_entropy(logits, window[:, 1:].flatten(), reduction="none").unflatten(0, (len(x), -1))


def optimizer_of(model: nn.Module, settings: Settings) -> tuple[AdamW, OneCycleLR]:
    """AdamW, and a rate that rises for a tenth of the steps and then falls to 0 as a cosine."""
    optimizer = AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    options: dict[str, Any] = {"max_lr": settings.learning_rate, "pct_start": 0.1, "cycle_momentum": False}
    return optimizer, OneCycleLR(optimizer, total_steps=settings.steps, **options)

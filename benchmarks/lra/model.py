"""The classifier that is trained: tokens to logits of labels, or of hidden tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.nn import Encoder, EncoderBlock, LearnedPositions, RotaryTable, SelfAttention, rotary_table

from .tasks import Task


@dataclass(frozen=True)
class Architecture:
    """The settings of a pre-norm Transformer encoder and its head.

    mask        a specification for masks.build such as "butterfly | global_tokens(tokens=128)", or a list of one for
                each head; None is dense
    block_size  tokens per side of the mask's blocks
    hidden_dim  features of the dense layers
    head_dim    None is embed_dim // num_heads
    positions   "rope": rotary, by index or by row and column of an image; "alibi": scores fall with the distance of
                indices; "rope+alibi"; "learned": a vector per position; "none"
    slopes      of "alibi", one for each head; None has the published ones
    rope_base   base of the rotary positions
    rope_scale  factor on rotary positions: below 1 for images with larger strokes than those of the initial weights
    pooling     "mean", "max" or "mean+max" over the real tokens, "cls": an extra token in front, "first": the first
                token, "padded mean": the sum over the real tokens divided by the padded length (Nystromformer)
    pooled_dim  features between the two layers of the head; None is embed_dim
    order       of an image's pixels: "raster" (strict Long Range Arena) or "morton"
    repeats     passes through the layers, with shared weights
    first_tokens  initial embedding: "independent", or "smooth", similar for similar numbers such as grays of pixels
    """

    embed_dim: int = 128
    num_heads: int = 2
    n_layers: int = 6
    hidden_dim: int = 512
    head_dim: int | None = None
    mask: str | list[str] | None = None
    block_size: int = 128
    positions: Literal["rope", "alibi", "rope+alibi", "learned", "none"] = "rope"
    slopes: tuple[float, ...] | None = None
    rope_base: float = 100.0
    rope_scale: float = 1.0
    pooling: Literal["mean", "max", "mean+max", "cls", "first", "padded mean"] = "mean+max"
    pooled_dim: int | None = None
    dropout_p: float = 0.0
    attention_dropout_p: float = 0.0
    order: Literal["raster", "morton"] = "raster"
    repeats: int = 1
    first_tokens: Literal["independent", "smooth"] = "independent"


@functools.cache
def _layout(specifications: tuple[str, ...], length: int, *, block_size: int) -> BlockLayout:
    heads = [masks.build(each, length, block_size=block_size) for each in specifications]
    return heads[0] if len(heads) == 1 else BlockLayout.stack_heads(heads)


def layout_of(architecture: Architecture, length: int | None) -> BlockLayout | Callable[[int], BlockLayout] | None:
    """The mask's layout for `length` tokens; for None a function from a length to its layout."""
    if architecture.mask is None:
        return None
    of_heads = (architecture.mask,) if isinstance(architecture.mask, str) else tuple(architecture.mask)
    if len(of_heads) not in (1, architecture.num_heads):
        raise ValueError(f"mask must be one, or one for each of {architecture.num_heads} heads, got {len(of_heads)}")
    of_length = functools.partial(_layout, of_heads, block_size=architecture.block_size)
    return of_length if length is None else of_length(length)


def keys_per_query(architecture: Architecture, length: int) -> float:
    """Keys to which a query attends, the mean over queries and heads."""
    layout = layout_of(architecture, length)
    if layout is None:
        return length
    assert isinstance(layout, BlockLayout)
    found = layout.describe()
    return found.pairs / (found.heads * length)


def _smooth(n_tokens: int, width: int) -> Tensor:
    """(n_tokens, width): features are cosines of the number, with random phase and few periods."""
    periods, phases = torch.randn(width) * 2, torch.rand(width)
    # not linspace, which transformers patches temporarily
    numbers = torch.arange(n_tokens)[:, None] / (n_tokens - 1)
    return 2**0.5 * torch.cos(2 * torch.pi * (periods * numbers + phases))


def pool(x: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """(batch, length, embed_dim) to (batch, embed_dim), twice as wide for "mean+max". Padding is ignored."""
    if pooling in ("cls", "first"):
        return x[:, 0]
    is_real = (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[:, :, None]
    total = x.masked_fill(~is_real, 0.0).sum(dim=1)
    if pooling == "padded mean":
        return total / x.shape[1]
    mean = total / lengths.clamp(min=1)[:, None]
    if pooling == "mean":
        return mean
    largest = x.masked_fill(~is_real, -torch.inf).amax(dim=1)
    return largest if pooling == "max" else torch.cat([mean, largest], dim=1)


class _Lookup(torch.autograd.Function):
    """Embedding lookup in a small table, whose gradient is a product with a one-hot matrix.

    PyTorch's own gradient serializes the additions of equal tokens, such as those of a black background.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.n_rows = len(table)
        return F.embedding(rows, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        numbers = torch.arange(ctx.n_rows, device=rows.device, dtype=rows.dtype)
        # (batch, n_rows, length): a product per sample uses the GPU better than one long product
        is_row = (rows[:, None] == numbers[:, None]).to(grad.dtype)
        return (is_row @ grad).sum(dim=0), None


# (n_rows, width) and int (batch, length) to (batch, length, width), as F.embedding
lookup: Callable[[Tensor, Tensor], Tensor] = _Lookup.apply


class Classifier(nn.Module):
    """Tokens (batch, documents, length) and lengths (batch, documents) to logits (batch, labels).

    Two documents go through one encoder; the head sees [one, other, one * other, one - other].
    """

    order: Tensor | None
    cos: Tensor | None
    sin: Tensor | None

    def __init__(self, task: Task, architecture: Architecture) -> None:
        super().__init__()
        self.task, self.architecture = task, architecture
        width = architecture.embed_dim
        has_cls = architecture.pooling == "cls"
        # the extra row is the hidden token
        self.tokens = nn.Embedding(task.n_tokens + 1, width)
        nn.init.normal_(self.tokens.weight, std=0.02 if architecture.positions == "learned" else 1.0)
        if architecture.first_tokens == "smooth":
            with torch.no_grad():
                self.tokens.weight[:-1] = _smooth(task.n_tokens, width)
        self.cls = nn.Parameter(torch.zeros(width)) if has_cls else None
        self.positions = LearnedPositions(task.length + has_cls, width) if architecture.positions == "learned" else None
        # images have a fixed length; documents are cut to the longest of their batch
        layout = layout_of(architecture, task.length + has_cls if task.grid is not None else None)
        rope = architecture.rope_base if "rope" in architecture.positions else None
        alibi = "alibi" in architecture.positions
        if architecture.slopes is not None and not alibi:
            raise ValueError(
                f"slopes must be None with positions {architecture.positions!r}, got {architecture.slopes}"
            )
        slopes = alibi if architecture.slopes is None else architecture.slopes
        blocks = []
        for _ in range(architecture.n_layers):
            options: dict[str, Any] = {"dropout_p": architecture.attention_dropout_p, "head_dim": architecture.head_dim}
            attention = SelfAttention(width, architecture.num_heads, layout, rope=rope, alibi=slopes, **options)
            blocks.append(EncoderBlock(attention, hidden_dim=architecture.hidden_dim, dropout_p=architecture.dropout_p))
        self.head_dim = blocks[0].attention.head_dim
        self.encoder = Encoder(blocks * architecture.repeats)
        pooled = width * (2 if architecture.pooling == "mean+max" else 1) * (1 if task.n_documents == 1 else 4)
        inner = width if architecture.pooled_dim is None else architecture.pooled_dim
        self.head = nn.Sequential(nn.Linear(pooled, inner), nn.GELU(), nn.Linear(inner, task.n_classes))
        self.guess = nn.Linear(width, task.n_tokens)
        self._place_tokens()

    def _place_tokens(self) -> None:
        """Buffers: order of the pixels; cos and sin of their positions, with a class token at the origin."""
        task, architecture, n_extra = self.task, self.architecture, int(self.cls is not None)
        order = cos = sin = None
        if architecture.order == "morton":
            if task.grid is None:
                raise ValueError(f"order must be raster for {task.name!r}, which is no image, got 'morton'")
            order = torch.as_tensor(masks.morton_order(task.grid))
        if "rope" in architecture.positions:
            places = torch.arange(task.length + n_extra)
            if task.grid is not None:
                rows_and_columns = torch.cartesian_prod(*map(torch.arange, task.grid))
                places = F.pad(rows_and_columns if order is None else rows_and_columns[order], (0, 0, n_extra, 0))
            # computed once, not in every layer and step
            cos, sin = rotary_table(places * architecture.rope_scale, architecture.rope_base, self.head_dim)
        for name, buffer in (("order", order), ("cos", cos), ("sin", sin)):
            self.register_buffer(name, buffer, persistent=False)

    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """(batch, length) to (batch, length [+ 1 with a class token], embed_dim)."""
        if self.order is not None:
            tokens = tokens[:, self.order]
        x = lookup(self.tokens.weight, tokens.int())
        if self.cls is not None:
            x = torch.cat([self.cls.expand(len(x), 1, -1), x], dim=1)
        if self.positions is not None:
            x = self.positions(x)
        # images have no padding
        kv_lengths = None if self.task.grid is not None else lengths + (self.cls is not None)
        length = x.shape[1]
        table = None if self.cos is None or self.sin is None else RotaryTable(self.cos[:length], self.sin[:length])
        return self.encoder(x, kv_lengths, table)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.encode(tokens.flatten(0, 1), lengths.flatten())
        pooled = pool(x, lengths.flatten() + (self.cls is not None), self.architecture.pooling)
        if self.task.n_documents == 2:
            one, other = pooled.unflatten(0, (-1, 2)).unbind(1)
            pooled = torch.cat([one, other, one * other, one - other], dim=1)
        return self.head(pooled)

    def guess_hidden(self, tokens: Tensor, lengths: Tensor, is_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the hidden tokens, (hidden, n_tokens), and the tokens: self-pretraining (arXiv:2310.02980).

        is_hidden  bool, as tokens: replaced by the hidden token
        """
        tokens, is_hidden = tokens.flatten(0, 1).int(), is_hidden.flatten(0, 1)
        x = self.encode(torch.where(is_hidden, self.task.n_tokens, tokens), lengths.flatten())
        if self.cls is not None:
            x = x[:, 1:]
        if self.order is not None:
            tokens, is_hidden = tokens[:, self.order], is_hidden[:, self.order]
        return self.guess(x[is_hidden]), tokens[is_hidden].long()


def load_fitting(model: Classifier, weights: dict[str, Tensor]) -> list[str]:
    """Loads the weights of another task's model; returns the names of those that keep their initial values.

    Heads and tokens of another shape keep them, since labels and symbols differ between tasks.

    weights  the state dict of a Classifier
    raises   ValueError for any other weight of another shape: another architecture
    """
    own, fitting = model.state_dict(), {}
    for name, weight in weights.items():
        if name not in own:
            continue
        if weight.shape == own[name].shape:
            fitting[name] = weight
        elif name.split(".")[0] not in ("head", "guess", "tokens"):
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, but {tuple(own[name].shape)} is needed")
    model.load_state_dict(fitting, strict=False)
    return sorted(own.keys() - fitting.keys())

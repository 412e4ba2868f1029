"""Self-attention of a video transformer: `python -m benchmarks.run.video` on a CUDA GPU, one JSON line per figure.

A layer of Wan 2.1 with random queries, keys and values: 81 frames of 480p (21 x 30 x 52 tokens, 32,760) or 720p
(21 x 45 x 80, 75,600), 12 or 40 heads of 128, bf16, forward. Tensors come as diffusers has them, (batch, length, heads,
head_dim) in row-major order. Ours is the attention of `blocksparse_flash.diffusers.use`: the time includes reordering
queries, keys, values and the output, and for "top_blocks" and "top_p" the choice of the blocks. "sliding_tile, in
order" leaves out the reordering. Peers are dense: cuDNN and FlashAttention-2, timed in turns with ours.

Head 0 of each output is compared with float32 before timing; wrong ones are reported and not timed. setup_ms is the
first call, which compiles kernels and makes plans.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, attention, explain
from blocksparse_flash.diffusers import top_blocks, top_p
from blocksparse_flash.diffusers.using import Use, _Layer

from . import measure
from .correctness import Mask, is_right, mask_of
from .peers import Call, sdpa_call

HEAD_DIM, DENSITY, SHARE = 128, 0.2, 0.5
TILE, CUBE = (4, 8, 8), (4, 4, 4)
# frames, height and width in tokens; kernel with which about a fifth of the blocks of 128 is stored
CASES = {"480p": ((21, 30, 52), (12, 16, 32)), "720p": ((21, 45, 80), (12, 24, 48))}


class Case(NamedTuple):
    """Tokens along each axis, kernel of sliding_tile, heads."""

    grid: tuple[int, ...]
    kernel: tuple[int, ...]
    heads: int

    @property
    def n(self) -> int:
        return math.prod(self.grid)

    def layout(self) -> BlockLayout:
        """In the order of tiles."""
        order = masks.tile_order(self.grid, tile=TILE)
        return masks.sliding_tile(self.grid, kernel=self.kernel, tile=TILE, order=order)


# a call; its layout, from q and k, or None; the order of tokens that the layout has, None for that of the model
Prepared = tuple[Call, Callable[[Tensor, Tensor], BlockLayout] | None, Tensor | None]


class Provider(NamedTuple):
    """One implementation and pattern; prepare makes its call for a case on a device."""

    name: str
    pattern: str
    prepare: Callable[[Case, str], Prepared]


def _used(layout: Any, order: Tensor | None) -> Call:
    """The attention of a layer under `use`."""
    layer = _Layer("video", Use(layout, order, "auto"), None)
    return lambda q, k, v: layer.use._attend(q, k, v, None, None, layer)


def _sliding_tile(case: Case, _device: str) -> Prepared:
    order, layout = masks.tile_order(case.grid, tile=TILE), case.layout()
    return _used(layout, order), lambda q, k: layout, order


def _in_order(case: Case, device: str) -> Prepared:
    layout = case.layout().to(device)
    return functools.partial(attention, layout=layout), lambda q, k: layout, None


def _chosen(choice: Callable[[Tensor, Tensor], BlockLayout], case: Case, _device: str) -> Prepared:
    order = masks.tile_order(case.grid, tile=CUBE)
    return _used(choice, order), choice, order


def _sdpa(kernel: str, _case: Case, _device: str) -> Prepared:
    return sdpa_call(kernel), None, None


# of the kernels of scaled_dot_product_attention
BACKENDS = {"cudnn": "cudnn", "flash_attention_2": "sdpa"}
PROVIDERS = [
    Provider("cudnn", "dense", functools.partial(_sdpa, "CUDNN_ATTENTION")),
    Provider("flash_attention_2", "dense", functools.partial(_sdpa, "FLASH_ATTENTION")),
    Provider("blocksparse_flash", "dense", lambda case, device: (_used(None, None), None, None)),
    Provider("blocksparse_flash", "sliding_tile", _sliding_tile),
    Provider("blocksparse_flash", "sliding_tile, in order", _in_order),
    Provider("blocksparse_flash", "top_blocks", functools.partial(_chosen, top_blocks(DENSITY, block_size=64))),
    Provider("blocksparse_flash", "top_p", functools.partial(_chosen, top_p(SHARE, block_size=128))),
]


def inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as (1, heads, length, head_dim) views, the same values for every provider."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = 1, case.n, case.heads, HEAD_DIM
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator).transpose(1, 2) for _ in range(3)
    )
    return q, k, v


def mask_of_model(layout: BlockLayout | None, order: Tensor | None) -> Mask:
    """The mask of the first head of a layout in an order, in the order of the model."""
    mask = mask_of(layout)
    if mask is None or order is None:
        return mask
    places = torch.argsort(order)
    return lambda rows: mask(places[rows.cpu()])[:, places]


def prepared(
    case: Case, provider: Provider, tensors: tuple[Tensor, Tensor, Tensor], device: str
) -> tuple[Callable[[], Any], dict[str, Any]] | None:
    """A call to time and what its line says of it; None if its output is wrong."""
    call, layout_of, order = provider.prepare(case, device)
    head = tuple(tensor[:, :1] for tensor in tensors)
    q, k = tensors[:2] if order is None else (tensor[:, :, order.to(device)] for tensor in tensors[:2])
    layout, of_head = None, None
    if layout_of is not None:
        layout, of_head = layout_of(q, k), layout_of(q[:, :1], k[:, :1])
    label = f"{provider.name:18} {provider.pattern} {case}"
    if not is_right(call, head, mask_of_model(of_head, order), label):
        return None
    step = functools.partial(call, *tensors)
    is_ours = provider.name == "blocksparse_flash"
    facts = {
        "bench": "video", "provider": provider.name, "pattern": provider.pattern,
        "backend": explain(*tensors, layout).backend if is_ours else BACKENDS[provider.name],
        "density": 1.0 if layout is None else layout.density, "setup_ms": measure.first_call_milliseconds(step),
        "peak_bytes": measure.peak_bytes(step),
    }  # fmt: skip
    return step, facts


@torch.no_grad()
def lines(case: Case, device: str, providers: list[Provider] = PROVIDERS) -> Iterator[dict[str, Any]]:
    """A line for each provider that is right; they are timed in turns."""
    tensors = inputs(case, device)
    found: list[tuple[Callable[[], Any], dict[str, Any]]] = []
    for provider in providers:

        def prepare(provider: Provider = provider) -> None:
            one = prepared(case, provider, tensors, device)
            found.extend([] if one is None else [one])

        label = f"{provider.name:18} {provider.pattern} {case}"
        measure.guarded(label, provider.name == "blocksparse_flash", prepare)
    times = measure.milliseconds_in_turns([step for step, _ in found])
    for (_, facts), each in zip(found, times, strict=True):
        flops = 4 * facts["density"] * case.heads * case.n**2 * HEAD_DIM
        yield {
            **facts, **each, "tflops": 1e-9 * flops / each["ms"], "n": case.n, "batch": 1, "heads": case.heads,
            "head_dim": HEAD_DIM, "dtype": "bf16", "direction": "fwd", **measure.environment(),
        }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = measure.parser(__doc__, "video.jsonl")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--heads", nargs="+", type=measure.multiple_of(1), default=[12, 40])
    options = parser.parse_args(arguments)
    measure.require_gpu()
    for name in options.cases:
        for heads in options.heads:
            measure.appended(options.out, lines(Case(*CASES[name], heads), "cuda"), measure.KEYS)


if __name__ == "__main__":
    main()

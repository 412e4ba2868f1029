"""Denoising loops of diffusers pipelines: `python -m benchmarks.run.pipelines` on a CUDA GPU, one JSON line per figure.

Transformers in the sizes of Wan 2.1 1.3B (81 frames of 480p: 32,760 tokens) and FLUX.1 (an image of 2048 x 2048: 16,384
tokens, and 512 of text), with random bf16 weights. Prompts are embeddings, and latents are the output, so text encoders
and VAEs are left out. Providers: the model's own attention through scaled_dot_product_attention, and this library by
`blocksparse_flash.diffusers.use`, dense, with `sliding_tile`, and with blocks selected in each call.

Before timing, the latents after one step are compared: dense with the model's own attention, `sliding_tile` with the
model's own attention under the same mask of pairs. `ms` is the time of a call divided by its denoising steps; Wan
computes two forwards a step, with and without the prompt. Needs `pip install '.[diffusers]'`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import masks
from blocksparse_flash.diffusers import top_blocks, use

from . import measure
from .correctness import relative_error

KEYS = [
    "bench", "provider", "pattern", "density", "model", "n", "batch", "heads", "head_dim", "dtype", "direction", "ms",
    "ms_p20", "ms_p80", "peak_bytes", "device", "torch", "triton", "diffusers", "commit",
]  # fmt: skip
# largest error of the latents after one step, as a share of the change that the mask makes to them
TOLERANCE = 0.25
DENSITY = 0.2


class Case(NamedTuple):
    """A pipeline.

    grid     tokens of the video or image
    tile     tokens of a tile of sliding_tile along each axis: one or two blocks of 128
    cube     tokens of a block of 64 along each axis
    kernel   of sliding_tile; about a fifth of the blocks is stored
    n_text   tokens of the prompt, before those of the image in one sequence; 0 if there is cross-attention instead
    """

    name: str
    grid: tuple[int, ...]
    tile: tuple[int, ...]
    cube: tuple[int, ...]
    kernel: tuple[int, ...]
    heads: int
    n_text: int = 0

    @property
    def n(self) -> int:
        return math.prod(self.grid)


WAN = Case("wan", (21, 30, 52), (4, 8, 8), (4, 4, 4), (12, 16, 32), 12)
FLUX = Case("flux", (128, 128), (8, 16), (8, 8), (56, 64), 24, n_text=512)
CASES = {case.name: case for case in (WAN, FLUX)}


def pipeline_of(case: Case, device: str, sizes: dict[str, Any] | None = None) -> Any:
    """The pipeline with random weights on the device; `sizes` replaces some sizes of its transformer."""
    import diffusers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            if case.name == "wan":
                settings = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30, **(sizes or {})}
                transformer: Any = diffusers.WanTransformer3DModel(**settings)
            else:
                transformer = diffusers.FluxTransformer2DModel(**{"guidance_embeds": True, **(sizes or {})})
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, weight in transformer.named_parameters():
            # of 1, scores would be so small that attention is nearly an average, and a mask would hardly change it
            if name.endswith("norm_q.weight"):
                weight.fill_(6.0)
    if case.name == "wan":
        scheduler: Any = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
        pipe: Any = diffusers.WanPipeline(None, None, vae=None, scheduler=scheduler, transformer=transformer)
    else:
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        pipe = diffusers.FluxPipeline(scheduler, None, None, None, None, None, transformer=transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: Any, case: Case, steps: int) -> Tensor:
    """Latents after so many denoising steps, the same noise and prompts in every call."""
    config, device = pipe.transformer.config, pipe.transformer.device
    generator = torch.Generator(device=device).manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=pipe.transformer.dtype, generator=generator)

    height, width = (16 * side for side in case.grid[-2:])
    options = {
        "height": height, "width": width, "num_inference_steps": steps, "output_type": "latent", "generator": generator,
    }  # fmt: skip
    if case.name == "wan":
        prompts = {name: drawn(1, 512, config.text_dim) for name in ("prompt_embeds", "negative_prompt_embeds")}
        return pipe(num_frames=4 * case.grid[0] - 3, **prompts, **options).frames
    prompts = {
        "prompt_embeds": drawn(1, case.n_text, config.joint_attention_dim),
        "pooled_prompt_embeds": drawn(1, config.pooled_projection_dim),
    }
    return pipe(**prompts, **options).images


class MaskedSelfAttention(TorchFunctionMode):
    """Gives scaled_dot_product_attention a mask, bool (length, length), where queries and keys have that length."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is F.scaled_dot_product_attention:
            kwargs |= dict(zip(("query", "key", "value"), args, strict=False))
            args = ()
            if kwargs["query"].shape[2] == kwargs["key"].shape[2] == len(self.mask):
                kwargs["attn_mask"] = self.mask
        return function(*args, **kwargs)


def check(pipe: Any, case: Case, layout: Any, order: Tensor) -> None:
    """Raises AssertionError unless latents after a step are those of the model's own attention, dense and masked."""
    device = pipe.transformer.device
    places = torch.argsort(order)
    mask = F.pad(layout.to_dense()[0, 0][places[:, None], places], (case.n_text, 0) * 2, value=True).to(device)
    dense = generate(pipe, case, 1)
    with MaskedSelfAttention(mask):
        masked = generate(pipe, case, 1)
    with use(pipe):
        found = {"dense": (generate(pipe, case, 1), dense)}
    with use(pipe, layout, order=order):
        found["sliding_tile"] = generate(pipe, case, 1), masked
    errors = {name: relative_error(actual, expected).item() for name, (actual, expected) in found.items()}
    change = relative_error(masked, dense).item()
    print(f"{case.name}: relative errors {errors}; the mask changes the latents by {change:.3g}", flush=True)
    assert max(errors.values()) < TOLERANCE * change, errors


@torch.no_grad()
def lines(pipe: Any, case: Case, steps: int, rounds: int = 3) -> Iterator[dict[str, Any]]:
    """A line for each provider, once their results are right; they are timed in turns."""
    import diffusers

    order = masks.tile_order(case.grid, tile=case.tile)
    layout = masks.sliding_tile(case.grid, kernel=case.kernel, tile=case.tile, order=order)
    check(pipe, case, layout, order)
    cubes = masks.tile_order(case.grid, tile=case.cube)
    chosen = functools.partial(use, pipe, top_blocks(DENSITY, block_size=64), order=cubes)
    providers: dict[tuple[str, str], tuple[Callable[[], Any], float]] = {
        ("diffusers", "dense"): (nullcontext, 1.0),
        ("blocksparse_flash", "dense"): (functools.partial(use, pipe), 1.0),
        ("blocksparse_flash", "sliding_tile"): (functools.partial(use, pipe, layout, order=order), layout.density),
        ("blocksparse_flash", "top_blocks"): (chosen, DENSITY),
    }

    def call(context: Callable[[], Any]) -> None:
        with context():
            generate(pipe, case, steps)

    calls = [functools.partial(call, context) for context, _ in providers.values()]
    # these calls also warm up
    peaks = [measure.peak_bytes(each) for each in calls]
    times = measure.wall_milliseconds_in_turns(calls, runs=rounds)
    heads, head_dim = pipe.transformer.config.num_attention_heads, pipe.transformer.config.attention_head_dim
    for ((provider, pattern), (_, density)), peak, each in zip(providers.items(), peaks, times, strict=True):
        yield {
            "bench": "pipelines", "provider": provider, "pattern": pattern, "density": density, "model": case.name,
            "n": case.n, "batch": 1, "heads": heads, "head_dim": head_dim, "dtype": "bf16", "direction": "step",
            **{name: ms / steps for name, ms in each.items()}, "peak_bytes": peak,
            "diffusers": diffusers.__version__, **measure.environment(),
        }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = measure.parser(__doc__, "pipelines.jsonl")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=measure.multiple_of(1), default=2, help="denoising steps of a call")
    options = parser.parse_args(arguments)
    measure.require_gpu()
    for name in options.models:
        pipe = pipeline_of(CASES[name], "cuda")
        measure.appended(options.out, lines(pipe, CASES[name], options.steps), KEYS)
        del pipe
        measure.release()


if __name__ == "__main__":
    main()

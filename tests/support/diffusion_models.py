"""Small models of diffusers with random weights, their inputs, and pipelines of two of them without text encoders."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

VIDEO, IMAGE = (3, 4, 6), (6, 8)
N_TEXT = 7
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}


class Model(NamedTuple):
    """name, config    of the class in diffusers
    grid       tokens of the image or video
    inputs     makes the inputs of a forward from the grid and a function that draws tensors
    text       where text is in its sequences; None if it has cross-attention
    options    of `use` that it needs
    """

    name: str
    config: dict[str, Any]
    grid: tuple[int, ...]
    inputs: Callable[[tuple[int, ...], Callable[..., Tensor]], dict[str, Any]]
    text: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012  of a named tuple

    @property
    def n_tokens(self) -> int:
        return math.prod(self.grid)


def _ids(*grid: int) -> Tensor:
    """float (tokens, 3): the positions that Flux embeds."""
    points = torch.cartesian_prod(*(torch.arange(side) for side in grid))
    return torch.nn.functional.pad(points, (3 - len(grid), 0)).float()


def _flux(grid: tuple[int, ...], draw: Callable[..., Tensor]) -> dict[str, Any]:
    tokens = math.prod(grid)
    inputs = {"hidden_states": draw(2, tokens, 8), "encoder_hidden_states": draw(2, N_TEXT, 24)}
    return {**inputs, "timestep": torch.tensor([0.4, 0.4]), "img_ids": _ids(*grid), "txt_ids": torch.zeros(N_TEXT, 3)}


MODELS = {
    "Wan": Model(
        "WanTransformer3DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 24, "freq_dim": 16, "ffn_dim": 32},
        VIDEO,
        lambda grid, draw: {
            "hidden_states": draw(2, 4, grid[0], 2 * grid[1], 2 * grid[2]),
            "encoder_hidden_states": draw(2, N_TEXT, 24),
            "timestep": torch.tensor([400, 400]),
        },
    ),
    "LTX": Model(
        "LTXVideoTransformer3DModel",
        {**HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 24},
        VIDEO,
        lambda grid, draw: {
            "hidden_states": draw(2, math.prod(grid), 8),
            "encoder_hidden_states": draw(2, N_TEXT, 24),
            "timestep": torch.tensor([400, 400]),
            "encoder_attention_mask": torch.ones(2, N_TEXT),
            "num_frames": grid[0],
            "height": grid[1],
            "width": grid[2],
        },
    ),
    "PixArt": Model(
        "PixArtTransformer2DModel",
        {**HEADS, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 24, "sample_size": 16},
        IMAGE,
        lambda grid, draw: {
            "hidden_states": draw(2, 4, 2 * grid[0], 2 * grid[1]),
            "encoder_hidden_states": draw(2, N_TEXT, 24),
            "timestep": torch.tensor([400, 400]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "Flux": Model(
        "FluxTransformer2DModel",
        {**HEADS, "in_channels": 8, "num_single_layers": 1, "joint_attention_dim": 24, "pooled_projection_dim": 16,
         "axes_dims_rope": (4, 4, 8)},
        IMAGE,
        lambda grid, draw: {**_flux(grid, draw), "pooled_projections": draw(2, 16)},
        "first",
    ),
    "Chroma": Model(
        "ChromaTransformer2DModel",
        {**HEADS, "in_channels": 8, "num_single_layers": 1, "joint_attention_dim": 24, "axes_dims_rope": (4, 4, 8),
         "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        IMAGE,
        _flux,
        "first",
    ),
    "Qwen-Image": Model(
        "QwenImageTransformer2DModel",
        {**HEADS, "in_channels": 8, "out_channels": 2, "joint_attention_dim": 24, "axes_dims_rope": (4, 4, 8)},
        IMAGE,
        lambda grid, draw: {
            "hidden_states": draw(2, math.prod(grid), 8),
            "encoder_hidden_states": draw(2, N_TEXT, 24),
            "timestep": torch.tensor([0.4, 0.4]),
            "img_shapes": [[(1, *grid)]] * 2,
            # the second prompt is padded
            "encoder_hidden_states_mask": torch.arange(N_TEXT) < torch.tensor([[N_TEXT], [4]]),
        },
        "first",
    ),
    "CogVideoX": Model(
        "CogVideoXTransformer3DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 24, "sample_width": 12,
         "sample_height": 8, "sample_frames": 9, "max_text_seq_length": N_TEXT},
        VIDEO,
        lambda grid, draw: {
            "hidden_states": draw(2, grid[0], 4, 2 * grid[1], 2 * grid[2]),
            "encoder_hidden_states": draw(2, N_TEXT, 24),
            "timestep": torch.tensor([400, 400]),
        },
        "first",
    ),
    "HunyuanVideo": Model(
        "HunyuanVideoTransformer3DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "num_single_layers": 1, "num_refiner_layers": 1,
         "text_embed_dim": 24, "pooled_projection_dim": 16, "rope_axes_dim": (4, 4, 8), "guidance_embeds": False},
        VIDEO,
        lambda grid, draw: {
            "hidden_states": draw(2, 4, grid[0], 2 * grid[1], 2 * grid[2]),
            "encoder_hidden_states": draw(2, N_TEXT, 24),
            # the second prompt is padded
            "encoder_attention_mask": torch.arange(N_TEXT) < torch.tensor([[N_TEXT], [4]]),
            "pooled_projections": draw(2, 16),
            "timestep": torch.tensor([400, 400]),
        },
        "last",
    ),
    "SD3": Model(
        "SD3Transformer2DModel",
        {**HEADS, "sample_size": 16, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 24,
         "caption_projection_dim": 32, "pooled_projection_dim": 16, "pos_embed_max_size": 16,
         "dual_attention_layers": (0,)},
        IMAGE,
        lambda grid, draw: {
            "hidden_states": draw(2, 4, 2 * grid[0], 2 * grid[1]),
            "encoder_hidden_states": draw(2, N_TEXT, 24),
            "pooled_projections": draw(2, 16),
            "timestep": torch.tensor([400, 400]),
        },
        "last",
    ),
    "Lumina2": Model(
        "Lumina2Transformer2DModel",
        {"sample_size": 16, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1,
         "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "norm_eps": 1e-5, "scaling_factor": 1.0,
         "axes_dim_rope": (4, 2, 2), "axes_lens": (64, 64, 64), "cap_feat_dim": 24},
        IMAGE,
        lambda grid, draw: {
            "hidden_states": draw(2, 4, 2 * grid[0], 2 * grid[1]),
            "encoder_hidden_states": draw(2, N_TEXT, 24),
            "encoder_attention_mask": torch.ones(2, N_TEXT, dtype=torch.bool),
            "timestep": torch.tensor([0.4, 0.4]),
        },
        "first",
        # without those that prepare text
        {"text": "first", "layers": "^(layers|noise_refiner)"},
    ),
}  # fmt: skip


def model_of(name: str) -> Any:
    """The model, with the same random weights each time."""
    import diffusers

    torch.manual_seed(0)
    model = getattr(diffusers, MODELS[name].name)(**MODELS[name].config).eval()
    for parameter in model.parameters():
        # larger than those of a new model, so that attention is not nearly uniform
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return MODELS[name].inputs(MODELS[name].grid, draw)


def pipeline_of(name: str) -> Any:
    """A pipeline of Wan or Flux around the model, for prompts given as embeddings; VAEs are left out."""
    import diffusers

    if name == "Wan":
        scheduler = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
        pipe: Any = diffusers.WanPipeline(None, None, vae=None, scheduler=scheduler, transformer=model_of("Wan"))
    else:
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        pipe = diffusers.FluxPipeline(scheduler, None, None, None, None, None, transformer=model_of("Flux"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generated(pipe: Any, steps: int = 3, **options: Any) -> Tensor:
    """The latents that a pipeline of `pipeline_of` makes: grids are VIDEO and IMAGE."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randn(2, 1, N_TEXT, 24, generator=generator)
    options |= {
        "num_inference_steps": steps,
        "generator": generator,
        "output_type": "latent",
        "prompt_embeds": prompts[0],
    }
    if type(pipe).__name__ == "FluxPipeline":
        pooled = torch.randn(1, 16, generator=generator)
        return pipe(height=16 * IMAGE[0], width=16 * IMAGE[1], pooled_prompt_embeds=pooled, **options).images
    frames, height, width = 4 * VIDEO[0] - 3, 16 * VIDEO[1], 16 * VIDEO[2]
    return pipe(
        height=height, width=width, num_frames=frames, negative_prompt_embeds=prompts[1], guidance_scale=3.0, **options
    ).frames

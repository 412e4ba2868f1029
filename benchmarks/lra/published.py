"""Figures of the FlashAttention paper (Dao et al., NeurIPS 2022, arXiv:2205.14135)."""

from __future__ import annotations

# tokens of the runtime benchmark: batch 16, 8 heads, head_dim 64, fp16, one A100 of 40 GB (appendix E.6)
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
BATCH, HEADS, HEAD_DIM = 16, 8, 64
DEVICE = "A100"

# tables 18 to 20, neither dropout nor mask: milliseconds at the first of LENGTHS, and as far as memory went
RUNTIME_MS: dict[str, dict[str, tuple[float, ...]]] = {
    "fwd": {
        "PyTorch": (0.21, 0.22, 0.43, 1.27, 4.32, 16.47, 67.77),
        "OpenAI block-sparse": (0.96, 1.04, 1.66, 2.16, 5.41, 16.15),
        "Longformer": (0.99, 0.98, 0.99, 1.56, 4.79, 11.07, 32.98),
        "BigBird": (0.96, 1.02, 1.02, 1.48, 5.05, 11.59, 34.16),
        "FlashAttention": (0.08, 0.09, 0.18, 0.68, 2.40, 8.42, 33.54, 134.03, 535.95, 2147.05),
        "Block-sparse FlashAttention": (0.56, 0.52, 0.63, 0.65, 0.61, 0.96, 1.69, 3.02, 5.69, 11.77),
    },
    "bwd": {
        "PyTorch": (0.26, 0.29, 0.78, 2.44, 8.82, 33.87),
        "OpenAI block-sparse": (1.24, 1.25, 2.04, 2.91, 6.78, 19.67),
        "Longformer": (1.27, 1.23, 1.24, 1.85, 4.99, 10.21, 24.89),
        "BigBird": (1.43, 1.50, 1.44, 1.69, 5.25, 10.86, 26.26),
        "FlashAttention": (0.11, 0.16, 0.52, 1.62, 5.45, 21.57, 84.75, 336.00, 1338.56, 5343.19),
        "Block-sparse FlashAttention": (0.11, 0.12, 0.16, 0.38, 1.20, 2.34, 4.69, 9.10, 18.74, 37.04),
    },
    "fwd+bwd": {
        "PyTorch": (0.67, 0.70, 1.18, 3.67, 13.22, 50.44),
        "OpenAI block-sparse": (2.39, 2.40, 3.31, 5.02, 12.25, 35.94),
        "Longformer": (2.36, 2.34, 2.38, 2.94, 9.83, 21.35, 58.12),
        "BigBird": (2.35, 2.35, 2.37, 3.25, 10.36, 22.57, 60.63),
        "FlashAttention": (0.31, 0.31, 0.73, 2.29, 7.64, 30.09, 118.50, 470.51, 1876.08, 7492.85),
        "Block-sparse FlashAttention": (0.74, 0.77, 0.82, 0.88, 1.71, 3.21, 6.56, 12.60, 24.93, 50.39),
    },
}
# table 21: megabytes of forward and backward
MEMORY_MB: dict[str, tuple[float, ...]] = {
    "PyTorch": (36, 104, 336, 1184, 4416, 17_024),
    "OpenAI block-sparse": (33, 82, 228, 408, 910, 2401),
    "Longformer": (30, 61, 124, 277, 681, 1370, 2748),
    "BigBird": (33, 66, 131, 294, 708, 1431, 2872),
    "FlashAttention": (22, 44, 104, 209, 418, 836, 1672, 3344, 6688, 13_376),
    "Block-sparse FlashAttention": (22, 44, 104, 209, 418, 836, 1672, 3344, 6690, 13_384),
}

# table 3: speed-up of training the five tasks over PyTorch's attention, geometric mean
SPEEDUP = {"dense": 2.4, "block-sparse": 2.8}

# (samples, documents, tokens) of a training step in its configurations, from mlpen/Nystromformer at 5689313
STEPS = {
    "listops": (32, 1, 2048),
    "text": (32, 1, 1024),
    "retrieval": (32, 2, 4096),
    "image": (256, 1, 1024),
    "pathfinder32": (256, 1, 1024),
}

# tables 3 and 6, per cent
ACCURACY: dict[str, dict[str, float]] = {
    "Transformer": {"listops": 36.0, "text": 63.6, "retrieval": 81.6, "image": 42.3, "pathfinder32": 72.7},
    "FlashAttention": {
        "listops": 37.6, "text": 63.9, "retrieval": 81.4, "image": 43.5, "pathfinder32": 72.7, "pathx": 61.4,
    },
    "Block-sparse FlashAttention": {
        "listops": 37.0, "text": 63.0, "retrieval": 81.3, "image": 43.6, "pathfinder32": 73.3, "pathx": 56.0,
        "path256": 63.1,
    },
}  # fmt: skip

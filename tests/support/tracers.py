"""The ways in which make_fx traces."""

from __future__ import annotations

from typing import Any

MAKE_FX: tuple[dict[str, Any], ...] = (
    {"tracing_mode": "real"},
    {"tracing_mode": "fake"},
    {"tracing_mode": "symbolic"},
    {"tracing_mode": "real", "pre_dispatch": True},
)

"""Where does a module keep its layout? With its weights: on their device, planned there, and not among them.

Knows torch.nn.Module and layouts. Must not know attention or projections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..layout import BlockLayout

Layout = BlockLayout | Callable[[int], BlockLayout] | None


def checked_layout(layout: Any) -> Layout:
    """The layout, or a TypeError."""
    if layout is not None and not isinstance(layout, BlockLayout) and not callable(layout):
        raise TypeError(
            f"layout must be a BlockLayout, a function from a length to one, or None, got {type(layout).__name__}"
        )
    return layout


def checked_causal(causal: Any) -> bool:
    """The switch, or a TypeError."""
    if causal is not True and causal is not False:
        raise TypeError(
            f"causal must be True or False, got {causal!r} ({type(causal).__name__}); bool(causal) makes one"
        )
    return causal


def checked_probability(name: str, value: Any) -> float:
    """The probability to drop an attention weight, or an error that names it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}); 0.0 drops nothing")
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}; 0.0 drops nothing")
    return value


class HoldsLayout(nn.Module):
    """A module whose layout moves along with its weights, planned for `causal`, and is no weight itself."""

    layout: Layout
    causal: bool

    def _place_layout(self) -> None:
        """Moves the layout to the weights' device and plans it there; a function's layouts are left to the function."""
        device = next(self.parameters()).device
        if isinstance(self.layout, BlockLayout) and device.type != "meta":
            self.layout = self.layout.to(device)
            self.layout.plan(device, causal=self.causal)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HoldsLayout:
        super()._apply(fn, recurse)
        self._place_layout()
        return self

    def layout_for(self, length: int) -> BlockLayout | None:
        """The layout of an input of that many queries; TypeError for a function that returns none, which would be every pair."""
        layout = self.layout
        if layout is None or isinstance(layout, BlockLayout):
            return layout
        made: Any = layout(length)
        if not isinstance(made, BlockLayout):
            raise TypeError(
                f"layout must be a function that returns a BlockLayout, but for length {length} it returned "
                f"{type(made).__name__}; layout=None, without a function, attends to every pair"
            )
        return made

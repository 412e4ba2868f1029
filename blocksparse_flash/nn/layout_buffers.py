"""Modules that hold a layout: it moves to the device of their weights, and is planned there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..layout import BlockLayout
from .arguments import HeldLayout


class HoldsLayout(nn.Module):
    """A module whose layout moves with its weights and is planned for `causal`, but is not part of the state dict."""

    layout: HeldLayout
    causal: bool

    def _weight(self) -> Tensor | None:
        """A parameter of floats; None if a wrapper holds them, as FSDP's first version and dynamic quantization do."""
        return next((each for each in self.parameters() if each.is_floating_point()), None)

    def _place_layout(self) -> None:
        """Moves a BlockLayout to the device of the weights and plans it there."""
        weight = self._weight()
        if isinstance(self.layout, BlockLayout) and weight is not None and not weight.is_meta:
            self.layout = self.layout.to(weight.device, causal=self.causal)

    def _keep_layout_placed(self) -> None:
        """Places the layout, at the end of the constructor and when weights are loaded.

        load_state_dict(assign=True) may replace weights on the meta device, without `_apply`.
        """
        self._place_layout()
        self.register_load_state_dict_post_hook(_place_loaded)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copied and unpickled layouts have no plans."""
        super().__setstate__(state)
        self._place_layout()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HoldsLayout:
        super()._apply(fn, recurse)
        self._place_layout()
        return self

    def layout_for(self, length: int, batch: int | None = None, hint: str = "") -> BlockLayout | None:
        """The layout for `length` queries; TypeError if a function returns None, which would mean every pair.

        batch    of the input, for the check that its axes are not swapped; None for no check
        hint  advice at the end of the error message if they seem swapped (batch equals the length of the layout)
        """
        layout = self.layout
        if layout is None:
            return layout
        if isinstance(layout, BlockLayout):
            if layout.q_len != length and layout.q_len == batch:
                raise ValueError(
                    f"layout describes {layout.q_len} queries, but the input has a batch of {batch} and a length of "
                    f"{length}: it {hint}"
                )
            return layout
        made: Any = layout(length)
        if not isinstance(made, BlockLayout):
            raise TypeError(
                f"layout must be a function that returns a BlockLayout, but for length {length} it returned "
                f"{type(made).__name__}; layout=None, without a function, attends to every pair"
            )
        return made


def _place_loaded(module: HoldsLayout, _incompatible_keys: object) -> None:
    module._place_layout()

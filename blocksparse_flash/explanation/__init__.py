"""Explanation: the report of `explain`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..blocks.statistics import amount
from ..plan_format import GATHERED_TILE
from . import cost, memory, prediction
from .advice import advice
from .call import Call
from .cost import Balance
from .memory import Moved
from .prediction import Prediction


@dataclass(frozen=True)
class Explanation:
    """What a call of `attention` would do; prints as a report.

    backend, reason  the chosen backend, and why
    others           (backend, why not) for every other backend
    order            whether the tokens are reordered, or why not although that would save tiles; empty if it would not
    tile             (queries, keys) of a tile; None for `reference`, which computes every pair
    density          stored / all blocks of the layout, 1.0 without one
    tile_density     computed / all tiles, `causal` included
    partial_share    share of the computed tiles that are masked pair by pair
    fill             share of the computed pairs that attend; ignores kv_lengths
    flops, backward_flops  floating-point operations over the computed tiles: two products forward, five backward
    metadata_bytes   of the plan's tensors, and of the index of a block_bias
    forward, backward  `Moved`: bytes read, written and allocated
    balance          `Balance`
    prediction       `Prediction`: milliseconds on this GPU, and those of dense attention; None without measurements
    unpredicted      why there is no prediction; empty if there is one
    determinism      which bits are equal in every run
    advice           what would make the call faster, in sentences; may be empty
    """

    backend: str
    reason: str
    others: tuple[tuple[str, str], ...]
    order: str
    tile: tuple[int, int] | None
    density: float
    tile_density: float
    partial_share: float
    fill: float
    flops: int
    backward_flops: int
    metadata_bytes: int
    forward: Moved
    backward: Moved
    balance: Balance
    prediction: Prediction | None
    unpredicted: str
    determinism: str
    advice: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f'backend      "{self.backend}": {self.reason}']
        lines += [f'   not       "{name}": {why}' for name, why in self.others]
        lines += [f"order        {self.order}"] if self.order else []
        lines += [
            f"density      {_percent(self.density)} of the layout's blocks",
            *self._tile_lines(),
            f"forward      {amount(self.flops, 'FLOP', 4)}, {_moved(self.forward)}",
            f"backward     {amount(self.backward_flops, 'FLOP', 4)}, {_moved(self.backward)}",
            f"metadata     {self.metadata_bytes} bytes",
            *self._balance_lines(),
            *self._time_lines(),
            f"determinism  {self.determinism}",
            *(f"advice       {sentence}" for sentence in self.advice),
        ]
        return "\n".join(lines)

    def _tile_lines(self) -> list[str]:
        if self.tile is None:
            return [f"tiles        none: every pair is computed; {self.fill:.1%} of them attend"]
        q, kv = self.tile
        return [
            f"tiles        {q} queries x {kv} keys; {_percent(self.tile_density)} of them are computed",
            f"   masked    {self.partial_share:.1%} of these, pair by pair; {self.fill:.1%} of their pairs attend",
        ]

    def _balance_lines(self) -> list[str]:
        balance = self.balance
        rows = f"{balance.longest_row} tiles at most, {balance.mean_row:.4g} on average"
        lines = [f"balance      rows: {rows}; columns: {balance.longest_col} and {balance.mean_col:.4g}"]
        if balance.n_sms is not None:
            lines.append(
                f"   costs     forward {balance.forward:.2f}, backward {balance.backward:.2f} times what evenly spread "
                f"work would take on {balance.n_sms} SMs"
            )
        return lines

    def _time_lines(self) -> list[str]:
        predicted = self.prediction
        if predicted is None:
            return [f"time         not predicted: {self.unpredicted}"]
        lines = [f"time         forward {_ms(predicted.forward_ms)}, backward {_ms(predicted.backward_ms)}"]
        if predicted.dense_forward_ms != predicted.forward_ms:
            lines.append(
                f"   dense     forward {_ms(predicted.dense_forward_ms)}, backward {_ms(predicted.dense_backward_ms)}: "
                f"{_two_digits(predicted.dense_forward_ms / predicted.forward_ms)} and "
                f"{_two_digits(predicted.dense_backward_ms / predicted.backward_ms)} times as long"
            )
        lines.append(f"   by        {predicted.basis}")
        lines += [f"   not calibrated: {caveat}" for caveat in predicted.caveats]
        return lines


def _percent(share: float) -> str:
    """A share in percent, to four digits.

    >>> _percent(1.0), _percent(0.0410625)
    ('100%', '4.106%')
    """
    return f"{100 * share:.4g}%"


def _two_digits(value: float) -> str:
    """Two significant digits, as many as a prediction is worth.

    >>> _two_digits(0.3456), _two_digits(17151.0)
    ('0.35', '17000')
    """
    return f"{float(f'{value:.2g}'):.10g}"


def _ms(value: float) -> str:
    return f"{_two_digits(value)} ms" if value < 1000 else f"{_two_digits(value / 1000)} s"


def _moved(moved: Moved) -> str:
    workspace = "" if moved.workspace is None else f", workspace {amount(moved.workspace, 'B', 4)}"
    return f"reads {amount(moved.reads, 'B', 4)}, writes {amount(moved.writes, 'B', 4)}{workspace}"


def _reason_for_tiles(call: Call) -> str:
    """Why a call iterates over other tiles than 128 x 128; empty for one that does not."""
    if call.layout is None or not call.is_fine:
        return ""
    if call.tile == GATHERED_TILE:
        tiles, share = "64 x 16, four per step", call.shares.gathered
    else:
        tiles, share = "64 x 64", call.shares.fine
    return (
        f"; in tiles of {tiles}, because they cover only {share:.0%} of the pairs that tiles of 128 x 128 would compute"
    )


def _explained_order(call: Call) -> str:
    """Whether the tokens of a call are reordered, or why not although that would save tiles."""
    best = call.best_order
    if best is None:
        return ""
    names = [*([] if best.q is None else ["q"]), *([] if best.kv is None else ["k", "v"])]
    copied, order = f"{_enumerated(names)} are copied", "into an order in which scattered tokens share tiles"
    if call.reordered is None:
        why = f"the tokens keep their order; without {call.why_not_reordered}"
        return f"{why}, {_enumerated(names)} would be copied {order}"
    plain, done = (cost.work(each) for each in (dataclasses.replace(call, keeps_order=True), call))
    tiles = f"{done.computed / plain.computed:.2g} times as many pairs are computed as without that"
    return f"{copied} {order}: {tiles}" + ("" if best.q is None else ". out and lse are put back")


def _enumerated(names: list[str]) -> str:
    """`q, k and v`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def explained(call: Call, *, reason: str, others: tuple[tuple[str, str], ...], determinism: str) -> Explanation:
    """The explanation of a call. reason, others: see `dispatch.Choice`."""
    done, device, table = cost.work(call), cost.device_of(call.q.device), prediction.calibrations()
    predicted, no_prediction_reason = cost.predict(call, device, table)
    spread = cost.balance(call, device, table)
    is_reference = call.backend == "reference"
    return Explanation(
        backend=call.backend,
        reason=reason + _reason_for_tiles(call),
        others=others,
        order=_explained_order(call),
        tile=None if is_reference else (call.side, call.tile),
        density=1.0 if call.layout is None else call.layout.density,
        tile_density=done.tiles / done.grid if done.grid else 1.0,
        partial_share=done.partial / done.tiles if done.tiles else 0.0,
        fill=done.attending / done.computed if done.computed else 1.0,
        flops=2 * done.computed * (call.head_dim + call.v_dim),
        backward_flops=2 * done.computed * (3 * call.head_dim + 2 * call.v_dim),
        metadata_bytes=memory.metadata_bytes(call),
        forward=memory.forward(call),
        backward=memory.backward(call),
        balance=spread,
        prediction=predicted,
        unpredicted=no_prediction_reason,
        determinism=determinism,
        advice=advice(call, done, spread, device, predicted),
    )

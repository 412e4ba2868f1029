"""Training on a GPU: CUDA graphs give the losses of steps that the host launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="needs the extra [lra]")
pytest.importorskip("lightning", reason="needs the extra [lra]")
pytest.importorskip("jsonargparse", reason="needs the extra [lra]")

from tests.benchmarks.lra.test_training import GRAPHED, lightning_leaves_no_trace, losses, run

# the fixture needs a name here
assert lightning_leaves_no_trace
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# a graph is captured on a stream of its own, and torch.compile looks at the gradients of what it traces
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_graphed_training_has_the_same_losses(is_compiled: bool, tmp_path: Path) -> None:
    """With clipped gradients, averaged weights and validations between the steps."""
    averaging = {"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {"decay": 0.5}}
    trainer = {
        **GRAPHED["trainer"], "accelerator": "cuda", "precision": "bf16-mixed", "gradient_clip_val": 0.5,
        "max_steps": 12, "callbacks": [averaging],
    }  # fmt: skip
    for is_graphed in (False, True):
        model: dict[str, Any] = {**GRAPHED["model"], "is_graphed": is_graphed, "is_compiled": is_compiled}
        run(tmp_path / str(is_graphed), tmp_path, data=GRAPHED["data"], model=model, trainer=trainer)
    launched, graphed = losses(tmp_path / "False"), losses(tmp_path / "True")
    assert len(launched) == 12 and max(launched.values()) - min(launched.values()) > 0.01
    for step, loss in launched.items():
        assert graphed[step] == pytest.approx(loss, abs=5e-3)

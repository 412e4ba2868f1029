"""Names that transformers and the config of a model use, and texts shared by error messages."""

from __future__ import annotations

import inspect
from typing import Any

import torch

# not "blocksparse_flash": transformers takes every name with "flash" in it for a build of the package flash-attn
ATTENTION_NAME = "blocksparse"
# the attribute of a model's config that holds its layout
CONFIG_KEY = "attention_layout"
# docs/huggingface.md lists tested models
HINT = (
    "use a model that attends through transformers' attention interface, such as Llama, GPT-2 or BERT, or keep this "
    "model's own attention: attn_implementation='sdpa' or 'eager', with config.attention_layout = None"
)


def owner_of(config: Any) -> str | None:
    """Class name of a config; identifies it among the configs of a model."""
    return None if config is None else type(config).__name__


def running_layer() -> str:
    """The text "<innermost> of <outermost>" of the modules whose forwards are running, for messages."""
    if torch.compiler.is_compiling():
        return "this model"
    names = []
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, torch.nn.Module):
            names.append(type(module).__name__)
        frame = frame.f_back
    if not names:
        return "this code"
    return names[0] if names[0] == names[-1] else f"{names[0]} of {names[-1]}"

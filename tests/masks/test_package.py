"""blocksparse_flash.masks: the package of `import masks`, also behind another module of that name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import blocksparse_flash
import masks
from masks import deepspeed

ROOT = Path(__file__).resolve().parents[2]

# what `import masks` finds in the user's folder: a file and its text
OTHER_MASKS = {
    "a module": ("masks.py", "MINE = True\n"),
    "a package": ("masks/__init__.py", "MINE = True\n"),
    "a module that takes our names": ("masks.py", "MINE = True\nfrom blocksparse_flash.masks import *\n"),
}


def output(code: str, folder: Path, library: Path = ROOT, *options: str) -> str:
    """Standard output of `code` in a fresh interpreter that finds `folder` first and `library` next."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(library)])}
    command = [sys.executable, *(options or ("-c", code))]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def behind(kind: str, folder: Path) -> Path:
    """A folder in which `import masks` finds something of the user's."""
    name, text = OTHER_MASKS[kind]
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


def test_both_names_are_one_package() -> None:
    assert blocksparse_flash.masks is masks
    assert blocksparse_flash.masks.deepspeed is deepspeed
    assert not hasattr(blocksparse_flash.masks, "nothing")


def test_submodules_have_both_names() -> None:
    import blocksparse_flash.masks.butterfly
    import blocksparse_flash.masks.deepspeed
    from blocksparse_flash.masks.local import causal

    assert causal is masks.causal
    # the function, not the module of that name
    assert blocksparse_flash.masks.butterfly is masks.butterfly
    assert sys.modules["blocksparse_flash.masks.deepspeed"] is deepspeed


def test_folders_of_the_library_need_no_import_of_their_own() -> None:
    for name in ("distributed", "huggingface", "interop", "masks", "nn"):
        assert name in dir(blocksparse_flash)
        assert getattr(blocksparse_flash, name).__doc__
    with pytest.raises(AttributeError, match="module 'blocksparse_flash' has no attribute 'mask'"):
        blocksparse_flash.mask  # type: ignore[attr-defined]  # noqa: B018


def test_no_import_is_needed_in_a_fresh_process(tmp_path: Path) -> None:
    code = """
import blocksparse_flash
print(blocksparse_flash.masks.local(256, window=3).nnz)
from blocksparse_flash.masks import longformer
import masks
print(masks is blocksparse_flash.masks)
"""
    assert output(code, tmp_path).split() == ["4", "True"]


BEHIND_ANOTHER = """
import pickle
import torch
import blocksparse_flash
print(blocksparse_flash.masks.local(256, window=3).nnz)
from blocksparse_flash import masks as ours
print(ours.build("butterfly | local(window=64)", 1024) == ours.butterfly(1024) | ours.local(1024, window=64))
import masks
assert masks is not ours and masks.__name__ == "masks"
from blocksparse_flash.masks import deepspeed
from blocksparse_flash.masks.butterfly import butterfly
print(deepspeed.DenseSparsityConfig(num_heads=1).layout(64).density)
assert butterfly is ours.butterfly
for thing in (ours.local, ours.causal(256), deepspeed.DenseSparsityConfig):
    again = pickle.loads(pickle.dumps(thing))
    assert again is thing or again == thing
from blocksparse_flash import nn
print(nn.SelfAttention(16, 2, "local(window=2)")(torch.randn(1, 256, 16)).shape[1])
"""


@pytest.mark.sweep(by=lambda kind: {"one"})
@pytest.mark.parametrize("kind", OTHER_MASKS)
def test_builders_are_found_behind_another_masks(kind: str, tmp_path: Path) -> None:
    assert output(BEHIND_ANOTHER, behind(kind, tmp_path)).split() == ["4", "True", "1.0", "256"]


def test_the_command_line_is_found_behind_another_masks(tmp_path: Path) -> None:
    said = output("", behind("a module", tmp_path), ROOT, "-m", "blocksparse_flash.masks", "list")
    assert "\nlocal(window, block_size=128)\n" in said


# importing transformers takes seconds
@pytest.mark.thorough
def test_huggingface_builds_specifications_behind_another_masks(tmp_path: Path) -> None:
    code = """
import torch, transformers
from blocksparse_flash import BlockLayout, huggingface
huggingface.register()
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
ids = torch.arange(32)[None]
outs = []
near = BlockLayout.from_predicate(lambda q, kv: (q - kv).abs() <= 2, 32, 32, block_size=128)
for layout in ("local(window=2)", near):
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=32, attention_layout=layout)
    torch.manual_seed(0)
    outs.append(transformers.LlamaForCausalLM._from_config(config, attn_implementation="blocksparse")(ids).logits)
print(torch.equal(*outs))
"""
    assert output(code, behind("a module", tmp_path)).split() == ["True"]


def test_the_folders_of_the_wheel_are_enough(tmp_path: Path) -> None:
    """The folders that pyproject.toml puts into a wheel, as installed, behind another masks."""
    text = (ROOT / "pyproject.toml").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("packages = ")]
    site = tmp_path / "site-packages"
    for name in line.partition("=")[2].strip(' []"').split('", "'):
        shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    user = tmp_path / "user"
    user.mkdir()
    code = "import blocksparse_flash as b; print(b.masks.__file__, b.masks.build('causal', 256).nnz)"
    said = output(code, behind("a module", user), site)
    assert said.split() == [str(site / "masks" / "__init__.py"), "3"]

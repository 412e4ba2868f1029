"""`python -m masks`: show, describe, list and bench."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import masks
from blocksparse_flash import BlockLayout
from masks.command_line import main

SPEC = "butterfly | local(window=20)"


def test_show_prints_the_picture(capsys):
    assert main(["show", SPEC, "--length", "300", "--block-size", "32"]) == 0
    expected = masks.butterfly(300, block_size=32) | masks.local(300, window=20, block_size=32)
    assert capsys.readouterr().out == f"{expected}\n"


def test_show_takes_two_lengths_and_two_sides(capsys):
    assert main(["show", "causal", "--length", "300", "--kv-length", "200", "--block-size", "64,32"]) == 0
    assert capsys.readouterr().out == f"{masks.causal((300, 200), block_size=(64, 32))}\n"


def test_show_draws_to_a_file(monkeypatch, capsys, tmp_path):
    """The figure returned by `plot` is saved at the given path; `plot` itself is tested elsewhere."""
    drawn = []

    class Figure:
        def __init__(self, layout):
            self.layout = layout

        def savefig(self, path):
            drawn.append((self.layout, path))

    def plot(layout: BlockLayout) -> Figure:
        return Figure(layout)

    monkeypatch.setattr(BlockLayout, "plot", plot)
    assert main(["show", SPEC, "--length", "300", "--out", str(tmp_path / "mask.svg")]) == 0
    assert drawn == [(masks.build(SPEC, 300), tmp_path / "mask.svg")]
    assert "mask.svg" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_show_makes_a_picture(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    assert main(["show", SPEC, "--length", "300", "--out", str(tmp_path / f"mask{suffix}")]) == 0
    assert (tmp_path / f"mask{suffix}").stat().st_size > 1000


def test_an_unwritable_picture_is_an_error(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    path = tmp_path / "missing" / "mask.svg"
    assert main(["show", SPEC, "--length", "300", "--out", str(path)]) == 2
    assert f"--out: cannot write {path}: No such file or directory" in capsys.readouterr().err


def test_describe_prints_the_report(monkeypatch, capsys):
    monkeypatch.setattr(BlockLayout, "describe", lambda layout: f"{layout.nnz} blocks")
    assert main(["describe", SPEC, "--length", "300", "--block-size", "64"]) == 0
    assert capsys.readouterr().out == f"{masks.build(SPEC, 300, block_size=64).nnz} blocks\n"


def test_describe_makes_a_report(capsys):
    assert main(["describe", SPEC, "--length", "300"]) == 0
    assert capsys.readouterr().out == f"{masks.build(SPEC, 300).describe()}\n"


def test_list_names_every_mask_and_its_arguments(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = {line.partition("(")[0] for line in lines if not line.startswith(" ")}
    # token orders are not masks
    assert named == {*masks.__all__} - {"build", "hilbert_order", "morton_order", "tile_order"}
    assert lines[lines.index("local(window, block_size=128)") + 1].startswith("    Each token attends to the tokens at")
    options = "causal=False, window=None, prefix=None, kv_cu_seqlens=None, max_seqlen=None, block_size=128"
    assert f"documents(cu_seqlens, {options})" in lines


def test_bench_counts(capsys):
    assert main(["bench", SPEC, "--length", "1000", "--repeat", "2"]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    layout = masks.build(SPEC, 1000)
    n_full = int((layout.bitmask_ids == -1).sum())
    tensors = (layout.indptr, layout.indices, layout.bitmask_ids, layout.bitmasks)
    assert said["blocks"] == f"{layout.nnz} stored: {n_full} full, {layout.nnz - n_full} partial"
    assert float(said["density"]) == pytest.approx(layout.density, rel=1e-5)
    assert said["distinct"] == f"bitmasks {len(layout.bitmasks)}"
    assert said["metadata"] == f"{sum(4 * tensor.numel() for tensor in tensors)} bytes"
    assert "median of 2" in said["built"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "locl", "--length", "300"], "no mask is called locl. Did you mean local?"),
        (
            ["show", "causal", "--length", "-3"],
            "length: expected int, a number of tokens, from 0 to 2147483647, got -3",
        ),
        (["describe", "causal", "--length", "3", "--block-size", "20"], "block_size: expected multiples of 16"),
        (["bench", "causal", "--length", "3", "--repeat", "0"], "--repeat: expected at least 1, got 0"),
    ],
)
def test_errors_give_a_message_and_exit_status_2(capsys, arguments, message):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["draw"], "invalid choice: 'draw'"),
        (["show", "causal"], "required: --length"),
        (["show", "causal", "--length", "many"], "invalid int value: 'many'"),
        (["show", "causal", "--length", "3", "--block-size", "big"], "expected tokens, as 128, or two sides"),
        (["show", "causal", "--length", "3", "--block-size", "16,16,16"], "expected tokens, as 128, or two sides"),
        (
            ["show", "causal", "--length", "3", "--out", "mask.txt"],
            "a name that ends in .png or .svg or .pdf, got mask.txt",
        ),
        (["describe", "causal", "--length", "3", "--out", "mask.svg"], "unrecognized arguments: --out"),
    ],
)
def test_a_wrong_option_prints_the_usage(capsys, arguments, message):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_reader_may_stop_early():
    command = [sys.executable, "-m", "masks", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0


def test_a_picture_without_matplotlib_is_an_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["show", "causal", "--length", "256", "--out", str(tmp_path / "picture.png")]) == 2
    assert "python -m masks: layout.plot needs matplotlib" in capsys.readouterr().err


def test_the_module_runs():
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "masks", *arguments],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )

    shown = run("show", "causal", "--length", "300")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"{masks.causal(300)}\n", "")
    refused = run("show", "caussal", "--length", "300")
    assert refused.returncode == 2 and refused.stderr.endswith("    caussal\n    ^^^^^^^\n")

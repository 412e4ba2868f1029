"""Command line of `python -m masks`: draw, describe, list and time masks."""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .build import arguments_line, build, exported

EPILOG = """\
examples:
  python -m masks list
  python -m masks show "butterfly | local(window=512)" --length 16384
  python -m masks show "bigbird(seed=0)" --length 4096 --out bigbird.svg
  python -m masks describe "causal - local(window=64)" --length 65536
  python -m masks bench "longformer(window=256, global_tokens=16)" --length 1048576
"""

PICTURES = (".png", ".svg", ".pdf")


def _block_size(text: str) -> int | tuple[int, int]:
    sides = text.split(",")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise argparse.ArgumentTypeError(f"expected tokens, as 128, or two sides, as 64,128; got {text}")
    return int(text) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _picture_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"expected a name that ends in {' or '.join(PICTURES)}, got {text}")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m masks",
        description="Draw, describe and time block-sparse masks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    mask = argparse.ArgumentParser(add_help=False)
    mask.add_argument("spec", help='a mask, or masks joined by | & - ^ ~: "butterfly | local(window=512)"')
    mask.add_argument("--length", type=int, required=True, help="tokens, or query tokens if --kv-length is given")
    mask.add_argument("--kv-length", type=int, help="key tokens, if not --length")
    mask.add_argument(
        "--block-size",
        type=_block_size,
        default=128,
        help="tokens per side: 128 (default), or a pair as 64,128",
    )
    show = commands.add_parser("show", parents=[mask], help="draw a mask in text, or to a file")
    show.add_argument(
        "--out", type=_picture_path, help=f"image file to write, {' or '.join(PICTURES)}; needs matplotlib"
    )
    commands.add_parser("describe", parents=[mask], help="print statistics of a mask")
    commands.add_parser("list", help="list every mask with its arguments")
    bench = commands.add_parser("bench", parents=[mask], help="time the construction of a mask")
    bench.add_argument("--repeat", type=int, default=5, help="number of builds; the median is printed (default 5)")
    return parser


def _layout(options: argparse.Namespace) -> Any:
    length = options.length if options.kv_length is None else (options.length, options.kv_length)
    return build(options.spec, length, block_size=options.block_size)


def _show(options: argparse.Namespace) -> None:
    layout = _layout(options)
    if options.out is None:
        print(layout)
        return
    try:
        layout.plot().savefig(options.out)
    except OSError as error:
        raise ValueError(f"--out: cannot write {options.out}: {error.strerror or error}") from error
    print(f"drawn to {options.out}")


def _list() -> None:
    for name, builder in exported().items():
        sentence = (inspect.getdoc(builder) or "").partition("\n\n")[0].replace("\n", " ")
        print(f"{name}({arguments_line(builder)})")
        print(f"    {sentence}")


def _bench(options: argparse.Namespace) -> None:
    if options.repeat < 1:
        raise ValueError(f"--repeat: expected at least 1, got {options.repeat}")
    times = []
    for _ in range(options.repeat):
        begin = time.perf_counter()
        layout = _layout(options)
        times.append(1000 * (time.perf_counter() - begin))
    tensors = (layout.indptr, layout.indices, layout.bitmask_ids, layout.bitmasks)
    n_full = int((layout.bitmask_ids < 0).sum())
    print(f"built in          {statistics.median(times):.3f} ms (median of {len(times)}; first {times[0]:.3f} ms)")
    print(f"blocks            {layout.nnz} stored: {n_full} full, {layout.nnz - n_full} partial")
    print(f"density           {layout.density:.6g}")
    print(f"distinct bitmasks {len(layout.bitmasks)}")
    print(f"metadata          {sum(tensor.nbytes for tensor in tensors)} bytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    arguments  command-line arguments; None means those of the process
    returns    exit status: 0, or 2 after an error message on stderr
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "show":
            _show(options)
        elif options.command == "describe":
            print(_layout(options).describe())
        elif options.command == "list":
            _list()
        else:
            _bench(options)
        sys.stdout.flush()
    # matplotlib may be missing
    except (ValueError, ImportError) as error:
        print(f"python -m masks: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # the reader, such as head, has enough; Python would flush once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0

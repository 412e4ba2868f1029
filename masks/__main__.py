"""Entry point of `python -m masks`."""

from .command_line import main

if __name__ == "__main__":
    raise SystemExit(main())

"""What happens on `python -m masks`?

Knows that the command line answers.
Must not know its commands.
"""

from .command_line import main

if __name__ == "__main__":
    raise SystemExit(main())

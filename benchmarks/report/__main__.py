"""`python -m benchmarks.report` rewrites the generated sections, tables and pictures."""

import argparse
import sys

from . import pages

# there are no options, but --help must not rewrite anything
argparse.ArgumentParser(
    prog="python -m benchmarks.report", description=pages.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
).parse_args()
try:
    pages.main()
except (OSError, ValueError) as error:
    sys.exit(f"python -m benchmarks.report: {error}")

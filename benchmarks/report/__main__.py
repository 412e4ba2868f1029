"""`python -m benchmarks.report` rewrites the generated sections, tables and pictures."""

import argparse

from . import pages

# there are no options, but --help must not rewrite anything
argparse.ArgumentParser(
    prog="python -m benchmarks.report", description=pages.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
).parse_args()
pages.main()

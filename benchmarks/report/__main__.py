"""`python -m benchmarks.report` rewrites the generated sections, tables and pictures."""

from .pages import main

main()

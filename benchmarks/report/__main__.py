"""`python -m benchmarks.report` rewrites the tables of README.md and benchmarks/README.md and the pictures in results/."""

from .pages import main

main()

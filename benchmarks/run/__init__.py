"""What measures: each module is a command, `python -m benchmarks.run.attention`, that appends JSON lines to results/."""

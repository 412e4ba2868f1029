"""Tables and plots of what was measured: `python -m benchmarks.report` rewrites all of them."""

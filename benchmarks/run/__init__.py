"""Measurements: each module is a command that appends JSON lines to results/."""

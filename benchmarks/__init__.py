"""Measurements and experiments. Nothing in the library imports them."""

"""Attention over keys and values in pages, as serving engines keep them."""

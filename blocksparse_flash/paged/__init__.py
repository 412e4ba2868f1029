"""Selection of pages for `paged_attention`, and appending of tokens to pages.

A cache of pages is a tensor (n_pages, kv_heads, page_size, head_dim). Engines that order it (n_pages, page_size,
kv_heads, head_dim) pass `cache.transpose(1, 2)`: strides may be any, and nothing is copied.
"""

from .selection import page_bounds, page_means, score_pages, select_pages
from .writing import append_to_pages

__all__ = ["append_to_pages", "page_bounds", "page_means", "score_pages", "select_pages"]

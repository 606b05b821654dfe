"""Attention of new tokens over a paged key-value cache."""

from pallas_kernels.paged_attention.api import Choice, paged_attention

__all__ = ["Choice", "paged_attention"]

"""Attention of new tokens over a paged key-value cache."""

from pallas_kernels.paged_attention.api import paged_attention, reads_lengths
from pallas_kernels.paged_attention.decode import decode_attention

__all__ = ["decode_attention", "paged_attention", "reads_lengths"]

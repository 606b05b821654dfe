"""Attention of new tokens over a paged key-value cache."""

from pallas_kernels.paged_attention.api import MAX_TOKENS, paged_attention, reads_lengths
from pallas_kernels.paged_attention.decode import decode_attention

__all__ = ["MAX_TOKENS", "decode_attention", "paged_attention", "reads_lengths"]

"""Attention of a chunk of new tokens over paged keys and values, its own included."""

from pallas_kernels.paged_prefill.api import mosaic_refusal, paged_prefill

__all__ = ["mosaic_refusal", "paged_prefill"]

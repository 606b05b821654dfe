"""The attention half of a decoder layer in one kernel, for the few tokens of a small model's decode step."""

from pallas_kernels.decoder_block.api import attention_block, attention_block_refusal

__all__ = ["attention_block", "attention_block_refusal"]

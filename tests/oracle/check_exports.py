"""Compares what compressed-tensors decodes from an exported folder with what jaxinfer decoded, as logits.

    jaxinfer convert STORE packed --format compressed-tensors
    jaxinfer convert STORE dense --format safetensors --dtype float32
    python tests/oracle/check_exports.py packed dense     # with torch, transformers 5.17, compressed-tensors 0.20

Run by hand: int4 with zeros and without, int8, fp8 and a mixed plan on the tiny llama of `tests/fixtures/families`
agree to 1e-5, and AWQ's codes to the bit. Version 0.20 refuses act-order, whatever the file.
"""

import sys

import torch
from transformers import AutoModelForCausalLM


def logits(folder: str) -> torch.Tensor:
    """Of the first 16 ids in a row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(3, 19)[None, :]).logits.float()


packed, dense = map(logits, sys.argv[1:])
print(f"largest difference {(packed - dense).abs().max().item():.3g}, largest logit {dense.abs().max().item():.3g}")

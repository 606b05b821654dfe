"""A whole model gives the same bits every time: kernels overlap launches, and none may read what is not there yet."""

from pathlib import Path

import jax
import numpy as np
import pytest

import jaxinfer as ji

SHAPES = Path(__file__).parents[1] / "benchmarks" / "shapes"


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="it is about kernels of a GPU; this process has none")
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_output_repeats_on_the_gpu(batch: int) -> None:
    """The 0.6B shape in 4 bits: a decode step is small kernels of ours alone, one behind the other."""
    model = ji.load(SHAPES / "qwen3-0.6b", random_weights=0, quantize="int4")
    prompts = np.random.default_rng(0).integers(0, 100_000, (batch, 200)).tolist()
    params = ji.SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True, logprobs=1)
    first, *others = [ji.generate(model, prompts, params) for _ in range(5)]
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert one.token_ids == two.token_ids
            assert one.logprobs == two.logprobs

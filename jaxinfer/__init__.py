"""LLM inference compiled by JAX/XLA for NVIDIA GPUs.

    import jaxinfer as ji
    model = ji.load("smollm2-135m-instruct")
    ji.generate(model, ["The capital of France is"], ji.SamplingParams(max_tokens=32, temperature=0.0))[0].text
"""

from checkpoints.errors import CheckpointError as CheckpointError
from checkpoints.pull import pull as pull
from jaxinfer.config import ModelConfig as ModelConfig
from jaxinfer.generate import generate as generate
from jaxinfer.generate import logits as logits
from jaxinfer.generate import stream as stream
from jaxinfer.kv_cache import PagedKVCache as PagedKVCache
from jaxinfer.model import Model as Model
from jaxinfer.model import load as load
from jaxinfer.outputs import Completion as Completion
from jaxinfer.outputs import Delta as Delta
from jaxinfer.outputs import RequestOutput as RequestOutput
from jaxinfer.sampling_logprobs import Logprob as Logprob
from jaxinfer.sampling_params import SamplingParams as SamplingParams
from jaxinfer.tokenization import Tokenizer as Tokenizer

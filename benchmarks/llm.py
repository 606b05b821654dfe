"""An `LLM` class with the constructor and the `generate` of vLLM and nano-vllm, over jaxinfer's engine.

from benchmarks.llm import LLM, SamplingParams      # or: from vllm import ...     or: from nanovllm import ...
outputs = LLM("folder", max_model_len=4096).generate(prompts, params)
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import jaxinfer as ji
from benchmarks.harness import ROOT
from jaxinfer import SamplingParams as SamplingParams

type Prompt = str | Sequence[int] | dict[str, Any]


class LLM:
    """One model behind one engine. A folder that holds only a config.json gets random weights."""

    def __init__(
        self,
        model: str | ji.Model,
        *,
        max_model_len: int | None = None,
        int4: bool = False,
        kv_dtype: str | None = None,
        warmup: bool = True,
        **engine: Any,
    ) -> None:
        self.model = model if isinstance(model, ji.Model) else load(model, int4, kv_dtype)
        self.engine = ji.Engine(self.model, ji.EngineConfig(max_context=max_model_len, **engine))
        if warmup:
            self.engine.warmup()

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: Any = None, *, use_tqdm: bool = True
    ) -> list[ji.RequestOutput]:
        """Prompts are texts, lists of token ids, or vLLM's {"prompt_token_ids": [...]}."""
        plain = [prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt for prompt in prompts]
        return self.engine.generate(plain, sampling_params, progress=use_tqdm)


def load(name: str, int4: bool, kv_dtype: str | None = None) -> ji.Model:
    """A shape of `benchmarks/shapes`, another folder with only a config.json, or anything `jaxinfer.load` takes."""
    folder = ROOT / "shapes" / name if (ROOT / "shapes" / name).exists() else pathlib.Path(name)
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.gguf")):
        return ji.load(folder, random_weights=0, quantize="int4" if int4 else None, kv_dtype=kv_dtype)
    return ji.load(name, packed=int4, kv_dtype=kv_dtype)

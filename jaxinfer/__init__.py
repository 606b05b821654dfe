"""LLM inference compiled by JAX/XLA for NVIDIA GPUs.

import jaxinfer as ji
model = ji.load("smollm2-135m-instruct")
ji.generate(model, ["The capital of France is"], ji.SamplingParams(max_tokens=32, temperature=0.0))[0].text
"""

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers take it for typing's, whose import is most of the time before `jaxinfer` listens
if TYPE_CHECKING:
    from checkpoints.errors import CheckpointError as CheckpointError
    from checkpoints.pull import pull as pull
    from jaxinfer.config import ModelConfig as ModelConfig
    from jaxinfer.engine.config import EngineConfig as EngineConfig
    from jaxinfer.engine.engine import Engine as Engine
    from jaxinfer.engine.metrics import EngineMetrics as EngineMetrics
    from jaxinfer.generation import generate as generate
    from jaxinfer.generation import logits as logits
    from jaxinfer.generation import stream as stream
    from jaxinfer.kv_cache import PagedKVCache as PagedKVCache
    from jaxinfer.model import Model as Model
    from jaxinfer.model import inspect as inspect
    from jaxinfer.model import load as load
    from jaxinfer.outputs import Completion as Completion
    from jaxinfer.outputs import Delta as Delta
    from jaxinfer.outputs import RequestOutput as RequestOutput
    from jaxinfer.planning.plan import memory_plan as memory_plan
    from jaxinfer.planning.result import MemoryPlan as MemoryPlan
    from jaxinfer.quantization.api import quantize as quantize
    from jaxinfer.quantization.calibration import Calibration as Calibration
    from jaxinfer.quantization.pair import quantize_draft as quantize_draft
    from jaxinfer.quantization.sensitivity import sensitivity as sensitivity
    from jaxinfer.quantization.sensitivity_table import Sensitivity as Sensitivity
    from jaxinfer.sampling_logprobs import Logprob as Logprob
    from jaxinfer.sampling_params import SamplingParams as SamplingParams
    from jaxinfer.scoring import Perplexity as Perplexity
    from jaxinfer.scoring import Score as Score
    from jaxinfer.scoring import perplexity as perplexity
    from jaxinfer.scoring import score as score
    from jaxinfer.speculative.compatibility import expected_acceptance as expected_acceptance
    from jaxinfer.speculative.model_draft import ModelDraft as ModelDraft
    from jaxinfer.speculative.ngram import NgramDraft as NgramDraft
    from jaxinfer.speculative.report import SpeculationReport as SpeculationReport
    from jaxinfer.speculative.self_draft import SelfDraft as SelfDraft
    from jaxinfer.speculative.speculation import Speculation as Speculation
    from jaxinfer.tiers import TieredKV as TieredKV
    from jaxinfer.tokenization import Tokenizer as Tokenizer

_MODULES = {
    "Calibration": "jaxinfer.quantization.calibration",
    "CheckpointError": "checkpoints.errors",
    "Completion": "jaxinfer.outputs",
    "Delta": "jaxinfer.outputs",
    "Engine": "jaxinfer.engine.engine",
    "EngineConfig": "jaxinfer.engine.config",
    "EngineMetrics": "jaxinfer.engine.metrics",
    "Logprob": "jaxinfer.sampling_logprobs",
    "MemoryPlan": "jaxinfer.planning.result",
    "Model": "jaxinfer.model",
    "ModelConfig": "jaxinfer.config",
    "ModelDraft": "jaxinfer.speculative.model_draft",
    "NgramDraft": "jaxinfer.speculative.ngram",
    "PagedKVCache": "jaxinfer.kv_cache",
    "Perplexity": "jaxinfer.scoring",
    "RequestOutput": "jaxinfer.outputs",
    "SamplingParams": "jaxinfer.sampling_params",
    "Score": "jaxinfer.scoring",
    "SelfDraft": "jaxinfer.speculative.self_draft",
    "Sensitivity": "jaxinfer.quantization.sensitivity_table",
    "Speculation": "jaxinfer.speculative.speculation",
    "SpeculationReport": "jaxinfer.speculative.report",
    "TieredKV": "jaxinfer.tiers",
    "Tokenizer": "jaxinfer.tokenization",
    "expected_acceptance": "jaxinfer.speculative.compatibility",
    "generate": "jaxinfer.generation",
    "inspect": "jaxinfer.model",
    "load": "jaxinfer.model",
    "logits": "jaxinfer.generation",
    "memory_plan": "jaxinfer.planning.plan",
    "perplexity": "jaxinfer.scoring",
    "pull": "checkpoints.pull",
    "quantize": "jaxinfer.quantization.api",
    "quantize_draft": "jaxinfer.quantization.pair",
    "score": "jaxinfer.scoring",
    "sensitivity": "jaxinfer.quantization.sensitivity",
    "stream": "jaxinfer.generation",
}


if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Imports a public name's module when the name is first used: JAX takes a second, and `jaxinfer --help` waits
        for none of it. No module may have the name of anything here, or importing it would hide the latter."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value

    __all__ = sorted(_MODULES)

    def __dir__() -> list[str]:
        return [*(name for name in globals() if name.startswith("__")), *__all__]

"""Writes `tests/fixtures/families`: tiny random checkpoints, and the logits and greedy tokens of transformers.

Run it in an environment with torch, transformers 5.17 and safetensors; the tests themselves need none:

    python tests/oracle/make_families.py            # every case
    python tests/oracle/make_families.py llama glm4 # these cases

Each folder holds a checkpoint (`config.json`, safetensors) and `expected.npz`:

    tokens             int32 [3, T]
    logits             float32 [3, T, V], teacher forced, eager attention, float32
    short_logits       float32 [3, S, V] of `tokens[:, :S]` alone, only where RoPE depends on the length
    prompt             int32 [9]
    continuation       int32 [24], greedy among ids below `num_tokens`, end-of-sequence ids ignored
    margins            float32 [24], best minus second-best logit at each step of the continuation
    num_tokens         int32 [], ids from here to V are vocabulary padding

Where RoPE depends on the length, the continuation has the frequencies of its final length, 33, throughout.
Everything is seeded by the case's name; a second run writes the same bytes.
"""

import contextlib
import json
import pathlib
import shutil
import sys
import zlib
from collections.abc import Iterator

import numpy as np
import torch
import transformers
from family_cases import BASE, CASES, CONTINUATION_LENGTH, PROMPT_LENGTH, SEQUENCE_LENGTH, SHORT_LENGTH, Case

FAMILIES = pathlib.Path(__file__).parent.parent / "fixtures" / "families"
MINIMUM_MARGIN = 0.05
MAXIMUM_ERROR = 5e-5
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def build_config(case: Case, **changes) -> transformers.PreTrainedConfig:
    settings = json.loads(json.dumps(BASE | case.config | changes))
    if case.model_type != "gemma3":
        return transformers.AutoConfig.for_model(case.model_type, **settings)
    tokens = {"boi_token_index": 90, "eoi_token_index": 91, "image_token_index": 92, "mm_tokens_per_image": 4}
    return transformers.Gemma3Config(text_config=settings, vision_config=VISION, **tokens)


def build_model(config: transformers.PreTrainedConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Built in `dtype` from the start: Gemma rounds its embedding multiplier to the dtype it is created in."""
    if config.model_type == "gemma3":
        auto_class = transformers.AutoModelForImageTextToText
    else:
        auto_class = transformers.AutoModelForCausalLM
    return auto_class.from_config(config, dtype=dtype, attn_implementation="eager").eval()


def randomise(model: torch.nn.Module, case: Case) -> None:
    """Random weights under which attention is peaked, norms and biases matter, and logits are not flat."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    gemma = case.model_type.startswith("gemma")
    storage = getattr(torch, case.storage)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and parameter.ndim == 1:
            # Branches must weigh against the embedding, or a tied head repeats its input. Gemma adds 1.
            level = (0.0 if gemma else 1.0) + (3.0 if "post" in name and gemma else 0.0)
            value = level + 0.25 * noise
        elif parameter.ndim == 1:
            value = 0.5 * noise
        elif "embed_tokens" in name:
            value = noise * (0.35 if gemma else 0.7)
        elif "lm_head" in name:
            value = noise * 2.5 / parameter.shape[-1] ** 0.5
        else:
            value = noise * 1.4 / parameter[0].numel() ** 0.5
        parameter.data = value.to(storage)


def write_checkpoint(case: Case, folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model = build_model(build_config(case))
    randomise(model, case)
    model.config.dtype = getattr(torch, case.storage)
    model.save_pretrained(folder, **({"max_shard_size": case.max_shard_size} if case.max_shard_size else {}))
    (folder / "generation_config.json").unlink()
    if case.spelling == "v4":
        path = folder / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(to_v4(config), indent=2, sort_keys=True) + "\n")


def to_v4(config: dict) -> dict:
    """Respells a configuration the way transformers 4 wrote it: most files on the Hub look like this."""
    config = dict(config)
    if "text_config" in config:
        config["text_config"] = to_v4(config["text_config"])
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.48.0"
    config.pop("layer_types", None)
    parameters = config.pop("rope_parameters", None)
    if parameters is None:
        return config
    if "full_attention" in parameters:
        config["sliding_window_pattern"] = 3
        config.pop("_sliding_window_pattern")
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    parameters = dict(parameters)
    config["rope_theta"] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    if parameters["rope_type"] == "longrope":
        del parameters["rope_type"], parameters["original_max_position_embeddings"]
        parameters["type"] = "longrope"
    elif parameters["rope_type"] == "linear" and "rope_local_base_freq" not in config:
        # Not for Gemma 3, whose files say rope_type: transformers 5 ignores the scaling if they say type.
        parameters["type"] = parameters.pop("rope_type")
    config["rope_scaling"] = None if parameters == {"rope_type": "default"} else parameters
    return config


@contextlib.contextmanager
def everything_float64() -> Iterator[None]:
    """transformers names `torch.float32` in norms, softmax and RoPE; in here that name means float64."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved
        torch.set_default_dtype(torch.float32)


class Oracle:
    """A checkpoint as transformers runs it. Every call builds a new model: RoPE remembers earlier lengths."""

    def __init__(self, folder: pathlib.Path):
        loaded = transformers.AutoConfig.from_pretrained(folder)
        auto_class = (
            transformers.AutoModelForImageTextToText
            if loaded.model_type == "gemma3"
            else transformers.AutoModelForCausalLM
        )
        model, report = auto_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(report.values()), report
        self.config, self.weights = loaded, model.state_dict()

    def model(self, config: transformers.PreTrainedConfig | None = None, dtype=torch.float32) -> torch.nn.Module:
        model = build_model(config or self.config, dtype)
        model.load_state_dict({name: weight.to(dtype) for name, weight in self.weights.items()})
        model.tie_weights()
        return model

    @torch.no_grad()
    def logits(self, tokens: np.ndarray, config: transformers.PreTrainedConfig | None = None) -> np.ndarray:
        return self.model(config)(input_ids=torch.tensor(tokens)).logits.float().numpy()

    @torch.no_grad()
    def logits_float64(self, tokens: np.ndarray) -> np.ndarray:
        with everything_float64():
            return self.model(dtype=torch.float64)(input_ids=torch.tensor(tokens)).logits.numpy()

    @torch.no_grad()
    def greedy(self, prompts: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Continuations [N, 24], margins [N, 24], and whether padding ids would have won somewhere [N].

        Sequences are right-padded to their final length, which attention cannot see and by which RoPE scales.
        """
        length = prompts.shape[1] + CONTINUATION_LENGTH
        model, tokens = self.model(), torch.zeros((len(prompts), length), dtype=torch.int64)
        tokens[:, : prompts.shape[1]] = torch.tensor(prompts)
        margins, padding_wins = [], torch.zeros(len(prompts), dtype=torch.bool)
        for position in range(prompts.shape[1], length):
            logits = model(input_ids=tokens).logits[:, position - 1]
            padding_wins |= logits.argmax(-1) >= num_tokens
            best = logits[:, :num_tokens].topk(2)
            tokens[:, position] = best.indices[:, 0]
            margins.append(best.values[:, 0] - best.values[:, 1])
        return tokens[:, prompts.shape[1] :].numpy(), torch.stack(margins, 1).numpy(), padding_wins.numpy()

    @torch.no_grad()
    def greedy_with_cache(self, prompt: np.ndarray, num_tokens: int) -> np.ndarray:
        model, tokens, cache = self.model(), torch.tensor(prompt[None]), None
        result = []
        for _ in range(CONTINUATION_LENGTH):
            output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
            cache, tokens = output.past_key_values, output.logits[:, -1:, :num_tokens].argmax(-1)
            result.append(int(tokens))
        return np.array(result)


def find_tokens(oracle: Oracle, rng: np.random.Generator, num_tokens: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Random rows on which float32 is accurate: now and then a random network is ill-conditioned."""
    for _ in range(20):
        tokens = rng.integers(0, num_tokens, (3, SEQUENCE_LENGTH))
        logits = oracle.logits(tokens)
        error = np.abs(logits - oracle.logits_float64(tokens)).max()
        if error < MAXIMUM_ERROR:
            return tokens, logits, error
    raise AssertionError(f"float32 logits are off by {error}")


def find_continuation(case: Case, oracle: Oracle, rng: np.random.Generator, num_tokens: int):
    """A prompt whose greedy continuation has clear margins, variety, and meets padding ids where they are."""
    vocab_padded = case.num_tokens is not None
    best_margin = 0.0
    for _ in range(20):
        prompts = rng.integers(0, num_tokens, (64, PROMPT_LENGTH))
        continuations, margins, padding_wins = oracle.greedy(prompts, num_tokens)
        for prompt, continuation, margin, padding_won in zip(
            prompts, continuations, margins, padding_wins, strict=True
        ):
            varied = len(set(continuation.tolist())) >= 10
            best_margin = max(best_margin, margin.min() if varied else 0.0)
            if varied and margin.min() >= MINIMUM_MARGIN and (padding_won or not vocab_padded):
                return prompt, continuation, margin
    raise AssertionError(f"{case.name}: no prompt with clear margins; best {best_margin}")


def write_expected(case: Case, folder: pathlib.Path) -> None:
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    oracle = Oracle(folder)
    vocab_size = oracle.config.get_text_config().vocab_size
    num_tokens = case.num_tokens or (90 if case.model_type == "gemma3" else vocab_size)
    tokens, logits, error = find_tokens(oracle, rng, num_tokens)
    # The spelling in the file means the configuration of the case.
    np.testing.assert_array_equal(oracle.logits(tokens, build_config(case)), logits)
    changes = [
        np.abs(oracle.logits(tokens, build_config(case, **change)) - logits).max() for change in case.must_matter
    ]
    assert all(change > 0.1 for change in changes), f"{case.name}: {changes} for {case.must_matter}"
    prompt, continuation, margins = find_continuation(case, oracle, rng, num_tokens)
    if not case.length_dependent:
        np.testing.assert_array_equal(oracle.greedy_with_cache(prompt, num_tokens), continuation)
    expected = {
        "tokens": tokens.astype(np.int32),
        "logits": logits,
        "prompt": prompt.astype(np.int32),
        "continuation": continuation.astype(np.int32),
        "margins": margins,
        "num_tokens": np.int32(num_tokens),
    }
    if case.length_dependent:
        expected["short_logits"] = oracle.logits(tokens[:, :SHORT_LENGTH])
    np.savez_compressed(folder / "expected.npz", **expected)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(
        f"{case.name:24} {size // 1024:4} KB, float32 error {error:.1e}, logits std {logits.std():.2f}, "
        f"least margin {margins.min():.2f}, {len(set(continuation.tolist()))} distinct, "
        f"changes {', '.join(f'{change:.2f}' for change in changes)}"
    )


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    selected = set(sys.argv[1:])
    unknown = selected - {case.name for case in CASES}
    assert not unknown, f"no such cases: {sorted(unknown)}"
    for case in CASES:
        if not selected or case.name in selected:
            write_checkpoint(case, FAMILIES / case.name)
            write_expected(case, FAMILIES / case.name)


if __name__ == "__main__":
    main()

"""Trains a small target and two smaller drafts of its family, and reports what each draft gains.

    python -m benchmarks.train_pair OUT                       # some minutes on a GPU
    python -m benchmarks.train_pair OUT --steps 20 --batch 4  # a first try on a CPU

The text is public domain (`jaxinfer/quantization/texts`), the end of each text held out. One draft learns from the
text, the other from the target's distributions over it (distillation, https://arxiv.org/abs/2310.08461). Each model
becomes a Hugging Face folder in OUT: `target`, `draft`, `draft-distilled`.
"""

import argparse
import functools
import json
import lzma
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import tokenizers
from jaxtyping import Array, Float, Int32

import jaxinfer as ji
from benchmarks.harness import RESULTS, Recorder
from checkpoints.export import write_file
from jaxinfer import steps
from jaxinfer.config import ModelConfig
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.decoder import Params
from jaxinfer.params import random_params
from jaxinfer.quantization import calibration
from jaxinfer.speculative.comparison import compare, measure_plain
from jaxinfer.speculative.policy import FixedLength

TEXTS = pathlib.Path(calibration.__file__).with_name("texts")
VOCABULARY, WINDOW, HELD_OUT = 1024, 256, 0.05
END = "<|end|>"
SHAPES = {
    "target": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4},
    "draft": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2},
}

type Loss = Callable[[Params, Int32[Array, "rows tokens"]], Float[Array, ""]]


def read_texts() -> tuple[str, str]:
    """What is trained on, and what is held out: the end of each text."""
    train, held_out = [], []
    for path in sorted(TEXTS.glob("*.txt.xz")):
        text = lzma.decompress(path.read_bytes()).decode("utf-8")
        cut = int(len(text) * (1 - HELD_OUT))
        train.append(text[:cut])
        held_out.append(text[cut:])
    return "\n".join(train), "\n".join(held_out)


def train_tokenizer(text: str) -> tokenizers.Tokenizer:
    """Byte-level BPE: no text is out of vocabulary."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def hugging_face_config(shape: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4 * WINDOW,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": "bfloat16",
        **shape,
    }


def save(folder: pathlib.Path, config: dict[str, object], params: Params, tokenizer: tokenizers.Tokenizer) -> None:
    """A Hugging Face folder in bfloat16."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    parsed = from_hugging_face(config)
    q_size, kv_size = parsed.num_heads * parsed.head_dim, parsed.num_kv_heads * parsed.head_dim
    named: dict[str, jax.Array] = {"model.embed_tokens.weight": params.embed_tokens, "model.norm.weight": params.norm}
    for index, layer in enumerate(params.layers):
        q, k, v = jnp.split(jnp.asarray(layer.qkv), [q_size, q_size + kv_size])
        gate, up = jnp.split(jnp.asarray(layer.gate_up), 2)
        projections = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": layer.o}
        projections |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.down}
        projections |= {"input_layernorm": layer.attn_norm, "post_attention_layernorm": layer.mlp_norm}
        named |= {f"model.layers.{index}.{name}.weight": value for name, value in projections.items()}
    write_file(
        folder / "model.safetensors",
        {name: np.asarray(value, np.float32).astype(ml_dtypes.bfloat16) for name, value in named.items()},
    )


def windows(ids: np.ndarray, batch: int, seed: int) -> Iterator[np.ndarray]:
    """Random windows of the text, int32 [batch, WINDOW + 1], without end."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(ids) - WINDOW, batch)
        yield np.stack([ids[start : start + WINDOW + 1] for start in starts])


def logits_of(params: Params, tokens: Int32[Array, "rows tokens"], config: ModelConfig) -> jax.Array:
    lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    return steps.full_logits(params, tokens, lengths, config=config)


def text_loss(params: Params, tokens: Int32[Array, "rows tokens"], *, config: ModelConfig) -> Float[Array, ""]:
    """Mean negative log-likelihood of each next token, in nats."""
    logits = logits_of(params, tokens[:, :-1], config)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def distillation_loss(
    params: Params,
    tokens: Int32[Array, "rows tokens"],
    *,
    config: ModelConfig,
    teacher: Params,
    teacher_config: ModelConfig,
) -> Float[Array, ""]:
    """Mean cross-entropy with the teacher's distributions."""
    wanted = jax.nn.softmax(logits_of(teacher, tokens[:, :-1], teacher_config))
    return optax.softmax_cross_entropy(logits_of(params, tokens[:, :-1], config), wanted).mean()


def train(params: Params, loss: Loss, batches: Iterator[np.ndarray], num_steps: int, rate: float, name: str) -> Params:
    """AdamW with warm-up and a cosine; prints the loss ten times."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, num_steps // 20), num_steps, rate / 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))

    # optax's types know arrays and containers, not a dataclass that is a pytree: Any where it meets them.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: optax.OptState, tokens: jax.Array) -> tuple[Any, optax.OptState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    tree: Any = params
    state = optimizer.init(tree)
    started = time.perf_counter()
    for index in range(num_steps):
        tree, state, value = step(tree, state, jnp.asarray(next(batches), jnp.int32))
        if index % max(1, num_steps // 10) == 0 or index == num_steps - 1:
            print(
                f"{name}: step {index + 1}, loss {float(value):.3f}, {time.perf_counter() - started:.0f} s", flush=True
            )
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, help="folder for the models; made here")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32, help="windows of 256 tokens a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="largest learning rate")
    parser.add_argument("--k", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--output", type=int, default=256, help="tokens of each continuation that is measured")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    train_text, held_out = read_texts()
    tokenizer = train_tokenizer(train_text)
    ids = np.array(tokenizer.encode(train_text).ids, np.int32)
    unseen = np.array(tokenizer.encode(held_out).ids, np.int32)
    print(f"{len(ids):,} tokens to train on, {len(unseen):,} held out")

    configs = {name: hugging_face_config(shape) for name, shape in SHAPES.items()}
    parsed = {name: from_hugging_face(config) for name, config in configs.items()}
    schedule = {"num_steps": arguments.steps, "rate": arguments.rate}
    trained: dict[str, Params] = {}
    seconds: dict[str, float] = {}
    for name in ("target", "draft", "draft-distilled"):
        shape = "target" if name == "target" else "draft"
        loss: Loss = functools.partial(text_loss, config=parsed[shape])
        if name == "draft-distilled":
            teacher = {"teacher": trained["target"], "teacher_config": parsed["target"]}
            loss = functools.partial(distillation_loss, config=parsed["draft"], **teacher)
        start = random_params(parsed[shape], jnp.float32, seed=len(trained))
        started = time.perf_counter()
        trained[name] = train(start, loss, windows(ids, arguments.batch, seed=1), name=name, **schedule)
        seconds[name] = time.perf_counter() - started
        save(arguments.out / name, configs[shape], trained[name], tokenizer)

    recorder = Recorder("train_pair", arguments.results)
    judged = jnp.asarray(np.stack([unseen[i : i + WINDOW + 1] for i in range(0, len(unseen) - WINDOW, WINDOW)][:64]))
    models = {name: ji.load(arguments.out / name) for name in trained}
    for name, params in trained.items():
        shape = "target" if name == "target" else "draft"
        nats = float(text_loss(params, judged, config=parsed[shape]))
        case: dict[str, object] = {"model": name, "steps": arguments.steps, "batch": arguments.batch}
        parameters = models[name].num_parameters / 1e6
        recorder.record(
            case,
            {"held_out_loss": (nats, "nats"), "train_s": (seconds[name], "s"), "parameters": (parameters, "million")},
        )
    target = models["target"]
    prompts = [unseen[start : start + 64].tolist() for start in range(0, len(unseen) - 64, len(unseen) // 8)][:8]
    for temperature in (0.0, 0.8):
        params = ji.SamplingParams(max_tokens=arguments.output, temperature=temperature, ignore_eos=True, seed=0)
        plain = measure_plain(target, prompts, params)
        for name in ("draft", "draft-distilled"):
            for k in arguments.k:
                speculation = ji.Speculation(ji.ModelDraft(models[name], k), policy=FixedLength())
                found = compare(target, prompts, params, speculation, plain=plain)
                case = {"draft": name, "k": k, "batch": len(prompts), "temperature": temperature}
                recorder.record(
                    case,
                    {
                        "acceptance": (found.report.acceptance_rate, ""),
                        "accepted_length": (found.report.mean_accepted_length, ""),
                        "speedup": (found.speedup, ""),
                        "tokens_per_s": (found.speculative.tokens_per_second, "tok/s"),
                        "plain_tokens_per_s": (found.plain.tokens_per_second, "tok/s"),
                    },
                )


if __name__ == "__main__":
    main()

"""`jaxinfer info MODEL`: what a model is, what it costs, and whether its tensors are those of its configuration."""

import argparse
import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.errors import CheckpointError
from checkpoints.names import Mismatch
from jaxinfer import kv_cache
from jaxinfer.cli.options import json_line
from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.decoder import Params
from jaxinfer.device import start_device
from jaxinfer.layers.weights import precisions
from jaxinfer.memory import shown_bytes
from jaxinfer.model import Description, inspect, weights_dtype_for
from jaxinfer.params import num_parameters, random_params
from jaxinfer.planning.target import target_for
from jaxinfer.planning.weights import Storage, abstract_params, num_bytes
from jaxinfer.quantization.report import report_of
from jaxinfer.store.manifest import is_store, read_manifest

KINDS = ("embedding", "attention", "mlp", "norms", "head")


def run(options: argparse.Namespace) -> int:
    """Prints the facts as text or JSON. A model whose tensors `load` would refuse is bad input all the same."""
    facts = gather(options.model, options.dtype)
    print(json_line(facts) if options.json else "\n".join(_lines(facts)))
    check = facts["check"]
    if check is not None and check["problem"] is not None:
        raise CheckpointError(f"{options.model}: {check['problem']}")
    return 0


def gather(path_or_name: str, dtype: str | None) -> dict[str, Any]:
    """Everything `info` says, as JSON values. Sizes are in bytes."""
    start_device()
    weights_dtype = weights_dtype_for(dtype)
    found = inspect(path_or_name, progress=True)
    config = found.config
    params = _outline(found, weights_dtype)
    memory = _memory(params)
    files: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for tensor in found.tensors.values():
        files[tensor.dtype]["tensors"] += 1
        files[tensor.dtype]["bytes"] += tensor.nbytes
    per_token = kv_cache.bytes_per_token(config, weights_dtype)
    tokenizer = found.tokenizer
    return {
        "model": path_or_name,
        "path": str(found.path),
        "config": _config(config),
        "parameters": num_parameters(config),
        "dtype": weights_dtype.name,
        "precisions": precisions(params),
        "memory": memory | {"total": sum(memory.values())},
        "kv_cache": {
            "bytes_per_token": per_token,
            "context": config.max_position_embeddings,
            "bytes_full_context": per_token * config.max_position_embeddings,
        },
        "tokenizer": None
        if tokenizer is None
        else {
            "num_tokens": tokenizer.num_tokens,
            "bos_token_id": tokenizer.bos_token_id,
            "adds_bos": tokenizer.bos_token_id is not None and tokenizer.bos_token_id in tokenizer.opening_ids,
            "eos_token_ids": [int(token) for token in tokenizer.eos_token_ids],
            "chat_template": bool(tokenizer.chat_templates),
        },
        "file": dict(files),
        "check": None if found.mismatch is None else _check(found.mismatch),
    } | ({"store": _store(found.path)} if is_store(found.path) else {})


def _outline(found: Description, dtype: jnp.dtype) -> Params:
    """What `load` would make, as shapes and types; of tensors that it would refuse, what the configuration asks for."""
    if found.mismatch:
        return jax.eval_shape(lambda: random_params(found.config, dtype, 0))
    return abstract_params(found.path, found.config, Storage(dtype), target_for(None))


def _memory(params: Params) -> dict[str, int]:
    """Bytes by kind."""
    memory: dict[str, int] = dict.fromkeys(KINDS, 0)
    for part in (params, *params.layers):
        for field in dataclasses.fields(part):
            if field.name != "layers":
                memory[_kind(field.name)] += num_bytes(getattr(part, field.name))
    return memory


def _config(config: ModelConfig) -> dict[str, Any]:
    """The configuration, each RoPE once: `rope` of a layer is an index into `ropes`, null for no positions."""
    ropes = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None))
    layers = [
        {"window": layer.window, "rope": None if layer.rope is None else ropes.index(layer.rope)}
        for layer in config.layers
    ]
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return values | {"layers": layers, "ropes": [dataclasses.asdict(rope) for rope in ropes]}


def _store(path: pathlib.Path) -> dict[str, Any]:
    """How a store was made, and how well it was quantised, if that was measured."""
    manifest = read_manifest(path)
    return {name: getattr(manifest, name) for name in ("model", "device", "versions", "plan", "quality")}


def _check(mismatch: Mismatch) -> dict[str, Any]:
    """How many tensors do not fit the configuration, and `load`'s words for it (None: all fit)."""
    return {
        "missing": len(mismatch.missing),
        "unexpected": len(mismatch.unexpected),
        "misshapen": len(mismatch.misshapen),
        "integers": len(mismatch.integers),
        "problem": str(mismatch) if mismatch else None,
    }


def _kind(field: str) -> str:
    """Which kind a field of `Params` or `LayerParams` is."""
    if field.endswith("norm"):
        return "norms"
    if field in ("embed_tokens", "lm_head"):
        return "embedding" if field == "embed_tokens" else "head"
    return "attention" if field.removesuffix("_bias") in ("qkv", "o") else "mlp"


def _lines(facts: dict[str, Any]) -> Iterable[str]:
    """The facts for people."""
    config, kv, tokenizer = facts["config"], facts["kv_cache"], facts["tokenizer"]
    model, path = str(facts["model"]), str(facts["path"])
    yield model if model == path else f"{model}  ({path})"
    yield from _section("parameters", [(f"{facts['parameters']:,}", "")])
    yield from _section(
        f"memory, {' and '.join(facts['precisions'])}",
        [(kind, shown_bytes(size)) for kind, size in facts["memory"].items() if size],
    )
    yield from _section(
        f"KV cache, {facts['dtype']}",
        [
            ("per token", shown_bytes(kv["bytes_per_token"])),
            (f"{kv['context']:,} tokens", shown_bytes(kv["bytes_full_context"]) + " (the full context)"),
        ],
    )
    rows = [("none", "token ids in, token ids out")]
    if tokenizer is not None:
        bos = tokenizer["bos_token_id"]
        added = "" if bos is None else (" (opens every text)" if tokenizer["adds_bos"] else " (not added to texts)")
        rows = [
            ("tokens", f"{tokenizer['num_tokens']:,}"),
            ("BOS", ("none" if bos is None else str(bos)) + added),
            ("EOS", ", ".join(map(str, tokenizer["eos_token_ids"])) or "none"),
            ("chat template", "yes" if tokenizer["chat_template"] else "no"),
        ]
    yield from _section("tokenizer", rows)
    rows = [
        (dtype, f"{file['tensors']:,} {'tensor' if file['tensors'] == 1 else 'tensors'}, {shown_bytes(file['bytes'])}")
        for dtype, file in facts["file"].items()
    ]
    check = facts["check"]
    if check is not None:
        counts = [f"{count} {name}" for name, count in check.items() if name != "problem" and count]
        rows.append(("check", ", ".join(counts) or "every tensor fits the configuration"))
    yield from _section("weights on disk", rows or [("none", "")])
    if "store" in facts:
        store = facts["store"]
        report = report_of(store["quality"])
        rows = [
            ("of", store["model"]),
            ("written by", f"jaxinfer {store['versions'].get('jaxinfer', '?')} on {store['device']}"),
            ("plan", "none" if store["plan"] is None else str(store["plan"].get("name", "unnamed"))),
            ("quality", "not measured" if report is None or report.quality is None else str(report.quality)),
        ]
        yield from _section("store", rows)
    rows = [(name, _value(value)) for name, value in config.items() if name not in ("layers", "ropes")]
    groups = [(layer, len(list(run))) for layer, run in itertools.groupby(config["layers"])]
    yield from _section("configuration", rows)
    yield from _section("layers", [(str(count), _layer(layer, config["ropes"])) for layer, count in groups])


def _section(title: str, rows: list[tuple[str, str]]) -> Iterable[str]:
    width = max(len(name) for name, _ in rows)
    yield ""
    yield title
    for name, value in rows:
        yield f"  {name:<{width}}  {value}".rstrip()


def _layer(layer: dict[str, Any], ropes: list[dict[str, Any]]) -> str:
    """A layer's window and those fields of its RoPE that are not at their defaults."""
    window = "full attention" if layer["window"] is None else f"window {layer['window']}"
    if layer["rope"] is None:
        return f"{window}, no positions"
    defaults = {field.name: field.default for field in dataclasses.fields(RopeConfig)}
    rope = [f"{name} {_value(value)}" for name, value in ropes[layer["rope"]].items() if value != defaults[name]]
    return f"{window}, rope: {', '.join(rope)}"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        shown = [str(item) for item in value[:4]] + (["..."] if len(value) > 4 else [])
        return ", ".join(shown) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

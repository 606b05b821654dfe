"""From canonical parameter names to the tensors of Hugging Face checkpoints, and a check that none is left over.

A canonical name is the same for every family and file format (`layers.0.attn_norm.weight`); a TensorSource says
which tensor of the file fills it, and with which rows. `names_gguf.py` does the same for GGUF. Weights of linear
layers are [out, in].
"""

import dataclasses
import re
import reprlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

from checkpoints.errors import CheckpointError
from checkpoints.tensors import TensorInfo


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """The tensor of a file that fills a parameter.

    `rows` is a range (start, stop) of its first axis, None for all of it; several parameters may share a tensor.
    `unpermute_heads` is the number of heads whose rows GGUF's llama layout permutes, None where it does not.
    """

    name: str
    rows: tuple[int, int] | None = None
    unpermute_heads: int | None = None


_LLAMA_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_OLMO2_NORMS = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_GLM4_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


@dataclasses.dataclass(frozen=True)
class _Family:
    """`norms` maps canonical names to the family's. Fused tensors are rows of [q; k; v] and of [gate; up]."""

    norms: Mapping[str, str]
    fused_qkv: bool = False
    fused_gate_up: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(_LLAMA_NORMS),
    "mistral": _Family(_LLAMA_NORMS),
    "qwen2": _Family(_LLAMA_NORMS),
    "qwen3": _Family(_LLAMA_NORMS),
    "smollm3": _Family(_LLAMA_NORMS),
    "granite": _Family(_LLAMA_NORMS),
    "phi3": _Family(_LLAMA_NORMS, fused_qkv=True, fused_gate_up=True),
    "gemma2": _Family(_GEMMA_NORMS),
    "gemma3": _Family(_GEMMA_NORMS),
    "gemma3_text": _Family(_GEMMA_NORMS),
    "olmo2": _Family(_OLMO2_NORMS),
    "glm4": _Family(_GLM4_NORMS, fused_gate_up=True),
}

# The text model inside a multimodal one first: in such a file "model." alone is a prefix of everything.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.language_model.lm_head.weight")

_SKIPPED = (
    (re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$"), "computed from the configuration"),
    (re.compile(r"^(model\.)?(visual|vision_tower|vision_model|vision_embed_tokens)\."), "vision tower"),
    (re.compile(r"^(model\.)?(audio_tower|audio_model|embed_audio)\."), "audio tower"),
    (re.compile(r"^(model\.)?(multi_modal_projector|embed_vision)\."), "projector of another modality"),
    (re.compile(r"^(model\.)?(language_model\.)?mtp\."), "multi-token prediction head"),
)
"""Tensors that a text decoder does without, and why; anything else that no parameter uses is an error."""

_INTEGERS = frozenset({"BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"})

_LAYER = re.compile(r"((?:.*?\.)?(?:layers|blk)\.)(\d{1,6})(\..*)", re.DOTALL)
_show = reprlib.Repr(maxstring=200).repr


def hugging_face_sources(
    model_type: str,
    *,
    num_layers: int,
    q_rows: int,
    kv_rows: int,
    intermediate_size: int,
    available: Collection[str],
    include_absent: bool = False,
) -> tuple[dict[str, TensorSource], dict[str, str]]:
    """Says where each canonical parameter is in a Hugging Face checkpoint, and which tensors to skip and why.

    `available` are the names of the file's tensors. Only parameters whose tensor is among them are returned, or with
    `include_absent` all that the family may have, under the name that the file would give them, which is what
    `check_complete` reports. The head is returned whenever it is there, tied or not. `q_rows` is num_heads * head_dim,
    `kv_rows` num_kv_heads * head_dim. An unknown `model_type` is a CheckpointError.
    """
    if model_type not in _FAMILIES:
        raise CheckpointError(f"model_type {model_type!r} is not supported; supported are {', '.join(_FAMILIES)}")
    present = frozenset(available)
    family = _FAMILIES[model_type]
    prefix = _find_prefix(present)

    sources = {
        "embed_tokens.weight": TensorSource(prefix + "embed_tokens.weight"),
        "norm.weight": TensorSource(prefix + "norm.weight"),
    }
    sources["lm_head.weight"] = TensorSource(next((head for head in _HEADS if head in present), _HEADS[0]))
    splits = (q_rows, kv_rows, intermediate_size)
    for layer in range(num_layers):
        for canonical, source in _layer_sources(family, f"{prefix}layers.{layer}.", *splits):
            sources[f"layers.{layer}.{canonical}"] = source
    if not include_absent:
        sources = {canonical: source for canonical, source in sources.items() if source.name in present}

    skipped = {name: reason for name in available for pattern, reason in _SKIPPED if pattern.search(name)}
    return sources, skipped


def _find_prefix(available: frozenset[str]) -> str:
    for prefix in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in available or f"{prefix}norm.weight" in available:
            return prefix
    return "model."


def _layer_sources(
    family: _Family, prefix: str, q_rows: int, kv_rows: int, intermediate_size: int
) -> Iterator[tuple[str, TensorSource]]:
    """Yields what a layer of the family may have: whether it has biases and q/k norms is up to the checkpoint."""
    for canonical, name in family.norms.items():
        yield f"{canonical}.weight", TensorSource(f"{prefix}{name}.weight")
    for norm in ("q_norm", "k_norm"):
        yield f"{norm}.weight", TensorSource(f"{prefix}self_attn.{norm}.weight")
    for kind in ("weight", "bias"):
        if family.fused_qkv:
            name, end = f"{prefix}self_attn.qkv_proj.{kind}", q_rows + kv_rows
            yield f"q_proj.{kind}", TensorSource(name, (0, q_rows))
            yield f"k_proj.{kind}", TensorSource(name, (q_rows, end))
            yield f"v_proj.{kind}", TensorSource(name, (end, end + kv_rows))
        else:
            for projection in ("q_proj", "k_proj", "v_proj"):
                yield f"{projection}.{kind}", TensorSource(f"{prefix}self_attn.{projection}.{kind}")
        yield f"o_proj.{kind}", TensorSource(f"{prefix}self_attn.o_proj.{kind}")
        if family.fused_gate_up:
            name = f"{prefix}mlp.gate_up_proj.{kind}"
            yield f"gate_proj.{kind}", TensorSource(name, (0, intermediate_size))
            yield f"up_proj.{kind}", TensorSource(name, (intermediate_size, 2 * intermediate_size))
        else:
            for projection in ("gate_proj", "up_proj"):
                yield f"{projection}.{kind}", TensorSource(f"{prefix}mlp.{projection}.{kind}")
        yield f"down_proj.{kind}", TensorSource(f"{prefix}mlp.down_proj.{kind}")


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """In what a checkpoint and a configuration disagree. `missing` and `integers` are canonical names, `unexpected`
    are the file's, `misshapen` are descriptions. `integers` holds parameters whose tensor has whole numbers, which are
    codes of a quantisation that nothing here knows."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]
    integers: tuple[str, ...]
    file_names: Mapping[str, str]
    """The file's own names of canonical ones, of what it lacks too."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen or self.integers)

    def __str__(self) -> str:
        """One line: the problems and the remedy."""
        problems = []
        if self.missing:
            problems.append(f"{len(self.missing)} missing: {_summarize(self.missing, self.file_names)}")
        if self.unexpected:
            problems.append(f"{len(self.unexpected)} unexpected: {_summarize(self.unexpected)}")
        if self.misshapen:
            problems.append(f"wrong shapes: {', '.join(self.misshapen)}")
        remedy = (
            "the configuration belongs to another model or files are incomplete: download all of them again from one "
            "place"
        )
        if self.integers:
            remedy = remedy if problems else "they are codes of a quantisation that is not read: use the original model"
            problems.append(f"integers in place of weights: {_summarize(self.integers, self.file_names)}")
        return f"the tensors do not fit the configuration; {'; '.join(problems)}; {remedy}"


def compare(
    expected: Mapping[str, tuple[int, ...]],
    sources: Mapping[str, TensorSource],
    tensors: Mapping[str, TensorInfo],
    skipped: Collection[str],
) -> Mismatch:
    """Everything in which a checkpoint and a configuration disagree.

    `expected` has the canonical name and the shape of every parameter of the model. Each must have a source whose
    rows have that shape; each tensor of the file must be used or be in `skipped`; parameters that share a tensor
    must use all of its rows. A head that is to be read from the file belongs in `expected`, one that is not wanted,
    because the embedding is tied to it, in `skipped`. `sources` may name tensors that are not there.
    """
    missing = [name for name in expected if name not in sources or sources[name].name not in tensors]
    used = {name: sources[name] for name in expected if name not in set(missing)}
    consumed = {source.name for source in used.values()}
    file_names = {name: source.name for name, source in sources.items()}
    return Mismatch(
        missing=tuple(missing),
        unexpected=tuple(name for name in tensors if name not in consumed and name not in skipped),
        misshapen=(*_wrong_shapes(expected, used, tensors, file_names), *_wrong_parts(used, tensors)),
        integers=tuple(name for name, source in used.items() if tensors[source.name].dtype in _INTEGERS),
        file_names=file_names,
    )


def check_complete(
    expected: Mapping[str, tuple[int, ...]],
    sources: Mapping[str, TensorSource],
    tensors: Mapping[str, TensorInfo],
    skipped: Collection[str],
    *,
    where: str = "checkpoint",
) -> None:
    """Raises one CheckpointError that lists everything that `compare` finds. `where` names the checkpoint in it."""
    mismatch = compare(expected, sources, tensors, skipped)
    if mismatch:
        raise CheckpointError(f"{where}: {mismatch}")


def _wrong_shapes(
    expected: Mapping[str, tuple[int, ...]],
    used: Mapping[str, TensorSource],
    tensors: Mapping[str, TensorInfo],
    file_names: Mapping[str, str],
) -> Iterator[str]:
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for canonical, source in used.items():
        shape, want = tensors[source.name].shape, expected[canonical]
        if source.rows is None:
            if shape != want:
                groups[f"is {list(shape)}, expected {list(want)}"].append(canonical)
        else:
            start, stop = source.rows
            if not shape or stop > shape[0] or (stop - start, *shape[1:]) != want:
                groups[f"is rows {start}:{stop} of {list(shape)}, expected {list(want)}"].append(canonical)
    for problem, names in groups.items():
        yield f"{_summarize(names, file_names)} {problem}"


def _wrong_parts(used: Mapping[str, TensorSource], tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Rows of a shared tensor that no parameter uses, or that two use: its parts have other sizes."""
    parts: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for source in used.values():
        if source.rows is not None:
            parts[source.name].append(source.rows)
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, ranges in parts.items():
        ranges.sort()
        edges = [0, *(stop for _, stop in ranges)]
        size = sum(tensors[name].shape[:1])
        if [start for start, _ in ranges] != edges[:-1] or edges[-1] < size:
            groups[f"has {size} rows, its parts take {[list(part) for part in ranges]}"].append(name)
    for problem, names in groups.items():
        yield f"{_summarize(names)} {problem}"


def _summarize(names: Iterable[str], file_names: Mapping[str, str] = MappingProxyType({}), limit: int = 100) -> str:
    """Lists names, those that differ only in the layer as one: `layers.{0-3,5}.q_proj.weight`.

    Where the file has another name for one, that follows in brackets, as it is what somebody can look for.
    """
    layers: dict[tuple[str, ...], list[int]] = {}
    for name in names:
        own = file_names.get(name, name)
        match, own_match = _LAYER.fullmatch(name), _LAYER.fullmatch(own)
        if match and own_match and match[2] == own_match[2]:
            layers.setdefault((match[1], match[3], own_match[1], own_match[3]), []).append(int(match[2]))
        else:
            layers.setdefault((name, "", own, ""), [])
    texts = []
    for (head, tail, own_head, own_tail), numbers in layers.items():
        ranges = _ranges(numbers) if numbers else ""
        name, own = head + ranges + tail, own_head + ranges + own_tail
        texts.append(name if own == name else f"{name} ({own} in the file)")
    # A file from anywhere can hold any number of names of any length.
    shown = [text if text.isprintable() and len(text) <= 300 else _show(text) for text in texts[:limit]]
    return ", ".join(shown) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    return "{" + ",".join(texts) + "}" if len(numbers) > 1 else texts[0]

"""bitsandbytes in 4 bits (nf4, fp4): codes of a 16-entry code book, scales that may be quantised in turn.

    weight uint8 [out * in / 2, 1], the first of two weights in the high half of a byte
    weight.absmax float32 [blocks], or uint8 if nested
    weight.quant_map float32 [16]
    weight.nested_absmax float32 [ceil(blocks / nested_blocksize)], weight.nested_quant_map float32 [256]
    weight.quant_state.bitsandbytes__nf4 uint8: JSON with shape, blocksize, nested_blocksize, nested_offset

Blocks run over the flattened weight. The scale of a block is absmax, or nested_quant_map[absmax] *
nested_absmax[block // nested_blocksize] + nested_offset.
"""

import dataclasses
import json
import math
from collections.abc import Mapping

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.formats.parts import expect, misfit
from checkpoints.tensors import TensorInfo

QUANT_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


@dataclasses.dataclass(frozen=True)
class State:
    """What the JSON in quant_state says of a weight."""

    shape: tuple[int, int]
    block: int
    nested_block: int | None
    nested_offset: float


def read_state(content: np.ndarray, where: str) -> State:
    """Parses quant_state. Raises CheckpointError for one that is damaged."""
    problem = f"{where}: quant_state is damaged"
    try:
        state = json.loads(content.tobytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{problem} ({error}); download the file again") from error

    def number(key: str) -> int | None:
        value = state.get(key)
        return value if type(value) is int and 1 <= value <= 2**31 else None

    size, block = (state.get("shape"), number("blocksize")) if isinstance(state, dict) else (None, None)
    if block is None or not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise CheckpointError(f"{problem}: it has no blocksize or no shape of two axes; download the file again")
    offset = state.get("nested_offset", 0.0)
    if type(offset) not in (int, float) or not -(2.0**127) < offset < 2.0**127:
        raise CheckpointError(f"{problem}: nested_offset is no number; download the file again")
    return State((size[0], size[1]), block, number("nested_blocksize"), float(offset))


def shape(infos: Mapping[str, TensorInfo], state: State, where: str) -> tuple[int, int]:
    """Checks the tensors of one weight against its state; returns (out, in)."""
    expect(infos["weight"], ("U8",), None, where)
    count = state.shape[0] * state.shape[1]
    if math.prod(infos["weight"].shape) != -(-count // 2) or state.shape[1] % 2:
        raise misfit(infos["weight"], (-(-count // 2), 1), where)
    blocks = -(-count // state.block)
    nested = "weight.nested_absmax" in infos
    expect(infos["weight.absmax"], ("U8",) if nested else ("F32",), 1, where)
    wanted = {"weight.absmax": (blocks,), "weight.quant_map": (16,)}
    if nested:
        if state.nested_block is None or "weight.nested_quant_map" not in infos:
            raise CheckpointError(f"{where}: nested scales lack a map or a block size; download the file again")
        wanted |= {"weight.nested_absmax": (-(-blocks // state.nested_block),), "weight.nested_quant_map": (256,)}
    for part, expected in wanted.items():
        if part != "weight.absmax":
            expect(infos[part], ("F32",), 1, where)
        if infos[part].shape != expected:
            raise misfit(infos[part], expected, where)
    return state.shape


def decode(parts: Mapping[str, np.ndarray], state: State) -> QuantizedTensor:
    """The weight whose shapes `shape` has checked."""
    out_features, in_features = state.shape
    packed = parts["weight"].reshape(out_features, in_features // 2)
    scales = parts["weight.absmax"]
    if state.nested_block is not None and "weight.nested_absmax" in parts:
        outer = np.repeat(parts["weight.nested_absmax"], state.nested_block)[: scales.size]
        scales = parts["weight.nested_quant_map"][scales] * outer + np.float32(state.nested_offset)
    # Blocks of the flattened weight may cross rows. A divisor of both divides every row into whole pieces of blocks.
    size = math.gcd(state.block, in_features)
    groups = in_features // size

    def rows(start: int, stop: int) -> Codes:
        pieces = packed[start:stop]
        codes = np.stack([pieces >> 4, pieces & np.uint8(15)], axis=-1).reshape(stop - start, in_features)
        blocks = np.arange(start * groups, stop * groups) * size // state.block
        by_group = scales[blocks].reshape(stop - start, groups)
        return Codes(codes, by_group, None, parts["weight.quant_map"], 4, size)

    return QuantizedTensor((out_features, in_features), rows)

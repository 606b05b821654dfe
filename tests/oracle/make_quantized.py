"""Writes `tests/fixtures/quantized.safetensors`: small weights as the libraries of each format pack them.

Run it in an environment with torch, compressed-tensors 0.20, AutoAWQ 0.2.9, hqq 0.2.8 and bitsandbytes 0.50:

    python tests/oracle/make_quantized.py

A case's tensors are called `case|part`, with the part's name as in a checkpoint; `case|values` float32 [out, in] is
what the library decodes them to, computed in float32, and `case|options` JSON as bytes. A second run writes the same.
"""

import importlib.util
import json
import pathlib
import sys
import types
from typing import Any

import bitsandbytes
import compressed_tensors.compressors as compressors
import hqq.core.quantize
import safetensors.torch
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams

FIXTURE = pathlib.Path(__file__).parent.parent / "fixtures" / "quantized.safetensors"
OUT, IN = 24, 192

Case = dict[str, torch.Tensor]


def weight(rows: int = OUT, columns: int = IN) -> torch.Tensor:
    return torch.randn(rows, columns) * 0.05


def compressed(compressor: Any, scale_dtype: torch.dtype = torch.bfloat16, **args: Any) -> Case:
    """A weight through one of compressed-tensors' compressors and back; scales from its own minima and maxima."""
    quantization = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=quantization)
    dense, size = weight(), args.get("group_size") or IN
    strategy = args["strategy"]
    state: Case = {}
    if strategy == "block":
        rows, columns = args["block_structure"]
        blocks = torch.nn.functional.pad(dense, (0, -IN % columns, 0, -OUT % rows))
        blocks = blocks.reshape(-1, rows, blocks.shape[1] // columns, columns).transpose(1, 2).flatten(2)
    elif strategy == "tensor":
        blocks = dense.reshape(1, -1)
    else:
        blocks = dense.reshape(OUT, -1, size)
    global_scale = None
    if strategy == "tensor_group":
        global_scale = (448 * 6 / dense.abs().max()).to(torch.float32).reshape(1)
        state["weight_global_scale"] = global_scale
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), quantization, global_scale=global_scale)
    state |= {"weight": dense, "weight_scale": scale if scale.dtype != torch.float32 else scale.to(scale_dtype)}
    if not args.get("symmetric", True):
        state["weight_zero_point"] = zero.to(torch.int8)
    packed = compressor.compress(state, scheme)
    to_decode = {
        name: part.float() if part.dtype in (torch.bfloat16, torch.float16) else part for name, part in packed.items()
    }
    packed["values"] = compressor.decompress(to_decode, scheme)["weight"].float()
    if global_scale is not None:  # decompress computes in bfloat16
        codes = unpack_fp4_from_uint8(packed["weight_packed"], OUT, IN, torch.float32)
        packed["values"] = dequantize(
            codes, packed["weight_scale"].float(), None, quantization, torch.float32, global_scale=global_scale
        )
    return packed


def awq_module(name: str) -> Any:
    """A file of AutoAWQ by itself: importing the package needs a GPU."""
    for package in ("awq", "awq.utils", "awq.utils.module", "awq.utils.utils"):
        sys.modules.setdefault(package, types.ModuleType(package))
    sys.modules["awq.utils.module"].try_import = lambda _: (None, "")
    sys.modules["awq.utils.utils"].get_best_device = lambda: "cpu"
    folder = pathlib.Path(importlib.util.find_spec("hqq").submodule_search_locations[0]).parent / "awq"
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(f"awq.{name.replace('/', '.')}", module)
    spec.loader.exec_module(module)
    return module


def awq_cases(group: int) -> dict[str, Case]:
    """The same codes as AutoAWQ packs them for gemm and gemv, and as it repacks them for ExLlama: GPTQ, version 1."""
    rows, columns = 32, 256  # AutoAWQ packs whole multiples of 32
    dense = weight(rows, columns).half()
    blocks = dense.float().reshape(rows, -1, group)
    low, high = blocks.amin(-1), blocks.amax(-1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = ((blocks / scales.float()[:, :, None]).round() + zeros[:, :, None]).clamp(0, 15).reshape(rows, columns)
    spread = zeros.repeat_interleave(group, 1), scales.float().repeat_interleave(group, 1)
    values = (codes - spread[0]) * spread[1]
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = values
    packing = awq_module("utils/packing_utils")
    cases = {}
    for kind in ("gemm", "gemv"):
        source = awq_module(f"modules/linear/{kind}")
        arguments = (scales.t(), zeros.t()) if kind == "gemm" else (scales, zeros)
        arguments = tuple(argument.contiguous() for argument in arguments)
        cls = getattr(source, f"WQLinear_{kind.upper()}")
        packed = cls.from_linear(linear, 4, group, False, *arguments).state_dict()
        cases[f"awq_{kind}_{group}"] = dict(packed) | {"values": values}
    gemm = cases[f"awq_gemm_{group}"]
    qweight, qzeros = packing.unpack_reorder_pack(gemm["qweight"], gemm["qzeros"], 4)
    cases[f"gptq_v1_{group}"] = {"qweight": qweight, "qzeros": qzeros, "scales": gemm["scales"], "values": values}
    return cases


# With rows that are no whole number of blocks, bitsandbytes 0.50 on a CPU does not decode what it packed.
def bitsandbytes_case(kind: str, nested: bool, columns: int) -> Case:
    dense = weight(columns=columns)
    packed, state = bitsandbytes.functional.quantize_4bit(
        dense, blocksize=64, compress_statistics=nested, quant_type=kind
    )
    values = bitsandbytes.functional.dequantize_4bit(packed, state).float()
    return {"weight": packed} | {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()} | {"values": values}


def hqq_case(bits: int, axis: int, group: int | None, columns: int = IN) -> Case:
    dense = weight(columns=columns)
    codes, meta = hqq.core.quantize.Quantizer.quantize(
        dense, nbits=bits, group_size=group, axis=axis, optimize=False, compute_dtype=torch.float32, device="cpu"
    )
    values = hqq.core.quantize.Quantizer.dequantize(codes, meta | {"compute_dtype": torch.float32})
    encode = hqq.core.quantize.encode_safetensor_type
    parts = {name: encode(meta[name]) for name in ("nbits", "group_size", "shape", "scale", "zero", "axis", "packing")}
    return {"W_q": codes, "values": values} | {name: part for name, part in parts.items() if part is not None}


def cases() -> dict[str, tuple[Case, dict[str, Any]]]:
    pack, naive = compressors.PackedQuantizationCompressor, compressors.NaiveQuantizationCompressor
    result: dict[str, tuple[Case, dict[str, Any]]] = {}

    def add(name: str, case: Case, **options: Any) -> None:
        result[name] = (case, options)

    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            options = {"num_bits": bits, "symmetric": symmetric, "group_size": 64, "strategy": "group"}
            add(f"ct_int{bits}_{'sym' if symmetric else 'asym'}", compressed(pack, **options), bits=bits, group_size=64)
    channel = {"num_bits": 4, "symmetric": False, "strategy": "channel"}
    add("ct_channel", compressed(pack, torch.float16, **channel), bits=4)
    add("ct_int8", compressed(naive, num_bits=8, symmetric=True, strategy="channel"), bits=8)
    add("ct_int8_asym", compressed(naive, num_bits=8, symmetric=False, strategy="channel"), bits=8)
    add("ct_fp8_tensor", compressed(naive, num_bits=8, type="float", symmetric=True, strategy="tensor"))
    add("ct_fp8_channel", compressed(naive, num_bits=8, type="float", symmetric=True, strategy="channel"))
    block = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [16, 128]}
    add("ct_fp8_block", compressed(naive, torch.float32, **block), block=[16, 128])
    fp4 = {"num_bits": 4, "type": "float", "symmetric": True}
    nvfp4 = fp4 | {"strategy": "tensor_group", "group_size": 16}
    add("ct_nvfp4", compressed(compressors.NVFP4PackedCompressor, **nvfp4))
    add("ct_mxfp4", compressed(compressors.MXFP4PackedCompressor, **fp4, strategy="group", group_size=32))
    for group in (128, 64):
        for name, case in awq_cases(group).items():
            add(name, case, group_size=group)
    add("nf4", bitsandbytes_case("nf4", False, IN))
    add("nf4_nested", bitsandbytes_case("nf4", True, 704))
    add("fp4_nested", bitsandbytes_case("fp4", True, IN))
    for bits in (1, 2, 3, 4, 8):
        add(f"hqq_{bits}", hqq_case(bits, 1, 64))
    add("hqq_axis0", hqq_case(4, 0, 8))
    add("hqq_channel", hqq_case(4, 1, None))
    add("hqq_across_rows", hqq_case(3, 1, 64, 96))
    return result


if __name__ == "__main__":
    torch.manual_seed(0)
    tensors = {}
    for name, (case, options) in cases().items():
        for part, tensor in case.items():
            tensors[f"{name}|{part}"] = tensor.detach().contiguous().clone()
        tensors[f"{name}|options"] = torch.tensor(list(json.dumps(options).encode()), dtype=torch.uint8)
    safetensors.torch.save_file(tensors, FIXTURE)
    print(f"{FIXTURE}: {len(tensors)} tensors, {FIXTURE.stat().st_size} bytes")

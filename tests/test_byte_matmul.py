"""The product with weights of a byte a code: the Hopper kernel on a simulated warp and the card, dispatch, NaN."""

import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quantized_checkpoints
from jax.sharding import AbstractDevice, AbstractMesh
from simulated_int4_warp import in_float64, relative_error, simulate

from jaxinfer.generation import logits
from jaxinfer.model import load
from pallas_kernels import dispatch
from pallas_kernels.byte_matmul import api, byte_matmul
from pallas_kernels.int4_matmul import mosaic
from pallas_kernels.int4_matmul.packing_rows import ByteRows
from pallas_kernels.int4_matmul.plan import Fusion, Schedule

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
BLOCK = (128, 128)


def make(shape: tuple[int, int], block: tuple[int, int], dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of every size, subnormal ones too, scales, and the values in float64."""
    rng = np.random.default_rng(sum(shape))
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    codes = rng.choice(codes[np.isfinite(codes.astype(np.float32))], shape)
    scales = rng.uniform(0.5, 2, (shape[0] // block[0], shape[1] // block[1])).astype(np.float32)
    values = codes.astype(np.float64) * np.kron(scales, np.ones(block))
    return codes, scales, values


def tokens(rows: int, in_features: int) -> np.ndarray:
    x = np.random.default_rng(rows).standard_normal((rows, in_features)).astype(np.float32)
    return (x * 2.0 ** np.arange(rows)[:, None]).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("rows", "shape", "block", "dtype", "schedule"),
    [
        (1, (256, 1024), (128, 128), E4M3, Schedule(4, 2, 2, 2, blocks=3, scaled=True)),
        (3, (128, 512), (16, 128), E4M3, Schedule(4, 1, 2, 1, blocks=2, scaled=True)),
        (13, (256, 640), (64, 128), E5M2, Schedule(4, 1, 1, 2, blocks=3, scaled=True)),  # a warp without inputs
        (5, (128, 768), (128, 256), E4M3, Schedule(4, 2, 2, 2, blocks=4, scaled=True)),
        (1, (96, 1024), (1, 1024), np.int8, Schedule(4, 2, 2, 2, blocks=2, scaled=True)),
        (9, (96, 576), (1, 576), np.int8, Schedule(4, 1, 2, 2, blocks=2, scaled=True)),
        (2, (96, 576), (1, 576), E4M3, Schedule(4, 2, 2, 1, blocks=4, scaled=True)),
    ],
)
def test_kernel_on_simulated_warps(rows, shape, block, dtype, schedule) -> None:
    codes, scales, values = make(shape, block, dtype)
    x = tokens(rows, shape[1])
    out = simulate(x, ByteRows(codes, scales, None, shape, block[1]), schedule).sum(0)
    assert relative_error(out, in_float64(x, values)) < 2e-7


def test_surroundings_on_simulated_warps() -> None:
    """A norm before, a gate and a residual behind, as around packed integers."""
    codes, scales, values = make((256, 512), (128, 128), E4M3)
    x, norm = tokens(2, 512), np.random.default_rng(1).uniform(0.5, 1.5, 512).astype(np.float32)
    residual = np.random.default_rng(2).standard_normal((2, 128)).astype(np.float32)
    schedule, fusion = Schedule(4, 1, 2, 2, blocks=2, scaled=True), Fusion(1e-5, gated=True, residual=True)
    weight = ByteRows(codes, scales / 4096, None, (256, 512), 128)
    out = simulate(x, weight, schedule, fusion=fusion, norm=norm, residual=residual)[0]
    wide = x.astype(np.float64)
    root = 1 / np.sqrt((wide * wide).mean(1, keepdims=True) + 1e-5)
    gate, up = np.split((wide * norm).astype(ml_dtypes.bfloat16).astype(np.float64) @ values.T / 4096 * root, 2, axis=1)
    assert relative_error(out, gate / (1 + np.exp(-gate)) * up + residual) < 2e-6


def test_a_code_that_is_no_number_is_none_in_the_result() -> None:
    """0x7F is NaN in e4m3fn: bits that are only moved would make 480 of it."""
    codes, scales, _ = make((128, 512), (128, 128), E4M3)
    codes[7, 300] = np.uint8(0x7F).view(E4M3)
    schedule = Schedule(4, 1, 2, 2, blocks=2, scaled=True)
    out = simulate(tokens(2, 512), ByteRows(codes, scales, None, (128, 512), 128), schedule).sum(0)
    assert np.argwhere(np.isnan(out)).tolist() == [[0, 7], [1, 7]]


type Abstract = jax.ShapeDtypeStruct


def abstract(rows: int, shape: tuple[int, int]) -> tuple[Abstract, Abstract, Abstract]:
    scales = jax.ShapeDtypeStruct((shape[0] // 128, shape[1] // 128), jnp.float32)
    codes = jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
    return jax.ShapeDtypeStruct((rows, shape[1]), jnp.bfloat16), codes, scales


@pytest.mark.parametrize(
    ("rows", "shape", "dtype"), [(1, (4096, 4096), jnp.int8), (16, (4096, 12288), E4M3), (64, (14336, 4096), E4M3)]
)
def test_kernel_lowers_for_cuda(rows: int, shape: tuple[int, int], dtype: type) -> None:
    x, codes, scales = abstract(rows, shape)
    codes = codes.update(dtype=dtype)
    weight = ByteRows(codes, scales, None, shape, 128)
    schedule = api.schedule_for(rows, weight, "NVIDIA H200")
    product = functools.partial(mosaic.int4_matmul, schedule=schedule, out_dtype=jnp.dtype(jnp.bfloat16))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(product).trace(x, weight).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def reason(x: Abstract, codes: Abstract, scales: Abstract, block: tuple[int, int] | None = BLOCK, **options) -> str:
    """Why not mosaic."""
    found: list[dispatch.Choice] = []

    def product(*arrays):
        found.extend(byte_matmul(*arrays, explain=True, block=block, **options))
        return jnp.zeros(())

    jax.eval_shape(product, x, codes, scales)
    assert [choice.backend for choice in found] == ["mosaic", "reference"]
    return "" if found[0].taken else found[0].reason


def test_explain_says_why_not_mosaic(monkeypatch: pytest.MonkeyPatch) -> None:
    x, codes, scales = abstract(4, (256, 512))
    assert reason(x, codes, scales) == "this process has no GPU"
    monkeypatch.setattr(dispatch, "hopper_refusal", lambda: None)
    assert reason(x, codes, scales) == ""
    assert reason(*abstract(1, (256, 512))) == "it is not known to be faster than XLA with 1 rows"
    assert reason(*abstract(1, (256, 512)), backend="mosaic") == ""
    assert reason(*abstract(65, (256, 512))) == "it takes 1 to 64 rows, not 65"
    outputs = jax.ShapeDtypeStruct((256,), jnp.float32)
    for rows, inputs, dtype, why in (
        (16, 4096, jnp.int8, ""),
        (16, 4096, E4M3, "it is not known to be faster than XLA with 16 rows"),
        (16, 1024, jnp.int8, "it is not known to be faster than XLA with 16 rows"),
        (8, 4096, jnp.int8, "it is not known to be faster than XLA with 8 rows"),
    ):
        activations, bytes_, _ = abstract(rows, (256, inputs))
        assert reason(activations, bytes_.update(dtype=dtype), outputs, None) == why
    assert "needs bfloat16" in reason(x.update(dtype=jnp.float32), codes, scales)
    small = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    assert "blocks of a multiple of 16 outputs and of 128 inputs" in reason(x, codes, small, (64, 64))
    odd = jax.ShapeDtypeStruct((250, 512), jnp.float8_e4m3fn)
    assert "pieces of 128 outputs and 128 inputs do not divide (250, 512)" in reason(x, odd, scales)
    outputs = jax.ShapeDtypeStruct((250,), jnp.float32)
    assert "pieces of 16 outputs and 64 inputs do not divide (250, 512)" in reason(x, odd, outputs, None)
    monkeypatch.setenv("JAXINFER_KERNELS", "reference")
    assert reason(x, codes, scales) == "reference was asked for"
    monkeypatch.setenv("JAXINFER_KERNELS", "triton")  # which other products of the same model may have
    assert reason(x, codes, scales) == "JAXINFER_KERNELS names triton"
    monkeypatch.setenv("JAXINFER_KERNELS", "mosaic")
    assert reason(x, codes, scales) == ""


def test_what_does_not_fit_is_refused() -> None:
    x, codes, scales = (jnp.zeros(array.shape, array.dtype) for array in abstract(2, (256, 512)))
    with pytest.raises(ValueError, match=r"x has shape \(2, 511\); a weight of 512 in_features"):
        byte_matmul(x[:, :-1], codes, scales, block=BLOCK)
    with pytest.raises(
        ValueError, match=r"scales have shape \(2, 4\); \(256, 512\) in blocks of \(64, 128\) need \(4, 4\)"
    ):
        byte_matmul(x, codes, scales, block=(64, 128))
    with pytest.raises(
        ValueError, match=r"scales have shape \(2,\); \(256, 512\) with a scale an output need \(256,\)"
    ):
        byte_matmul(x, codes, scales[:, 0])
    with pytest.raises(ValueError, match="out_dtype is int32; it needs floats"):
        byte_matmul(x, codes, scales, block=BLOCK, out_dtype=jnp.int32)
    with pytest.raises(ValueError, match="cannot run on mosaic"):
        byte_matmul(x, codes, scales, block=BLOCK, backend="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "block"), [(E4M3, BLOCK), (E5M2, BLOCK), (np.int8, None), (E4M3, None)])
@pytest.mark.parametrize(
    ("rows", "shape"), [(1, (4096, 4096)), (8, (1024, 14336)), (13, (6144, 4096)), (64, (256, 640))]
)
def test_kernel_on_the_gpu(rows: int, shape: tuple[int, int], dtype: type, block: tuple[int, int] | None) -> None:
    """Against float64; x in float16 has what bfloat16 has, codes are exact, and sums are float32."""
    codes, scales, values = make(shape, block or (1, shape[1]), dtype)
    x = tokens(rows, shape[1])
    product = jax.jit(functools.partial(byte_matmul, block=block, out_dtype=jnp.float32, backend="mosaic"))
    device_codes, device_scales = jnp.asarray(codes), jnp.asarray(scales if block else scales[:, 0])
    outs = [np.asarray(product(jnp.asarray(x), device_codes, device_scales)) for _ in range(3)]
    expected = in_float64(x, values)
    for token in range(rows):
        assert relative_error(outs[0][token], expected[token]) < 1e-5
    assert all(np.array_equal(outs[0], out) for out in outs)


@pytest.mark.gpu
def test_a_model_with_fp8_in_blocks_on_the_gpu(tmp_path: pathlib.Path) -> None:
    """Through the layers, beside the model decoded to bfloat16: five tokens are a piece of 64 rows."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 64, "num_hidden_layers": 2, "tie_word_embeddings": True}
    rows = {"self_attn.q": (256, 256), "self_attn.k": (128, 256), "self_attn.v": (128, 256), "self_attn.o": (256, 256)}
    rows |= {"mlp.gate": (512, 256), "mlp.up": (512, 256), "mlp.down": (256, 512)}
    rng = np.random.default_rng(0)
    embedding = rng.standard_normal((quantized_checkpoints.VOCAB, 256)).astype(np.float32)
    tensors: quantized_checkpoints.Tensors = {"model.embed_tokens.weight": embedding}
    norms = ["norm", *(f"layers.{i}.{n}" for i in range(2) for n in ("input_layernorm", "post_attention_layernorm"))]
    tensors |= {f"model.{norm}.weight": np.ones(256, np.float32) for norm in norms}
    for layer, (name, (out, inputs)) in itertools.product(range(2), rows.items()):
        part = f"model.layers.{layer}.{name}_proj.weight"
        tensors[part] = rng.normal(0, 60, (out, inputs)).clip(-440, 440).astype(E4M3)
        tensors[f"{part}_scale_inv"] = rng.uniform(5e-4, 1.5e-3, (out // 128, inputs // 128)).astype(np.float32)
    config = quantized_checkpoints.CONFIG | sizes | {"quantization_config": {"quant_method": "fp8"}}
    quantized_checkpoints.write(tmp_path, tensors, config)
    prompts = np.arange(5, dtype=np.int32)[None, :]
    found, expected = (
        np.asarray(logits(load(tmp_path, packed=packed, progress=False), prompts), np.float64)
        for packed in (True, False)
    )
    assert 0 < relative_error(found, expected) < 0.03


def test_a_backend_of_the_environment_that_nobody_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is a backend of other products, and leaves these to XLA; a mistyped name is nobody's."""
    x, codes = jnp.ones((2, 128), jnp.bfloat16), jnp.ones((16, 128), jnp.int8)
    scales = jnp.ones(16, jnp.float32)
    monkeypatch.setenv("JAXINFER_KERNELS", "triton")
    assert [choice.backend for choice in byte_matmul(x, codes, scales, explain=True) if choice.taken] == ["reference"]
    monkeypatch.setenv("JAXINFER_KERNELS", "mosiac")
    with pytest.raises(ValueError, match="no backend 'mosiac'"):
        byte_matmul(x, codes, scales)


@pytest.mark.parametrize(
    ("x", "codes", "scales", "block", "message"),
    [
        ((2, 256), (128, 256), (1, 2), None, r"need \(128,\)"),
        ((2, 256), (128, 256), (128,), (128, 128), r"need \(1, 2\)"),
        ((2, 256), (128, 256), (1, 2), (0, 128), "block=.*such as"),
    ],
)
def test_arguments_that_do_not_fit_are_named(x, codes, scales, block, message) -> None:
    arrays = jnp.ones(x, jnp.bfloat16), jnp.ones(codes, jnp.int8), jnp.ones(scales, jnp.float32)
    with pytest.raises(ValueError, match=message):
        byte_matmul(*arrays, block=block)
    assert byte_matmul(jnp.ones((0, 256), jnp.bfloat16), jnp.ones((128, 256), jnp.int8), jnp.ones(128)).shape == (
        0,
        128,
    )

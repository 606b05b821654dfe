"""RoPE: frequencies against transformers, angles against float64, the rotation against complex numbers."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import RopeConfig
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.layers.rope import MAX_POSITIONS, apply_rope, inverse_frequencies, rope_tables

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
RECORDS = json.loads((FIXTURES / "rope.json").read_text())
FAR = np.array([0, 1, 255, 257, 4095, 32767, 131071, 1 << 20, MAX_POSITIONS - 1], dtype=np.int32)

DEFAULT = RopeConfig(kind="default", theta=10000.0, rotary_dim=128)
LLAMA_3_2 = RopeConfig(
    kind="llama3",
    theta=500000.0,
    rotary_dim=64,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
LONGROPE = RopeConfig(
    kind="longrope",
    theta=10000.0,
    rotary_dim=8,
    attention_factor=1.25,
    original_max_position_embeddings=16,
    short_factor=(1.0, 1.1, 1.2, 1.3),
    long_factor=(2.0, 3.0, 5.0, 9.0),
)
DYNAMIC = RopeConfig(kind="dynamic", theta=10000.0, rotary_dim=64, factor=4.0, original_max_position_embeddings=2048)
YARN = RopeConfig(
    kind="yarn",
    theta=1000000.0,
    rotary_dim=128,
    factor=4.0,
    attention_factor=1.1386,
    original_max_position_embeddings=32768,
)


def record_id(record: dict) -> str:
    return f"{record['name']}-{record['layer_type'].split('_')[0]}-{record['context_length']}"


def record_rope(record: dict) -> RopeConfig:
    source = record.get("config") or json.loads((FIXTURES / "configs" / f"{record['name']}.json").read_text())
    sliding = record["layer_type"] == "sliding_attention"
    layers = from_hugging_face(source).layers
    rotated = [layer for layer in layers if layer.rope is not None]
    # A single layer type may be windowed everywhere (Mistral); only Gemma 3 has a RoPE for each type.
    if any(other["layer_type"] == "sliding_attention" for other in RECORDS if other["name"] == record["name"]):
        rotated = [layer for layer in rotated if (layer.window is not None) == sliding]
    assert rotated[0].rope is not None
    return rotated[0].rope


def angles_float64(rope: RopeConfig, positions: np.ndarray, context_length: int) -> np.ndarray:
    """position * theta ** (-2i / d), scaled by plain formulas, in float64."""
    exponents = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
    theta = rope.theta
    if rope.kind == "dynamic":
        original = rope.original_max_position_embeddings
        growth = rope.factor * max(context_length, original) / original - (rope.factor - 1)
        theta *= growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
    frequencies = 1 / theta**exponents
    if rope.kind == "longrope":
        is_long = context_length > rope.original_max_position_embeddings
        frequencies /= np.array(rope.long_factor if is_long else rope.short_factor)
    return positions[:, None].astype(np.float64) * frequencies


def tables(rope: RopeConfig, positions: np.ndarray, context_length: int) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = rope_tables(rope, jnp.asarray(positions)[None, :], jnp.array([context_length], jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    return np.asarray(cos[0]), np.asarray(sin[0])


@pytest.mark.parametrize("record", RECORDS, ids=record_id)
def test_frequencies_are_those_of_transformers(record: dict) -> None:
    rope = record_rope(record)
    expected = np.array(record["inverse_frequencies"], dtype=np.float32)
    found = inverse_frequencies(rope, record["context_length"])
    assert found.dtype == np.float32
    # transformers takes powers in float32, which costs it a few units in the last place.
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(record["attention_factor"], rel=1e-12)


def test_records_cover_every_kind() -> None:
    kinds = {record_rope(record).kind for record in RECORDS}
    assert kinds == {"default", "linear", "dynamic", "yarn", "longrope", "llama3"}


def test_llama_3_2_keeps_15_pairs_blends_3_and_divides_14() -> None:
    """Trap J1, in its own numbers."""
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    ratio = plain / inverse_frequencies(LLAMA_3_2, 100)
    np.testing.assert_allclose(ratio[:15], 1.0, rtol=1e-6)
    assert np.all((ratio[15:18] > 1.001) & (ratio[15:18] < 31.9))
    np.testing.assert_allclose(ratio[18:], 32.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("rope", "context_length"),
    [(DEFAULT, 8), (dataclasses.replace(DEFAULT, theta=5e6), 8), (LONGROPE, 16), (LONGROPE, 17)],
    ids=["default", "theta-5e6", "longrope-short", "longrope-long"],
)
def test_tables_are_accurate_at_any_position(rope: RopeConfig, context_length: int) -> None:
    angles = angles_float64(rope, FAR, context_length)
    cos, sin = tables(rope, FAR, context_length)
    near = FAR <= 131071
    for found, exact in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        exact = exact * rope.attention_factor
        np.testing.assert_allclose(found[near], exact[near], atol=1e-6)
        np.testing.assert_allclose(found, exact, atol=1e-4)


@pytest.mark.parametrize("rope", [LLAMA_3_2, YARN], ids=["llama3", "yarn"])
def test_scaled_tables_agree_with_their_frequencies(rope: RopeConfig) -> None:
    positions = np.arange(0, 4096, 7, dtype=np.int32)
    angles = positions[:, None].astype(np.float64) * inverse_frequencies(rope, 1).astype(np.float64)
    cos, sin = tables(rope, positions, 131072)
    # The float32 rounding of the frequencies alone moves position 4096 by 1.2e-4.
    np.testing.assert_allclose(cos, np.cos(angles) * rope.attention_factor, atol=2e-4)
    np.testing.assert_allclose(sin, np.sin(angles) * rope.attention_factor, atol=2e-4)


@pytest.mark.parametrize("context_length", [1, 2048, 2049, 3000, 8192])
def test_dynamic_tables_follow_the_context_length(context_length: int) -> None:
    positions = np.arange(0, 8192, 61, dtype=np.int32)
    angles = angles_float64(DYNAMIC, positions, context_length)
    cos, sin = tables(DYNAMIC, positions, context_length)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-3)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-3)


@pytest.mark.parametrize("rope", [LONGROPE, dataclasses.replace(DYNAMIC, original_max_position_embeddings=16)])
def test_each_row_has_its_own_context_length(rope: RopeConfig) -> None:
    positions = np.arange(12, dtype=np.int32)
    lengths = [12, 16, 17, 64]
    cos, sin = rope_tables(rope, jnp.tile(jnp.asarray(positions), (4, 1)), jnp.array(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        alone = tables(rope, positions, length)
        np.testing.assert_array_equal(cos[row], alone[0])
        np.testing.assert_array_equal(sin[row], alone[1])
    np.testing.assert_array_equal(cos[0], cos[1])
    assert np.abs(cos[1] - cos[3]).max() > 0.01


def test_frequency_divisors_come_last() -> None:
    divisors = tuple(np.linspace(1.0, 8.0, 32))
    divided = dataclasses.replace(LLAMA_3_2, frequency_divisors=divisors)
    expected = inverse_frequencies(LLAMA_3_2, 1) / np.array(divisors)
    np.testing.assert_allclose(inverse_frequencies(divided, 1), expected, rtol=1e-6)
    # A GGUF file says default and stores the divisors that amount to llama3.
    stored = tuple(500000.0 ** -(np.arange(0, 64, 2) / 64) / inverse_frequencies(LLAMA_3_2, 1))
    from_gguf = RopeConfig(kind="default", theta=500000.0, rotary_dim=64, frequency_divisors=stored)
    positions = np.array([0, 100, 3000], dtype=np.int32)
    np.testing.assert_allclose(tables(from_gguf, positions, 1), tables(LLAMA_3_2, positions, 1), atol=2e-4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_rotation_multiplies_complex_pairs(rng: np.random.Generator, rotary_dim: int, interleaved: bool) -> None:
    rope = RopeConfig(kind="default", theta=100.0, rotary_dim=rotary_dim)
    positions = rng.integers(0, 1000, (2, 5)).astype(np.int32)
    x = rng.standard_normal((2, 5, 3, 16)).astype(np.float32)
    cos, sin = rope_tables(rope, jnp.asarray(positions), jnp.array([1000, 1000], jnp.int32))
    found = np.asarray(apply_rope(jnp.asarray(x), cos, sin, rotary_dim, interleaved))

    half = rotary_dim // 2
    first = np.arange(0, rotary_dim, 2) if interleaved else np.arange(half)
    second = first + 1 if interleaved else first + half
    turn = np.exp(1j * positions[..., None, None] * 100.0 ** (-np.arange(half) / half))
    pairs = (x[..., first] + 1j * x[..., second]) * turn
    np.testing.assert_allclose(found[..., first], pairs.real, atol=1e-5)
    np.testing.assert_allclose(found[..., second], pairs.imag, atol=1e-5)
    np.testing.assert_array_equal(found[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("position", [255, 257, 4095, 32767])
def test_bfloat16_activations_lose_nothing_to_the_angles(rng: np.random.Generator, position: int) -> None:
    """Trap J3: phase, cosine and sine are float32 whatever the model's dtype."""
    x = jnp.asarray(rng.standard_normal((1, 1, 2, 128)), jnp.bfloat16)
    cos, sin = rope_tables(DEFAULT, jnp.array([[position]], jnp.int32), jnp.array([40000], jnp.int32))
    rotate = jax.jit(apply_rope, static_argnums=(3, 4))
    found, exact = (rotate(y, cos, sin, 128, False) for y in (x, x.astype(jnp.float32)))
    assert found.dtype == jnp.bfloat16
    # Only the result is rounded: 8 bits, half a unit in the last place. Angles in bfloat16 would be off by 0.8.
    error = np.abs(np.asarray(found, np.float32) - np.asarray(exact))
    assert np.all(error <= np.abs(np.asarray(exact)) * 2**-8)
    assert error.max() < 1e-2
    naive = jnp.cos(jnp.asarray(position, jnp.bfloat16) * jnp.asarray(inverse_frequencies(DEFAULT, 1), jnp.bfloat16))
    assert np.abs(np.asarray(naive, np.float32) - np.asarray(cos[0, 0])).max() > 1e-2


def test_scores_depend_on_distance_only(rng: np.random.Generator) -> None:
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 128)), jnp.float32) for _ in range(2))

    def score(query_position: int, key_position: int) -> float:
        rotated = []
        for x, position in ((q, query_position), (k, key_position)):
            cos, sin = rope_tables(DEFAULT, jnp.array([[position]], jnp.int32), jnp.array([MAX_POSITIONS], jnp.int32))
            rotated.append(np.asarray(apply_rope(x, cos, sin, 128, False), np.float64).ravel())
        return float(rotated[0] @ rotated[1])

    near = score(37, 12)
    assert score(131071, 131046) == pytest.approx(near, abs=1e-4)
    assert score(MAX_POSITIONS - 1, MAX_POSITIONS - 26) == pytest.approx(near, abs=1e-4)


def test_tables_stay_float32_in_a_compiled_bfloat16_program() -> None:
    def program(positions: jax.Array, x: jax.Array) -> jax.Array:
        cos, sin = rope_tables(DEFAULT, positions, jnp.array([8], jnp.int32))
        return apply_rope(x, cos, sin, 128, False)

    lowered = jax.jit(program).lower(
        jax.ShapeDtypeStruct((1, 8), jnp.int32), jax.ShapeDtypeStruct((1, 8, 2, 128), jnp.bfloat16)
    )
    trigonometry = [line for line in lowered.as_text().splitlines() if "cosine" in line or "sine" in line]
    assert trigonometry
    assert all("f32" in line and "bf16" not in line for line in trigonometry)

"""What `benchmarks.kernels_int4_few --stamps` makes of the clocks that a kernel wrote."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from benchmarks.int4_profile import Profile
from benchmarks.int4_stamps import HEAD, Places, products, results_of
from pallas_kernels.int4_matmul import PackedInt4
from pallas_kernels.int4_matmul.plan import Plan, Schedule

APART = Schedule(warps=16, parts=2, strips=1, depth=2, scaled=True, bulk=True, apart=True)
JOINED = Schedule(warps=8, parts=2, strips=2, depth=3, blocks=264, scaled=True, bulk=True, joined=True)
CLOCKS_A_NS = 2
PER_TURN = 400
"""Nanoseconds from one turn to the next, whose stamps are ten apart."""


def weight(n: int, k: int) -> PackedInt4:
    codes, scales, zeros = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((n // 16, k // 64, 128), jnp.int32),
            ((n // 16, k // 128, 16), jnp.bfloat16),
            ((n // 16, k // 128, 16), jnp.uint8),
        )
    )
    return PackedInt4(codes, scales, zeros, None, (n, k), 128, "mosaic")


def stamped(plan: Plan, launch: int) -> np.ndarray:
    """A result of threes with stamps: block b starts b ns after the first; its end is 100 ns after its last turn."""
    places = Places(plan)
    out = np.full((plan.partials, plan.all_rows, plan.results), np.nan, np.float32)
    words = out.reshape(-1).view(np.uint32)
    out.reshape(-1).view(ml_dtypes.bfloat16)[: out.size] = 3.0
    for block in range(places.blocks):
        strips = (block % plan.blocks_per_slice + 1) * plan.result_strips // plan.blocks_per_slice
        strips -= block % plan.blocks_per_slice * plan.result_strips // plan.blocks_per_slice
        first, clock = places.start + block * places.block, 4_000_000_000 + 7000 * block  # goes past 2^32
        end_ns = 1000 + PER_TURN * (strips - 1) + 100
        for events, place in zip(places.events, places.starts, strict=False):
            words[first + place : first + place + HEAD] = (
                places.blocks - 1 - block,
                *(50_000 * launch + block + i for i in (0, end_ns)),
            )
            each = len(events.turn)
            times = [100 * i for i in range(len(events.before))]
            times += [1000 + PER_TURN * turn + 10 * i for turn in range(strips) for i in range(each)]
            stamps = np.array([*times, end_ns]) * CLOCKS_A_NS + clock
            words[first + place + HEAD :][: len(stamps)] = stamps % 2**32
    return out


@pytest.mark.parametrize(
    ("rows", "k", "n", "schedule"), [(8, 4096, 4096, APART), (16, 8192, 4096, APART), (8, 4096, 14336, JOINED)]
)
def test_a_profile_of_known_stamps(rows: int, k: int, n: int, schedule: Schedule) -> None:
    plan = Plan.of(rows, weight(n, k), schedule)
    launches = [stamped(plan, launch) for launch in range(4)]
    assert (results_of(plan, launches[0]) == 3.0 * plan.partials).all()
    profile = Profile.of(plan, [jnp.asarray(launch) for launch in launches])
    metrics = {name: value for name, (value, _) in profile.metrics().items()}
    middle, most = (Places(plan).blocks - 1) / 2e3, plan.most_strips
    assert metrics["last_start"] == pytest.approx(2 * middle)
    for name, ns in (("x_asked", 100), ("x_there", 200), ("x_summed", 300), ("first_weights", 1000)):
        assert metrics[name] == pytest.approx(ns / 1e3 + middle, abs=1e-3)
    assert metrics["first_sums"] == pytest.approx(1.010 + middle, abs=1e-3)
    assert metrics["first_written"] == pytest.approx(1.020 + middle, abs=1e-3)
    assert metrics["later_turn"] == pytest.approx(PER_TURN / 1e3)
    assert metrics["last_end"] == pytest.approx(1.1 + PER_TURN / 1e3 * (most - 1) + 2 * middle, abs=5e-3)
    assert metrics["end_most_strips"] - metrics["end_fewer_strips"] == pytest.approx(PER_TURN / 1e3, abs=0.02)
    assert metrics["lateness_repeats"] == pytest.approx(1.0)
    assert np.isfinite(list(metrics.values())).all()
    assert len(profile.table()) == 1 + 1 + len(profile.before) + 1 + 1 + most
    missing = {name: np.full_like(times, np.nan) for name, times in profile.turns.items() if "sums" in name}
    without = dataclasses.replace(profile, turns=profile.turns | missing).metrics()
    assert set(metrics) - set(without) == {"first_sums"}


def test_stamps_need_room_beside_results() -> None:
    with pytest.raises(ValueError, match="34 stamps of 16 blocks do not fit into 384 words"):
        products(jnp.zeros((3, 4096), jnp.bfloat16), [weight(256, 4096)], APART)


@pytest.mark.parametrize(("rows", "schedule"), [(8, APART), (16, APART), (8, JOINED)])
def test_a_kernel_with_stamps_lowers_for_cuda(rows: int, schedule: Schedule) -> None:
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(lambda x, w: products(x, [w], schedule)).trace(x, weight(4096, 4096))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text

"""The programs as XLA compiles them for an H200, on a machine that has none: the cache is updated in place.

Opt-in: runs where the CUDA build of JAX is installed (`pip install 'jax[cuda13]'`), with or without a GPU.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from compiled_for_h200 import H200, needs_cuda_build

pytestmark = needs_cuda_build

# A process of its own: the device is pretended, and a kernel for the wrong card would end the process.
COMPILE = """
import dataclasses, json, os, re, sys
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jaxinfer import batch as batches, kv_cache, loop, params, steps, tiers
from jaxinfer.config import LayerConfig, ModelConfig, RopeConfig
from jaxinfer.quantization.plan import resolve
from jaxinfer.sampling_state import SamplerVariant, SamplingState
from jaxinfer.speculative.acceptance import Exact
from jaxinfer.speculative.loop import Method, SpeculativeState, spec_chunk
from jaxinfer.speculative.model_draft import DraftCache, ModelProposer
from jaxinfer.speculative.proposer import Wanted
from pallas_kernels import dispatch

program, batch, kv, backend, plan = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
os.environ["JAXINFER_KERNELS"] = backend
if backend == "triton":
    import functools, jax_triton
    from pallas_kernels import triton_backend

    jax_triton.triton_call = functools.partial(jax_triton.triton_call, compute_capability=90)
    triton_backend.refusal = lambda: None
    triton_backend.multiprocessors, triton_backend.capability = lambda: 132, lambda: "9.0"
for module in list(sys.modules.values()):
    if getattr(module, "hopper_refusal", None) is dispatch.hopper_refusal and module is not dispatch:
        module.hopper_refusal = lambda: None
dispatch.hopper_refusal = lambda: None
topology = topologies.get_topology_desc(platform="cuda", target_config=sys.stdin.read(), topology="1x1x1")
mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
jax.default_backend = lambda: "gpu"

rope = RopeConfig("default", 1e4, 64)
config = ModelConfig(
    "llama", 1024, 1000, 512, 1024, 8, 2, 64, (LayerConfig(rope),) * 3, 4096, 1e-5, attention_scale=0.125
)

def like(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), tree)

def array(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

plan = None if plan == "none" else resolve(plan)
weights = like(jax.eval_shape(lambda: params.random_params(config, jnp.bfloat16, 0, plan=plan)))
rows, table = array(batch), array(batch, 64)
if kv == "tiered":
    config = dataclasses.replace(config, layers=(*config.layers[:2], LayerConfig(rope, 100)))
    table = tiers.TierTables(*(array(batch, width) for width in (16, 8, 64, 16)), *[rows] * 3)
    create = lambda: tiers.create(config, tiers.TierPools(8192, 8192, 32768, 8192), 16, jnp.dtype(jnp.bfloat16))
else:
    create = lambda: kv_cache.create(config, 32768, dtype=kv)
cache = like(jax.eval_shape(create))
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    state = loop.DecodeState(
        tokens=rows, positions=rows, num_generated=rows, max_tokens=rows, stop_ids=array(batch, 1),
        context_lengths=rows, done=array(batch, dtype=bool), sampling=SamplingState(),
    )
    if program in ("spec_self", "spec_model"):
        draft = DraftCache(cache, rows) if program == "spec_model" else ()
        state = SpeculativeState(
            decode=state, history=array(batch, 1025), hidden=array(batch, 512, dtype=jnp.bfloat16),
            coupled=array(batch, dtype=bool), alone=array(batch, dtype=bool), draft=draft,
        )
        traced = spec_chunk.trace(
            weights, weights, cache, state, array(batch, dtype=bool), table,
            method=Method(config, ModelProposer(config, 1024), Exact()), num_steps=8,
            wanted=Wanted(num_drafted=4, variant=SamplerVariant(1000), with_logits=False),
        )
    elif program == "decode_chunk":
        traced = loop.decode_chunk.trace(
            weights, cache, state, array(batch, dtype=bool), table,
            config=config, variant=SamplerVariant(1000), num_steps=8,
        )
    elif program == "decode":
        traced = steps.decode.trace(weights, cache, rows, rows, table, config=config)
    elif program == "begin":
        sizes = {"num_tokens": 2048, "num_pages": 32768, "cache_dtype": jnp.dtype(kv)}
        traced = batches._begin.trace(weights, array(batch, 2048 + 2 + 128), **sizes, config=config)
    elif program == "move":
        traced = tiers.move_pages.trace(cache, array(64, 2), source="recent", target="int4")
    elif program.startswith("verify"):
        tokens = int(program.partition("_")[2] or 5)
        traced = steps.verify.trace(weights, cache, array(batch, tokens), rows, table, config=config)
    else:
        traced = steps.prefill.trace(
            weights, cache, array(batch, 128), rows, rows, table, config=config, from_empty=program == "first"
        )
    compiled = traced.lower().compile()
memory = compiled.memory_analysis()
shapes = {leaf.shape for leaf in jax.tree.leaves(cache)}
shape = "(?:" + "|".join(re.escape("[" + ",".join(map(str, shape)) + "]") for shape in shapes) + ")"
text = compiled.as_text()

# What a layer launches: its instructions, but for those inside of fusions.
inside, where, launches = set(re.findall(r"fusion\\(.*calls=%?([\\w.-]+)", text)), "", 0
bodies, small = set(re.findall(r"while\\(.*body=%?([\\w.-]+)", text)), 0
for line in text.splitlines():
    start = re.match(r"(?:ENTRY )?%?([\\w.-]+) .*{$", line)
    where = start.group(1) if start else where
    kernel = re.search(r" (?:fusion|custom-call|copy|scatter|gather)\\(.*/layer_1/", line)
    launches += kernel is not None and where not in inside
    small += where in bodies and re.search(r" (?:fusion|copy|scatter|gather|fusion-start)\\(", line) is not None
print(json.dumps({
    "launches": launches,
    "small": small,
    "slices": len(re.findall(r'custom-call\\([^)]*slice[^)]*\\), custom_call_target="mosaic', text)),
    "pools": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)),
    "aliased": memory.alias_size_in_bytes,
    "temporary": memory.temp_size_in_bytes,
    "copies": len(re.findall(rf"= \\w+{shape}\\S* copy\\(", text)),
    "kernels": len(re.findall(r'custom_call_target="(?:mosaic_gpu_v2|triton_kernel_call)', text)),
}))
"""


PROGRAMS = ["decode_chunk", "decode", "verify", "prefill", "first"]
QUANTISED = [("decode_chunk", "int8"), ("verify", "float8_e4m3fn"), ("prefill", "int4"), ("first", "int8")]


@pytest.mark.parametrize(
    ("program", "batch", "kv"),
    [(program, batch, "bfloat16") for program in PROGRAMS for batch in (1, 8)]
    + [(program, 8, kv) for program, kv in QUANTISED],
)
def test_cache_is_updated_in_place(program: str, batch: int, kv: str) -> None:
    kernels = check_program(program, batch, kv, "mosaic")
    assert kernels == (0 if program == "first" and kv != "bfloat16" else 3)  # cuDNN where pages hold codes


@pytest.mark.parametrize(("program", "kernels"), [("decode_chunk", 7), ("prefill", 7), ("move", 0)])
def test_tiers_are_updated_in_place(program: str, kernels: int) -> None:
    """Two layers that see everything, with a kernel for each tier, and one with a window."""
    assert check_program(program, 8, "tiered", "mosaic") == kernels


@pytest.mark.parametrize("program", ["spec_self", "spec_model"])
def test_speculation_updates_both_caches_in_place(program: str) -> None:
    """Three layers in verification, and in each of the draft's four passes, which are unrolled."""
    assert check_program(program, 8, "bfloat16", "mosaic") == 15


def test_passes_of_one_row_are_chained_by_a_kernel() -> None:
    """Four of the 67 kernels choose a draft's token; of its angles, place and embedding there are no others."""
    facts = compile_program("spec_model", 1, "bfloat16", "mosaic", "int4")
    assert (facts["kernels"], facts["copies"]) == (67, 0)
    assert facts["small"] <= 33
    assert facts["aliased"] >= facts["pools"]


@pytest.mark.skipif(
    importlib.util.find_spec("jax_triton") is None, reason="needs the optional extra: pip install jaxinfer[triton]"
)
@pytest.mark.parametrize(("program", "kv"), [("decode_chunk", "bfloat16"), ("verify", "int8")])
def test_cache_is_updated_in_place_with_triton(program: str, kv: str) -> None:
    assert check_program(program, 8, kv, "triton") == 6  # three layers, splits and their merge


def test_kernels_get_no_slices_in_place() -> None:
    """XLA would pass the address of the page table within the array it is cut from, which is not aligned."""
    facts = compile_program("begin", 1, "bfloat16", "mosaic")
    assert (facts["kernels"], facts["slices"], facts["copies"]) == (3, 0, 0)


@pytest.mark.parametrize(
    ("program", "batch", "kernels"), [("decode", 1, 4), ("verify_2", 1, 4), ("verify_5", 1, 5), ("verify_5", 16, 7)]
)
def test_a_packed_layer_is_a_few_launches(program: str, batch: int, kernels: int) -> None:
    """They norm, multiply, rotate, append, attend and add between them; for two tokens the MLP is one of them. For 80
    nothing brings the heads into another order."""
    assert compile_program(program, batch, "bfloat16", "mosaic", "int4")["launches"] == kernels


def check_program(program: str, batch: int, kv: str, backend: str) -> int:
    """Compiles a program and checks what it does with the cache; gives the number of our kernels in it."""
    facts = compile_program(program, batch, kv, backend)
    assert facts["copies"] == 0
    assert facts["aliased"] >= facts["pools"]
    assert facts["temporary"] < facts["pools"] / 8
    return facts["kernels"]


def compile_program(program: str, batch: int, kv: str, backend: str, plan: str = "none") -> dict[str, int]:
    """Compiles a program with weights as a plan has them; gives what `COMPILE` prints of it."""
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "JAXINFER_COMPILATION_CACHE": "off"}
    answer = subprocess.run(
        [sys.executable, "-c", COMPILE, program, str(batch), kv, backend, plan],
        input=H200,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return json.loads(answer.stdout.splitlines()[-1])

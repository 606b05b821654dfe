"""Stores: what is written is what is read, written whole or not at all, and not believed when it is read."""

import dataclasses
import errno
import hashlib
import itertools
import json
import logging
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import families
import gguf_conversion
import gguf_models
import jax
import jax.numpy as jnp
import markov
import numpy as np
import orbax.checkpoint as ocp
import pytest
import quantized_checkpoints
import tensorstore
from tokenizer_training import gguf_metadata

from checkpoints.errors import CheckpointError
from jaxinfer import checkpoint_weights
from jaxinfer.cli import main
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes, StackedOutputs
from jaxinfer.model import Model, inspect, load
from jaxinfer.params import Piece
from jaxinfer.quantization.api import quantize, write_quantized
from jaxinfer.quantization.calibration import Windows
from jaxinfer.quantization.plan import Plan, Precision, Rule
from jaxinfer.store import checksums, layouts, reader
from jaxinfer.store.create import create, model_pieces, save
from jaxinfer.store.export import export
from jaxinfer.store.manifest import MANIFEST, own_checksum, read_manifest
from jaxinfer.store.unfinished import written_whole
from jaxinfer.store.writer import StoreWriter, add_quality, os_error_number
from jaxinfer.tokenization import tokenizer_from_folder, tokenizer_from_gguf
from pallas_kernels.int4_matmul import PackedInt4, PackedInt8, dequantize, int8_to_mosaic, to_mosaic, to_triton

LLAMA = families.BY_NAME["llama"].folder
MIXED = Plan(
    (
        Rule(("lm_head",), Precision(8, method="fp8")),
        Rule(("*.v_proj",), Precision(8)),
        Rule(("*.o_proj",), Precision(4, 16, symmetric=True)),
        Rule(("*.down_proj",), Precision(4, 16, method="hqq")),
        Rule(("layers.0.gate_proj",), Precision(16)),
        Rule(("*",), Precision(4, 16)),
    ),
    "mixed",
)
"""Every kind but act-order's."""


def same(first: Any, second: Any) -> bool:
    """Whether two pytrees are equal to the bit, kinds, layouts and dtypes included."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    equal = all(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    return equal and jax.tree.structure(first) == jax.tree.structure(second)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return create(LLAMA, tmp_path_factory.mktemp("mixed") / "store", plan=MIXED)


@pytest.fixture
def copy(mixed: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A store to be damaged."""
    return pathlib.Path(shutil.copytree(mixed, tmp_path / "copy"))


def test_a_store_of_a_plan_is_what_quantising_while_loading_gives(mixed: pathlib.Path) -> None:
    expected = load(LLAMA, dtype="bfloat16", quantize=MIXED, progress=False)
    actual = load(mixed, dtype="bfloat16", progress=False)
    assert same(actual.params, expected.params)
    assert actual.config == expected.config
    kinds = {type(leaf) for leaf in jax.tree.leaves(actual.params, is_leaf=lambda x: not isinstance(x, list))}
    layer = actual.params.layers[0]
    assert isinstance(layer.qkv, StackedOutputs) and isinstance(layer.o, PackedInt4), kinds
    assert isinstance(actual.params.lm_head, ScaledCodes)


def test_the_manifest_tells_how_it_was_made(mixed: pathlib.Path) -> None:
    said = reader.Store(mixed).manifest
    assert (said.model, said.dtype, said.device) == ("llama", "bfloat16", "cpu")
    assert said.plan is not None and said.plan["name"] == "mixed"
    assert said.plan["rules"][1] == {"weights": ["*.v_proj"], "bits": 8, "method": "rtn"}
    assert {"jaxinfer", "jax", "orbax-checkpoint"} <= set(said.versions)
    assert said.quality is None


def test_quality_is_kept_and_replaced(copy: pathlib.Path) -> None:
    for report in ({"perplexity": 11.5, "layers": [{"name": "layers.0.o_proj", "error": 0.25}]}, {"kl_mean": 0.125}):
        add_quality(copy, report)
        assert reader.Store(copy).manifest.quality == report


def test_quantising_into_a_store_keeps_plan_and_report(tmp_path: pathlib.Path, caplog) -> None:
    """By a calibrated method, layer by layer; what `load` gives is what `quantize` gives without a store."""
    ids = np.arange(24, dtype=np.int32).reshape(3, 8)
    windows = Windows(ids[:2], ids[2:], "ids")
    plan = Plan((Rule(("layers.*.o_proj",), Precision(4, 16, method="gptq")),), "o")
    expected = quantize(LLAMA, plan, calibration=windows, dtype="bfloat16", progress=False)
    out = tmp_path / "store"
    returned = quantize(LLAMA, plan, calibration=windows, dtype="bfloat16", out=out, progress=False)
    assert same(returned.params, expected.params)
    assert returned.quantization == load(out, progress=False).quantization == expected.quantization is not None
    assert returned.quantization is not None and returned.quantization.quality is not None
    assert "quality is not measured" not in caplog.text
    again = quantize(load(LLAMA, dtype="bfloat16", progress=False), "int8", out=tmp_path / "loaded")
    assert "loaded: quality is not measured; calibration=" in caplog.text
    assert same(load(tmp_path / "loaded", dtype="bfloat16", progress=False).params, again.params)
    with pytest.raises(FileExistsError):
        quantize(LLAMA, "int8", out=out)


def test_a_model_that_does_not_fit_is_converted_and_quantised(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a store, where only the largest layer, or embedding and head, must fit.

    In bfloat16 a layer has 15,488 bytes, embedding and head 12,352, the model 43,328.
    """
    free = 15_488
    monkeypatch.setattr(checkpoint_weights, "free_device_bytes", lambda: free)
    ids = np.arange(24, dtype=np.int32).reshape(3, 8)
    gptq = Plan((Rule(("layers.*.o_proj",), Precision(4, 16, method="gptq")),), "o")
    for name, write in {
        "converted": lambda out: create(LLAMA, out),
        "rounded": lambda out: write_quantized(LLAMA, Plan((Rule(("*.o_proj",), Precision(8)),)), out),
        "calibrated": lambda out: write_quantized(LLAMA, gptq, out, calibration=Windows(ids[:2], ids[2:], "ids")),
        "again": lambda out: create(tmp_path / "converted", out),
    }.items():
        write(tmp_path / name)
        with pytest.raises(ValueError, match=r"the weights take at least .* are free; load a smaller model"):
            load(tmp_path / name, dtype="bfloat16", progress=False)
    free -= 1
    with pytest.raises(ValueError, match="the largest layer, or embedding and head, take"):
        create(LLAMA, tmp_path / "none")


def test_orbax_restores_it(mixed: pathlib.Path) -> None:
    """The arrays are Orbax's own: its restore gives the same bits as our reads of the chunks."""
    expected = load(mixed, dtype="bfloat16", progress=False).params.layers[0]
    folder = mixed / "weights" / "layer_00000"
    with ocp.PyTreeCheckpointer() as checkpointer:
        names = checkpointer.metadata(folder).item_metadata.tree
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        arrays = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    assert np.asarray(arrays["o.codes"]).tobytes() == np.asarray(expected.o.codes).tobytes()
    assert np.asarray(arrays["qkv.parts.1.codes"]).tobytes() == np.asarray(expected.qkv.parts[1].codes).tobytes()


@pytest.mark.parametrize(
    "kind",
    [
        "gptq act-order", "awq gemm", "gptq 8 bits", "fp8 blocks", "fp8 e5m2 powers of two", "nvfp4", "nvfp4 modelopt",
        "mxfp4", "nf4",
    ],
)  # fmt: skip
def test_codes_of_checkpoints_stay_as_they_are(kind: str, tmp_path: pathlib.Path) -> None:
    case = quantized_checkpoints.make(kind, tmp_path)
    out = create(case.quantized, tmp_path / "store")
    expected, actual = (load(path, dtype="bfloat16", packed=True, progress=False) for path in (case.quantized, out))
    assert same(actual.params, expected.params)
    found = actual.params.layers[0].o
    kinds = {"gptq act-order": PermutedInputs, "gptq 8 bits": PackedInt8}
    assert isinstance(found, BlockCodes if kind.startswith("fp8") else kinds.get(kind, PackedInt4))
    assert getattr(found, "book", None) is not None or ("fp4" not in kind and kind != "nf4")
    decoded, dense = (load(path, dtype="float32", packed=False, progress=False) for path in (out, case.quantized))
    assert same(decoded.params.layers, dense.params.layers)


@pytest.mark.parametrize("family", ["gemma2", "qwen2"])
def test_decoded_it_is_the_model_that_was_stored(family: str, tmp_path: pathlib.Path) -> None:
    """packed=False goes tensor by tensor; norms with an offset have it added once only."""
    folder = families.BY_NAME[family].folder
    out = create(folder, tmp_path / "store", dtype="float32")
    expected = load(folder, dtype="float32", progress=False).params
    assert same(load(out, dtype="float32", progress=False).params, expected)
    assert same(load(out, dtype="float32", packed=False, progress=False).params, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_i3_every_float_is_kept_to_the_bit(dtype: str, tmp_path: pathlib.Path) -> None:
    """Trap I3: through Orbax and our reads of its chunks, arrays of more than 1 MB included."""
    model = load(LLAMA, dtype=dtype, progress=False)
    values = jax.random.bits(jax.random.key(0), (1 << 20,), jnp.uint16 if dtype != "float32" else jnp.uint32)
    bits = jax.lax.bitcast_convert_type(values, jnp.dtype(dtype)).reshape(-1, model.config.hidden_size)
    config = dataclasses.replace(model.config, vocab_size=len(bits))
    params = model.params.replace(embed_tokens=bits, lm_head=bits)
    out = save(Model(config, params, None, model.dtype, model.name), tmp_path / "store")
    assert same(load(out, dtype=dtype, progress=False).params, params)


def test_i9_a_gguf_file_is_stored_as_it_is_loaded(tmp_path: pathlib.Path) -> None:
    """Trap I9: rows of q and k in the model's order."""
    source = gguf_conversion.convert(families.BY_NAME["llama"], tmp_path / "llama.gguf")
    out = create(source, tmp_path / "store", dtype="float32")
    expected, actual = (load(path, dtype="float32", progress=False) for path in (source, out))
    assert same(actual.params, expected.params) and actual.config == expected.config


@pytest.mark.parametrize("kind", ["IQ4_NL", "IQ4_XS"])
def test_code_books_of_a_gguf_file_stay_as_they_are(kind: str, tmp_path: pathlib.Path) -> None:
    """IQ4_XS has blocks of 256 codes: no smaller model has them."""
    model = gguf_models.gguf_model(
        "llama", layers=1, hidden=256, ff=256, heads=2, kv_heads=1, context=64, vocab=64, output=True,
        rope__dimension_count=128,
    )  # fmt: skip
    source = gguf_models.write_packed(tmp_path / "m.gguf", model, kind)
    out = create(source, tmp_path / "store")
    expected, actual = (load(path, dtype="bfloat16", packed=True, progress=False) for path in (source, out))
    assert actual.params.layers[0].down.book is not None
    assert same(actual.params, expected.params)


def test_i1_a_tied_head_that_was_quantised_is_one_of_its_own(tmp_path: pathlib.Path) -> None:
    """Trap I1: in the store, decoded, and in a folder for other engines, whose configuration then unties it."""
    folder = families.BY_NAME["gemma2"].folder
    out = create(folder, tmp_path / "store", dtype="float32", plan=Plan((Rule(("lm_head",), Precision(8)),), "head"))
    head = load(out, dtype="float32", progress=False).params.lm_head
    assert isinstance(head, ScaledCodes)
    values = np.asarray(head.codes, np.float32) * np.asarray(head.scales)[:, None]
    assert not np.array_equal(values, load(folder, dtype="float32", progress=False).params.embed_tokens)
    decoded = load(out, dtype="float32", packed=False, progress=False).params.lm_head
    exported = export(out, tmp_path / "folder", progress=False)
    assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"] is False
    for found in (decoded, load(exported, dtype="float32", progress=False).params.lm_head):
        np.testing.assert_array_equal(found, values)


def test_it_is_quantised_like_any_checkpoint(tmp_path: pathlib.Path) -> None:
    out = create(LLAMA, tmp_path / "store", dtype="float32")
    expected = load(LLAMA, dtype="float32", quantize="int8", progress=False)
    assert same(load(out, dtype="float32", quantize="int8", progress=False).params, expected.params)


def test_decoded_codes_are_their_values(mixed: pathlib.Path) -> None:
    """Symmetric codes, minima, and int8 rows of a weight of several kinds."""
    packed, decoded = (load(mixed, dtype="float32", packed=p, progress=False).params.layers[1] for p in (True, False))
    np.testing.assert_array_equal(decoded.o, dequantize(packed.o))
    np.testing.assert_array_equal(decoded.down, dequantize(packed.down))
    codes, scales = packed.qkv.parts[1].codes, packed.qkv.parts[1].scales
    np.testing.assert_array_equal(
        decoded.qkv[-len(scales) :], np.asarray(codes, np.float32) * np.asarray(scales)[:, None]
    )


def test_a_store_of_a_store_and_of_a_loaded_model(mixed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    again = create(mixed, tmp_path / "again")
    assert reader.Store(again).manifest.plan == reader.Store(mixed).manifest.plan
    expected = load(mixed, dtype="bfloat16", progress=False)
    assert same(load(again, dtype="bfloat16", progress=False).params, expected.params)
    saved = save(expected, tmp_path / "saved", plan=MIXED, quality={"perplexity": 9.0})
    assert same(load(saved, dtype="bfloat16", progress=False).params, expected.params)
    assert reader.Store(saved).manifest.quality == {"perplexity": 9.0}


def test_what_is_rounded_unasked_is_said(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A store of a float32 store is float32; one of a float32 checkpoint is bfloat16, and says so."""
    first = create(LLAMA, tmp_path / "float32", dtype="float32")
    assert inspect(create(first, tmp_path / "again"), progress=False).tensors["embed_tokens.weight"].dtype == "float32"
    assert not caplog.records
    create(families.BY_NAME["llama_sharded"].folder, tmp_path / "rounded")
    assert "weights that are F32 are written as bfloat16; dtype (--dtype) keeps another" in caplog.text


def test_the_tokenizer_of_a_folder_comes_along(tmp_path: pathlib.Path) -> None:
    folder = markov.save(tmp_path / "m", markov.chain(0, 1, markov.EOS))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    out = create(folder, tmp_path / "store")
    expected, actual = tokenizer_from_folder(folder), load(out, progress=False).tokenizer
    assert expected is not None and actual is not None
    assert actual.backend.to_str() == expected.backend.to_str()
    assert actual.chat_template == "{{ messages[0].content }}"
    assert (actual.bos_token_id, actual.eos_token_ids) == (expected.bos_token_id, expected.eos_token_ids)
    (out / "original" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no original/tokenizer\.json; the store is incomplete"):
        load(out, progress=False)


def test_the_tokenizer_of_a_gguf_file_comes_along(tmp_path: pathlib.Path) -> None:
    metadata = gguf_metadata("llama-bpe", **{"tokenizer.chat_template": "{{ messages[0].content }}"})
    model = load(LLAMA, dtype="bfloat16", progress=False)
    files = {"gguf.json": reader.gguf_metadata(metadata)}
    with StoreWriter(tmp_path / "store", model.config, model.dtype, model="m", files=files) as store:
        store.write_all(model_pieces(model))
    expected, actual = tokenizer_from_gguf(metadata), reader.Store(store.path).tokenizer()
    assert expected is not None and actual is not None
    assert actual.backend.to_str() == expected.backend.to_str()
    assert (actual.chat_template, actual.eos_token_ids) == (expected.chat_template, expected.eos_token_ids)


# --- Other devices and other versions of the layouts


@pytest.mark.parametrize("arrange", [to_mosaic, to_triton])
def test_what_was_laid_out_for_another_kernel_is_repacked_with_a_notice(
    arrange: Callable[[PackedInt4], PackedInt4], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Plan((Rule(("*.o_proj",), Precision(4, 16)),))
    model = load(LLAMA, dtype="bfloat16", quantize=plan, progress=False)
    foreign = jax.tree.map(
        lambda leaf: arrange(jax.tree.map(np.asarray, leaf)) if isinstance(leaf, PackedInt4) else leaf,
        model.params,
        is_leaf=lambda leaf: isinstance(leaf, PackedInt4),
    )
    out = save(Model(model.config, foreign, None, model.dtype, model.name), tmp_path / "store")
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        actual = load(out, dtype="bfloat16", progress=False)
    assert same(actual.params, model.params)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "2 weights are repacked for this device each time it is loaded, from layout" in message
    decoded = load(out, dtype="float32", packed=False, progress=False).params.layers[0].o
    np.testing.assert_array_equal(decoded, dequantize(model.params.layers[0].o))


def test_codes_of_8_bits_for_another_kernel_are_repacked(tmp_path: pathlib.Path) -> None:
    case = quantized_checkpoints.make("gptq 8 bits", tmp_path)
    model = load(case.quantized, dtype="bfloat16", packed=True, progress=False)
    layer = model.params.layers[0]
    foreign = model.params.replace(layers=[layer.replace(o=int8_to_mosaic(jax.tree.map(np.asarray, layer.o)))])
    out = save(Model(model.config, foreign, None, model.dtype, model.name), tmp_path / "store")
    assert same(load(out, dtype="bfloat16", progress=False).params, model.params)


def test_an_older_layout_is_repacked_by_what_undid_it(
    mixed: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(mixed, dtype="bfloat16", progress=False)
    monkeypatch.setitem(layouts.LAYOUT_VERSIONS, "canonical", 2)
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        assert same(load(mixed, dtype="bfloat16", progress=False).params, expected.params)
    assert "from layout canonical 1 to canonical 2" in caplog.text


def test_a_layout_of_the_future_is_refused(copy: pathlib.Path) -> None:
    text = (copy / MANIFEST).read_text()
    write_signed(copy / MANIFEST, json.loads(text.replace('"layout_version": 1', '"layout_version": 7')))
    with pytest.raises(CheckpointError, match="version 7 of the canonical layout, which this version"):
        load(copy, progress=False)


# --- Written whole or not at all


def test_what_is_there_is_not_overwritten(mixed: pathlib.Path) -> None:
    with pytest.raises(FileExistsError, match="exists already; remove it, or write to another path"):
        create(LLAMA, mixed)


def test_a_plan_that_names_no_weight_is_refused_before_anything_is_written(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "jaxinfer"),
        pytest.raises(ValueError, match=r"no weight is named \*\.foo_proj"),
    ):
        create(LLAMA, tmp_path / "new" / "store", plan=Plan((Rule(("*.foo_proj",), Precision(8)),), "wrong"))
    assert not caplog.messages and not any(tmp_path.iterdir())


@pytest.mark.parametrize("error", [RuntimeError("out of disk"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_nothing_and_says_so(
    error: BaseException, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(LLAMA, dtype="bfloat16", progress=False)

    def pieces() -> Iterator[Piece]:
        yield "layer_00000", {"qkv": model.params.layers[0].qkv}
        assert len(list(tmp_path.rglob("0.0"))) == 1  # it is on its way
        raise error

    with (
        caplog.at_level(logging.WARNING, "jaxinfer"),
        pytest.raises(type(error)),
        StoreWriter(tmp_path / "store", model.config, model.dtype, model="m") as store,
    ):
        store.write_all(pieces())
    assert not any(tmp_path.iterdir())
    assert "not written; what had been begun of it is removed" in caplog.text


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [ValueError("RESOURCE_EXHAUSTED: file 8: ... [os_error_code='28']"), NO_SPACE, None])
def test_a_disk_that_is_full_is_one_line(
    error: Exception | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Found out by TensorStore, by Orbax, or before either writes."""

    def save(*_: object, **__: object) -> None:
        assert error is not None
        raise error

    monkeypatch.setattr(ocp.Checkpointer, "save", save)
    free = 10**9 if error is not None else 2000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(total=10**9, free=free))
    out = tmp_path / "store"
    assert main(["convert", str(LLAMA), str(out), "--quiet"]) == 1
    assert capsys.readouterr().err == f"error: {out}: No space left on device\n"
    assert not any(tmp_path.iterdir())


def test_the_number_of_an_error_that_tensorstore_passes_on(tmp_path: pathlib.Path) -> None:
    """A real one: no file may have more than 600 bytes."""
    folder = tensorstore.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        with pytest.raises(ValueError, match="File too large") as caught:
            folder.write("file", bytes(1000)).result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os_error_number(caught.value) == errno.EFBIG
    assert os_error_number(ValueError("another")) is None


@pytest.mark.parametrize("name", [None, "jaxinfer.json"])
def test_a_disk_that_is_full_is_named_by_what_is_written(name: str | None, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "store"
    with pytest.raises(OSError, match="No space left on device") as caught, written_whole(out):
        raise OSError(*NO_SPACE.args, name)
    assert caught.value.filename == str(out)
    with pytest.raises(FileNotFoundError) as missing, written_whole(out):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "model.safetensors")
    assert missing.value.filename == "model.safetensors"
    assert not any(tmp_path.iterdir())


def test_a_write_that_lacks_a_layer_is_no_store(tmp_path: pathlib.Path) -> None:
    model = load(LLAMA, dtype="bfloat16", progress=False)
    with (
        pytest.raises(CheckpointError, match="differ in layer_00000"),
        StoreWriter(tmp_path / "store", model.config, model.dtype, model="m") as store,
    ):
        store.write("top", {"embed_tokens": model.params.embed_tokens})
    assert not any(tmp_path.iterdir())


KILLED = """
import logging, sys, time
from jaxinfer.model import load
from jaxinfer.store.writer import StoreWriter

model = load(sys.argv[1], progress=False)
assert "orbax" not in sys.modules
with StoreWriter(sys.argv[2], model.config, model.dtype, model="m") as store:
    store.write("layer_00000", {"qkv": model.params.layers[0].qkv})
    assert "orbax" in sys.modules and not logging.root.handlers  # the program's logging.basicConfig does something yet
    print("written", flush=True)
    time.sleep(600)
"""


def test_a_killed_write_is_told_of_and_cleared_away(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """While the process lives nobody else writes the store; when it is gone the next write removes what it left."""
    out = tmp_path / "store"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(LLAMA), str(out)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        with pytest.raises(FileExistsError, match=r"store is being written by another process \(store.unfinished-"):
            create(LLAMA, out)
        (unfinished,) = tmp_path.glob("store.unfinished-*")
        process.send_signal(signal.SIGKILL)
    with pytest.raises(FileNotFoundError, match=r"store: its write was interrupted or still runs \(store.unfinished-"):
        load(out, progress=False)
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        create(LLAMA, out)
    assert "an earlier write was interrupted; removed what it had left" in caplog.text
    assert not unfinished.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_what_somebody_else_calls_unfinished_is_left_alone(tmp_path: pathlib.Path) -> None:
    """Only folders that a write of ours has marked are removed; links are not followed."""
    thesis, victim = tmp_path / "store.unfinished-thesis", tmp_path / "victim"
    thesis.mkdir()
    (thesis / "thesis.txt").write_text("years of work")
    victim.mkdir()
    (victim / "lock").touch()
    (victim / "jaxinfer-writes-here").touch()
    (tmp_path / "store.unfinished-link").symlink_to(victim)
    with written_whole(tmp_path / "store") as folder:
        (folder / "content").touch()
    assert (thesis / "thesis.txt").read_text() == "years of work"
    assert len(list(victim.iterdir())) == 2
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["content"]
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="dangling exists already"), written_whole(tmp_path / "dangling"):
        pass


# --- Damaged and hostile stores


def write_signed(path: pathlib.Path, content: dict[str, Any]) -> None:
    """A manifest of somebody who computes its checksum too."""
    path.write_text(json.dumps(content | {"checksum": own_checksum(content)}))


def edit(path: pathlib.Path, *keys: Any, value: Any) -> None:
    """Changes one value of a JSON file; a manifest's checksum fits."""
    content = json.loads(path.read_text())
    target = content
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    if path.name == MANIFEST:
        write_signed(path, content)
    else:
        path.write_text(json.dumps(content))


def without_checksums(store: pathlib.Path) -> None:
    """As they were written before there were any: other checks are all there is."""
    content = json.loads((store / MANIFEST).read_text())
    del content["checksums"], content["checksum"]
    (store / MANIFEST).write_text(json.dumps(content | {"version": 1}))


def flip(file: pathlib.Path, position: int, bit: int = 0) -> None:
    """Changes one bit."""
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


QKV = ("weights", "layer_00001", "qkv", "parts", 0)
HOSTILE = {
    "format": (("format",), "zip", "is not that of a store"),
    "version": (("version",), 99, "has version 99, this version of jaxinfer reads 1 and 2; update jaxinfer"),
    "dtype": (("dtype",), "object", "dtype is 'object', not"),
    "plan": (("plan",), [1], r"plan is \[1\], not dict"),
    "config field": (("config", "hidden_size"), "32", r"config\.hidden_size is '32', not int"),
    "config size": (("config", "num_heads"), -4, "config has an impossible num_heads"),
    "config unknown": (("config", "auto_map"), "evil.py", "not an object with the fields of ModelConfig"),
    "config float": (("config", "norm_eps"), float("nan"), r"config\.norm_eps is nan, not float"),
    "huge float": (("config", "norm_eps"), 10**400, r"config\.norm_eps is 1000"),
    "kv heads": (("config", "num_kv_heads"), 3, "config has an impossible num_kv_heads"),
    "layers": (("config", "layers"), [], "config has an impossible layers"),
    "wider": (("config", "intermediate_size"), 64, r"gate_up has .* the configuration asks for"),
    "kind": ((*QKV, "kind"), "os.system", "which this version of jaxinfer does not know"),
    "group": ((*QKV, "group_size"), 0, "codes have no shape or no group size"),
    "other group": ((*QKV, "group_size"), 8, "the arrays of layout canonical do not fit"),
    "layout": ((*QKV, "layout"), "cute", "there is no layout 'cute'"),
    "layout of another type": ((*QKV, "layout"), {}, "there is no layout '{}'"),
    "no array": ((*QKV, "offsets"), [], "offsets or book are no arrays"),
    "window": (("config", "layers", 0, "window"), 2**31, "config has an impossible layers.window"),
    "codes": ((*QKV, "codes", "shape"), [48, 17], "the arrays of layout canonical do not fit"),
    "negative": ((*QKV, "codes", "shape"), [-48, 16], "an array has no shape of a weight"),
    "array dtype": ((*QKV, "scales", "dtype"), "complex64", "an array has no dtype of a weight"),
    "array": (("weights", "layer_00000", "attn_norm"), [], "attn_norm is not an object|a weight is not an object"),
    "norm": (("weights", "layer_00000", "attn_norm", "shape"), [16], r"has float32 \[16\], the configuration asks"),
    "layer": (("weights", "layer_00002"), {}, "the configuration and the weights differ in layer_00002"),
    "escape": (("files", "../../etc/passwd"), 1, "names the file '../../etc/passwd'"),
    "absolute": (("files", "/etc/passwd"), 1, "names the file '/etc/passwd'"),
    "lost file": (("files", "original/tokenizer.json"), 1, r"has no original/tokenizer\.json"),
    "size": (("files", "original/config.json"), 1, "bytes, not the 1 that were written"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused_in_one_line(case: str, copy: pathlib.Path) -> None:
    keys, value, message = HOSTILE[case]
    edit(copy / MANIFEST, *keys, value=value)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(copy, progress=False)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"format": "jaxinfer-store", "version": 1}'])
def test_a_manifest_that_is_none_is_refused(content: bytes, copy: pathlib.Path) -> None:
    (copy / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(copy, progress=False)
    assert "\n" not in str(caught.value)


def test_a_manifest_that_says_other_things_than_were_written_is_refused(copy: pathlib.Path) -> None:
    """Numbers that fit, such as another epsilon, and a bit anywhere; a report that was added belongs to it."""
    add_quality(copy, {"perplexity": 11.5, "of": {"3": [1e-7, True, None]}})
    path = copy / MANIFEST
    sound = path.read_bytes()
    read_manifest(copy)
    for old, new in ((b'"norm_eps": 1e-05', b'"norm_eps": 1e-06'), (b'"theta": 10000.0', b'"theta": 50000.0')):
        assert old in sound
        path.write_bytes(sound.replace(old, new))
        with pytest.raises(CheckpointError, match=r"jaxinfer\.json says other things than were written"):
            load(copy, progress=False)
    path.write_bytes(sound)
    for position in range(0, len(sound), 41):
        flip(path, position)
        with pytest.raises(CheckpointError):
            read_manifest(copy)
        flip(path, position)


@pytest.mark.parametrize("lost", [["checksums"], ["checksum"], ["checksum", "checksums"]])
def test_checksums_are_missed(lost: list[str], copy: pathlib.Path) -> None:
    """But in version 1, which had none at first: see `without_checksums`."""
    content = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({key: value for key, value in content.items() if key not in lost}))
    with pytest.raises(CheckpointError, match=rf"has no {' and no '.join(lost)}; the store is damaged"):
        load(copy, progress=False)
    write_signed(copy / MANIFEST, content | {"checksums": {}})
    with pytest.raises(CheckpointError, match="has no checksums; the store is damaged"):
        load(copy, progress=False)


def test_a_store_of_version_1_is_read_and_stays_one(copy: pathlib.Path) -> None:
    """With checksums of arrays and files, none of the manifest; a report that is added brings that."""
    content = json.loads((copy / MANIFEST).read_text())
    del content["checksum"]
    (copy / MANIFEST).write_text(json.dumps(content | {"version": 1}))
    load(copy, progress=False)
    add_quality(copy, {"perplexity": 9.0})
    content = json.loads((copy / MANIFEST).read_text())
    assert content["version"] == 1 and content["checksum"] == own_checksum(content)
    flip(copy / "weights" / "top" / "norm" / "0", 0)
    with pytest.raises(CheckpointError, match="has other bytes than were written"):
        load(copy, progress=False)


def test_a_store_without_its_manifest_is_told_so(copy: pathlib.Path) -> None:
    (copy / MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match=r"a store without its jaxinfer.json; copy the whole store, or write"):
        load(copy, progress=False)


ARRAY = pathlib.Path("weights") / "layer_00001" / "o.codes"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: os.truncate(a / "0.0", 100), r"0\.0 has 100 of 512 bytes; the store is damaged"),
        (lambda a: (a / "0.0").unlink(), r"cannot be read: No such file"),
        (lambda a: shutil.rmtree(a), r"cannot be read: No such file"),
        (lambda a: (a / ".zarray").write_text("}"), r"\.zarray is not JSON"),
        (lambda a: (a / ".zarray").write_text("[" * 3000), r"\.zarray is not JSON"),
        (lambda a: (a / ".zarray").write_text("[]"), r"\.zarray: zarr_format is \[\], expected 2"),
        (lambda a: edit(a / ".zarray", "shape", value=[1, 1]), r"shape is \[1, 1\], expected \[32, 16\]"),
        (lambda a: edit(a / ".zarray", "compressor", value={"id": "zlib"}), "compressor is {'id': 'zlib'}"),
        (lambda a: edit(a / ".zarray", "filters", value=[{"id": "pickle"}]), r"filters is \[{'id': 'pickle'}\]"),
        (lambda a: edit(a / ".zarray", "dtype", value="|O"), r"dtype is '\|O', expected \|u1"),
        (lambda a: ((a / "0.0").unlink(), os.mkfifo(a / "0.0")), "is not a regular file"),
    ],
)
def test_damaged_arrays_are_refused_in_one_line(
    damage: Callable[[pathlib.Path], object], message: str, copy: pathlib.Path
) -> None:
    damage(copy / ARRAY)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(copy, progress=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("array", ["layer_00001/o.codes/0.0", "layer_00000/qkv.parts.1.scales/0", "top/norm/0"])
def test_a_flipped_bit_is_found_and_its_array_named(array: str, copy: pathlib.Path) -> None:
    """While loading, packed or decoded, and while converting; a store of before checksums is read as it is."""
    flip(copy / "weights" / array, -1)
    message = rf"weights/{array}: the array has other bytes than were written"
    for packed in (None, False):
        with pytest.raises(CheckpointError, match=message):
            load(copy, packed=packed, progress=False)
    with pytest.raises(CheckpointError, match=message):
        export(copy, copy.parent / "out", progress=False)
    without_checksums(copy)
    load(copy, progress=False)


def test_a_flipped_bit_in_the_models_own_files_is_found(copy: pathlib.Path) -> None:
    flip(copy / "original" / "config.json", 30)
    with pytest.raises(CheckpointError, match=r"original/config\.json has other bytes than were written"):
        load(copy, progress=False)


def test_an_array_without_a_checksum_beside_others_that_have_one(copy: pathlib.Path) -> None:
    content = json.loads((copy / MANIFEST).read_text())
    del content["checksums"]["weights/layer_00001/o.codes"]
    write_signed(copy / MANIFEST, content)
    with pytest.raises(CheckpointError, match=r"has no checksum of weights/layer_00001/o\.codes"):
        load(copy, progress=False)


def test_checksums(rng: np.random.Generator) -> None:
    """By their definition, one word after the other; a bit anywhere, words and pages that changed places."""
    size = 2**22
    data = rng.integers(0, 256, size + 4072 * 3 + 11, dtype=np.uint8)
    digests = []
    for start in range(0, len(data), size):
        block = data[start : start + size].tobytes()
        rows = len(block) // 4072
        sums = [0] * 509
        for number in range(rows * 509):
            sums[number % 509] += int.from_bytes(block[8 * number : 8 * number + 8], "little")
        columns = b"".join((total % 2**64).to_bytes(8, "little") for total in sums)
        digests.append(hashlib.blake2b(columns + block[4072 * rows :], digest_size=8).digest())
    expected = hashlib.blake2b(b"".join(digests), digest_size=8).hexdigest()
    assert checksums.checksum(data) == checksums.checksum(data.tobytes()) == expected
    for position in (0, 4071, 4072, size - 1, size, len(data) - 12, len(data) - 1):
        for bit in (0, 7):
            changed = data.copy()
            changed[position] ^= 1 << bit
            assert checksums.checksum(changed) != expected
    for length in (8, 512, 4096, 8192, 2**20):  # neighbours change places
        changed = data.copy()
        changed[:length], changed[length : 2 * length] = data[length : 2 * length], data[:length]
        assert checksums.checksum(changed) != expected
    assert checksums.checksum(b"") == checksums.checksum(np.zeros((0, 4), np.float32)) != checksums.checksum(b"\0")


def test_an_order_of_inputs_that_leads_outside_is_refused(tmp_path: pathlib.Path) -> None:
    """The device gathers x by it without looking."""
    case = quantized_checkpoints.make("gptq act-order", tmp_path)
    out = create(case.quantized, tmp_path / "store")
    chunk = out / "weights" / "layer_00000" / "o.permutation" / "0"
    without_checksums(out)
    order = np.fromfile(chunk, np.int32)
    order[3] = 1 << 30
    order.tofile(chunk)
    with pytest.raises(CheckpointError, match="the order of the inputs is none"):
        load(out, progress=False)


@pytest.mark.parametrize("array", ["attn_norm/0", "o.scales/0.0", "qkv.parts.1.scales/0"])
def test_scales_and_norms_that_are_no_numbers_are_refused(array: str, copy: pathlib.Path) -> None:
    chunk = copy / "weights" / "layer_00001" / array
    assert chunk.exists()
    without_checksums(copy)
    chunk.write_bytes(b"\xff" * chunk.stat().st_size)
    with pytest.raises(CheckpointError, match=r"layer_00001\.\w+ holds NaN or infinity; the store is damaged"):
        load(copy, progress=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_that_are_finite(dtype: str) -> None:
    """The largest, the smallest and zeros are; one that is not is found wherever it is."""
    largest = jnp.finfo(dtype).max
    numbers = np.tile(np.array([largest, -largest, jnp.finfo(dtype).smallest_subnormal, 0.0, -0.0], dtype), 30_000)
    assert reader.is_finite(numbers) and reader.is_finite(numbers.reshape(3, -1)) and reader.is_finite(numbers[:0])
    for place, value in itertools.product((0, 2**16, -1), (np.nan, np.inf, -np.inf)):
        changed = numbers.copy()
        changed[place] = value
        assert not reader.is_finite(changed)


def test_inspect_lists_what_is_packed(mixed: pathlib.Path) -> None:
    found = inspect(mixed, progress=False)
    assert found.mismatch is not None and not found.mismatch
    assert found.tensors["layers.1.q_proj.weight"].dtype == "int4, groups of 16"
    assert found.tensors["layers.1.v_proj.weight"].dtype == "int8 codes"
    assert found.tensors["layers.0.gate_proj.weight"].dtype == "bfloat16"
    # 32 outputs of 32 codes of 4 bits, 2 groups each of a float16 scale and a byte for the zero.
    assert found.tensors["layers.1.q_proj.weight"].nbytes == 32 * (16 + 2 * 3)


def test_a_value_that_float16_cannot_hold_is_refused(tmp_path: pathlib.Path) -> None:
    model = load(LLAMA, dtype="float32", progress=False)
    params = jax.tree.map(lambda leaf: leaf, model.params)
    params = params.replace(embed_tokens=params.embed_tokens.at[0, 0].set(jnp.float32(1e6)))
    out = save(Model(model.config, params, None, model.dtype, model.name), tmp_path / "store")
    with pytest.raises(CheckpointError, match="embed_tokens has values beyond float16's 65504"):
        load(out, dtype="float16", progress=False)


def test_a_store_below_a_file_is_refused_by_both_their_names(tmp_path: pathlib.Path) -> None:
    (tmp_path / "book.txt").write_text("words")
    names = r"book.txt/store cannot be made: .*book.txt is a file; write to another path"
    with pytest.raises(FileExistsError, match=names), written_whole(tmp_path / "book.txt" / "store"):
        pass

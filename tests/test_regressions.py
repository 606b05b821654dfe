"""Inputs that once ended in a traceback, a hang or a wrong result, found by attacking the library from outside."""

import functools
import importlib
import inspect
import io
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import jaxtyping
import markov
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

import jaxinfer.cli
from checkpoints.safetensors import read_json
from jaxinfer.batch import Limits, plan_prefill
from jaxinfer.compilation import enable_persistent_cache
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.engine.engine import Engine
from jaxinfer.generation import _groups, generate, requests_for, stream
from jaxinfer.model import Model, load
from jaxinfer.params import least_bytes, num_parameters
from jaxinfer.quantization.api import quantize
from jaxinfer.request import encode_prompt, list_prompts, per_prompt
from jaxinfer.sampling_logprobs import logprob_tables, token_logprobs
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sampling_state import SamplerVariant
from jaxinfer.scoring import perplexity, token_ids
from jaxinfer.tokenization import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from jaxinfer.tokenization.chat_template import render

ABC = markov.model(markov.chain(0, 1, 2, 3))
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)

# --- Tokenizers


@pytest.mark.parametrize(
    ("text", "message"),
    [("A\ud800", "not Unicode: character 1"), ("A\udcff", "not UTF-8"), ("A|\0", "cannot encode this text")],
)
def test_a_text_that_cannot_be_encoded_is_refused(text: str, message: str):
    """Command-line arguments and JSON can hold half a surrogate pair."""
    with pytest.raises(ValueError, match=message):
        generate(ABC, text, GREEDY)


def test_wrong_types_of_texts_ids_and_messages_are_one_line():
    """Lists where one text is meant, ids as text, a message that is not in a list, arrays that hold nothing."""
    tokenizer = ABC.tokenizer
    assert tokenizer is not None
    encode, decode = inspect.unwrap(Tokenizer.encode), inspect.unwrap(Tokenizer.decode_bytes)
    chat, hello = inspect.unwrap(Tokenizer.render_chat), {"role": "user", "content": "Hello"}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = inspect.unwrap(render)
    scalar = jnp.asarray(1)
    for call, message in (
        (lambda: encode(tokenizer, ["A", "A"]), r"the text is \['A', 'A'\]; expected a string, one at a time"),
        (lambda: decode(tokenizer, "AB"), "the token ids are 'AB'; expected a list of integers"),
        (lambda: decode(tokenizer, [1.5]), r"the token ids are \[1.5\]; expected a list of integers"),
        (lambda: decode(tokenizer, 5), "the token ids are 5; expected a list of integers"),
        (lambda: messages(template, hello, add_generation_prompt=True), "messages is {'content.*; expected a list of"),
        (lambda: messages(template, None, add_generation_prompt=True), "messages is None; expected a list of"),
        (lambda: chat(tokenizer, [hello], chat_template=5), "chat_template=5; expected a template or the name of one"),
        (
            lambda: SamplingParams.from_dict({"stop": scalar}),
            "stop is Array.*; expected a string or a sequence of strings",
        ),
        (
            lambda: SamplingParams.from_dict({"stop_token_ids": scalar}),
            "stop_token_ids is Array.*; expected a sequence of token ids",
        ),
        (lambda: per_prompt(scalar, 1), "params is Array.*; expected a SamplingParams or a list"),
        (lambda: token_ids(ABC, np.float32(1.5), "the text"), "the text is np.float32.*; expected text or a list of"),
        (lambda: inspect.unwrap(Engine.__init__)(object.__new__(Engine), ABC, {}), "config={}; expected a jaxinfer.En"),
        (lambda: quantize(ABC, "int5"), "plan='int5': expected int4, .*, or the path of a .toml file"),
        (lambda: inspect.unwrap(perplexity)(ABC, [0, 1, 2], stride=True), "stride=True; expected an integer from 1"),
        (lambda: inspect.unwrap(generate)(ABC, [0], GREEDY, max_batch_size=True), "max_batch_size=True; expected an"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_template_that_names_a_token_it_lacks_is_refused(tmp_path: pathlib.Path):
    """`tokenizers` reads such a file, and its Rust code panics at the first text."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "1": 2, ".": 3}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    file = json.loads(backend.to_str())
    file["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match="the tokenizer is damaged"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": ["x"], "template": "x"}]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x", "template": 5}]}'),
        ("tokenizer_config.json", "[" * 100_000),
        ("added_tokens.json", "[" * 100_000),
    ],
)
def test_tokenizer_files_of_the_wrong_shape_are_refused(tmp_path: pathlib.Path, name: str, content: str):
    markov.save(tmp_path, {})
    (tmp_path / name).write_text(content)
    if name == "added_tokens.json":  # read beside tokenizer.model alone
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x03\x0a\x01a\x12\x02\x18\x02")
    with pytest.raises(ValueError, match=r"tokens|template|JSON"):
        tokenizer_from_folder(tmp_path)


def test_a_text_config_that_is_no_object_names_no_stop_ids(tmp_path: pathlib.Path):
    markov.save(tmp_path, {})
    (tmp_path / "config.json").write_text('{"text_config": "x", "eos_token_id": 5}')
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer is not None and tokenizer.eos_token_ids == (markov.EOS, 5)


def test_a_chat_template_that_is_not_utf8_is_named(tmp_path: pathlib.Path):
    markov.save(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template.jinja is not UTF-8"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", ["llama"]),
        ("pre", ["llama-bpe"]),
        ("tokens", 5),
        ("tokens", [[1], [2]]),
        ("token_type", True),
        ("token_type", [float("inf"), 1]),
        ("scores", [["x"], ["y"]]),
        ("merges", [1.5]),
        ("merges", "a b"),
        ("precompiled_charsmap", 1),
        ("padding_token_id", float("inf")),
        ("unknown_token_id", [0]),
    ],
)
def test_gguf_tokenizer_keys_of_the_wrong_type_are_refused(model: str, key: str, value: object):
    keys = {"model": model, "tokens": ["a", "b"], "scores": [0.0, -1.0], "merges": [], "token_type": [1, 1]}
    metadata = {f"tokenizer.ggml.{name}": kept for name, kept in (keys | {key: value}).items()}
    with pytest.raises(ValueError, match=f"tokenizer.ggml.{key}"):
        tokenizer_from_gguf(metadata)


def test_a_json_file_that_is_a_device_is_refused(tmp_path: pathlib.Path):
    """A link to /dev/zero has no size, and reading it never ends."""
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="is not a file"):
        read_json(tmp_path, "config.json")


# --- Configurations


@pytest.mark.parametrize("mscale", ["x", [1.0], float("nan"), -7.213475204444817])
def test_yarn_s_mscale_is_a_number_that_can_be_used(mscale: object):
    """With the last one and factor 4 the attention factor was a division by zero."""
    rope = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": mscale}
    with pytest.raises(ValueError, match=r"rope_scaling: mscale_all_dim is .*; expected a positive number"):
        from_hugging_face(markov.CONFIG | {"rope_scaling": rope})
    (layer,) = from_hugging_face(markov.CONFIG | {"rope_scaling": rope | {"mscale_all_dim": 0}}).layers
    assert layer.rope is not None and layer.rope.attention_factor > 1


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": "x" * 10**6},
        {"model_type": "x" * 10**6},
        {"hidden_act": "x" * 10**6},
        {"layer_types": ["x" * 10**6]},
        {"eos_token_id": ["x" * 10**6]},
        {"rope_scaling": {"rope_type": "x" * 10**6, "factor": 2.0}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_messages_do_not_quote_a_megabyte(fields: dict):
    with pytest.raises(ValueError, match=next(iter(fields)).replace("rope_scaling", "rope_type")) as caught:
        from_hugging_face(markov.CONFIG | fields)
    assert len(str(caught.value)) < 500


# --- Prompts and parameters


@pytest.mark.parametrize(
    "prompts",
    [None, 3, 2.5, b"AB", bytearray(b"A"), memoryview(b"A"), {"prompt": [0]}, {0, 1}, np.array(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_holds_no_prompts_is_refused(prompts: object):
    with pytest.raises(ValueError, match=r"prompts is .*; expected a string, a list of token ids, or a list of either"):
        list_prompts(prompts)


@pytest.mark.parametrize(
    "prompt", [None, 2.5, b"AB", {"prompt": [0]}, [0.5], [None], [[0]], np.array([0.0]), [np.bool_(True)], [True]]
)
def test_what_is_no_prompt_is_refused(prompt: object):
    with pytest.raises(ValueError, match=r"prompt 7 .*a prompt is a string or a list of int token ids"):
        encode_prompt(ABC, prompt, 7)


@pytest.mark.parametrize(
    "prompts",
    [
        (ids for ids in ([0], [1])),
        iter(["A", "BC"]),
        jnp.array([[0], [1]], jnp.int32),
        [jnp.array([0], jnp.int32), np.array([1], np.uint8)],
        np.array(["A", "BC"]),
    ],
    ids=["generator", "iterator", "jax", "arrays", "strings"],
)
def test_prompts_may_come_from_any_iterable_or_array(prompts):
    assert [output.token_ids for output in generate(ABC, prompts, GREEDY)] == [(1, 2, 3), (2, 3, markov.END)]


def test_a_jax_array_of_ids_is_one_prompt():
    (output,) = generate(ABC, jnp.array([0, 1], jnp.int32), GREEDY)
    assert output.prompt_token_ids == (0, 1)


@pytest.mark.parametrize("params", [3, "x", {"max_tokens": 2}, [None], [{}], SamplingParams])
def test_what_is_no_sampling_params_is_refused(params: object):
    with pytest.raises(ValueError, match=r"params (is|holds) .*; expected"):
        per_prompt(params, 1)


@pytest.mark.parametrize("fields", [{"temperature": 10**400}, {"top_p": 10**400}, {"logit_bias": {1: 10**400}}])
def test_numbers_beyond_float64_are_out_of_range(fields: dict):
    with pytest.raises(ValueError, match="expected a number in"):
        SamplingParams(**fields)


def test_forbidding_the_whole_vocabulary_is_refused():
    """All logits would be -inf, which would be reported as a model whose logits are not finite."""
    everything = range(markov.VOCAB - 1)  # and the end of text, which min_tokens forbids too
    with pytest.raises(ValueError, match=r"min_tokens=2 forbids .* are the whole vocabulary"):
        generate(ABC, [[0]], SamplingParams(min_tokens=2, stop_token_ids=everything))
    (output,) = generate(ABC, [[0]], SamplingParams(min_tokens=2, stop_token_ids=range(markov.VOCAB - 2)))
    assert output.token_ids[:2] == (markov.END,) * 2


def test_a_stop_string_completed_by_the_flush_is_a_stop():
    """The bytes cut off by max_tokens become U+FFFD, which a stop string may hold."""
    model = markov.model(markov.chain(0, 1), tokenizer=markov.byte_tokenizer([b"a", b"b\xe2\x82"]))
    params = SamplingParams(max_tokens=1, temperature=0.0, stop="b\ufffd")
    (output,) = generate(model, [[0]], params)
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "b\ufffd")
    (delta,) = stream(model, [[0]], params)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", "b\ufffd")


def test_planning_ten_thousand_rows_takes_no_time():
    """Once quadratic twice over: half a minute for one batch of 16384."""
    start = time.process_time()
    groups = plan_prefill([1 + row % 7 for row in range(4096)], Limits(512, 1024, 4))
    requests = requests_for(ABC, [[0]], SamplingParams(max_tokens=1, n=10_000))
    (batch,) = _groups(ABC, requests, 10_000)
    assert sum(len(group.rows) for group in groups) == 4096 and len(batch) == 10_000
    assert time.process_time() - start < 10


def test_a_table_of_the_whole_vocabulary_takes_no_time():
    """Ranks were searched for from the start each time: 25 s a token with 50,000 tokens."""
    size = 50_000
    logits = jnp.repeat(jnp.arange(size // 2, dtype=jnp.float32), 2)[None, :] / size
    scores = token_logprobs(logits, jnp.zeros(1, jnp.int32), size, size)
    start = time.perf_counter()
    (table,) = logprob_tables([0], scores, size)
    assert time.perf_counter() - start < 2
    assert len(table) == size
    assert [score.rank for score in list(table.values())[1:6]] == [1, 1, 3, 3, 5]  # 0, the token itself, comes first
    assert table[0].rank == size - 1


@functools.cache
def flat() -> Model:
    """Nearly uniform, so that options show."""
    return markov.model(markov.chain(*range(11), markov.EOS), scale=0.02)


IDS = st.integers(0, markov.VOCAB - 1)
FIELDS = {
    "n": st.integers(1, 2),
    "max_tokens": st.none() | st.integers(1, 70),
    "min_tokens": st.integers(0, 20),
    "temperature": st.sampled_from([0, 1e-5, 1e-3, 1, 1e6]),
    "top_k": st.sampled_from([-1, 0, 1, 63, 64, 65, 2**31 - 1]),
    "top_p": st.sampled_from([1e-300, 0.5, 1]),
    "min_p": st.sampled_from([0, 1e-300, 0.5, 1]),
    "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
    "stop": st.lists(st.sampled_from(["A", "EF", " w4 w5", " end", "<eos>", "x"]), max_size=2),
    "stop_token_ids": st.lists(IDS, max_size=4),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "logprobs": st.sampled_from([None, 0, 1, 64]),
    "prompt_logprobs": st.sampled_from([None, 64]),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.sampled_from([1e-4, 1, 1e4]),
    "logit_bias": st.dictionaries(IDS, st.floats(-100, 100), max_size=4),
}


@settings(max_examples=25, deadline=None)
@given(fields=st.fixed_dictionaries({}, optional=FIELDS), prompt=st.lists(IDS, min_size=1, max_size=markov.CONTEXT))
def test_any_parameters_run_or_are_refused(fields: dict, prompt: list[int]):
    """And what comes back is consistent: lengths, text, reasons, tables, and the stream of the same request."""
    try:
        params = SamplingParams(**fields)
    except ValueError:  # n > 1 with greedy, or min_tokens > max_tokens
        return
    model = flat()
    # One program for all: a wider variant gives the same tokens.
    wide = SamplerVariant(
        markov.VOCAB,
        greedy=False,
        **dict.fromkeys(("top_k", "top_p", "min_p", "penalties", "logit_bias", "min_tokens"), True),
        num_logprobs=markov.VOCAB,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplerVariant, "required", lambda *_: wide)
        (output,) = generate(model, [prompt], params)
        deltas = list(stream(model, [prompt], params)) if params.greedy or params.seed is not None else None
    room = markov.CONTEXT - len(prompt) + 1
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    own_end = set() if params.ignore_eos else {markov.EOS}
    if params.prompt_logprobs is not None:
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
    for index, completion in enumerate(output.completions):
        ids, reason = completion.token_ids, completion.finish_reason
        assert 1 <= len(ids) <= most and (reason != "length" or len(ids) == most) and reason in ("stop", "length")
        stopped_by_id = reason == "stop" and not isinstance(completion.stop_reason, str)
        if stopped_by_id:
            assert completion.stop_reason == (None if ids[-1] in own_end else ids[-1])
            assert ids[-1] in own_end | set(params.stop_token_ids) and len(ids) > min(params.min_tokens, most - 1)
        assert own_end.union(params.stop_token_ids).isdisjoint(ids[: -1 if reason == "stop" else None])
        seen = ids[:-1] if stopped_by_id and not params.include_stop_str_in_output else ids
        text = model.tokenizer.decode(seen, params.skip_special_tokens) if model.tokenizer else ""
        if isinstance(completion.stop_reason, str):
            assert completion.stop_reason in text and text.startswith(completion.text or "")
        else:
            assert completion.text == text
        assert (completion.logprobs is None) == (params.logprobs is None)
        if completion.logprobs is not None:
            assert [next(iter(table)) for table in completion.logprobs] == list(ids)
        if deltas is not None:
            own = [delta for delta in deltas if delta.sample_index == index]
            assert "".join(delta.text for delta in own) == completion.text
            assert tuple(itertools.chain(*(delta.token_ids for delta in own))) == ids
            assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + [reason]


# --- Memory


@pytest.mark.parametrize("seed", [-1, 2**32, 2**70, "a", 1.5])
def test_a_seed_that_is_none_is_refused(tmp_path: pathlib.Path, seed):
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match="random_weights"):
        load(tmp_path, random_weights=seed)


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": 2**31 - 1},
        {"num_hidden_layers": 100, "hidden_size": 2**26},
        {"head_dim": 2**31 - 2, "num_attention_heads": 2**31 - 1, "num_key_value_heads": 1, "hidden_size": 2**31 - 1},
    ],
)
def test_weights_that_cannot_fit_are_refused_before_they_are_made(tmp_path: pathlib.Path, fields: dict):
    """The sizes of the last one overflow 64 bits."""
    (tmp_path / "config.json").write_text(json.dumps(markov.CONFIG | fields))
    with pytest.raises(ValueError, match=r"the weights take at least .* GB and .* GB are free"):
        load(tmp_path, random_weights=0)


def test_the_least_size_of_weights():
    config = ABC.config
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(ABC.params))
    assert least_bytes(config, jnp.float32, packed=False) == whole == 4 * num_parameters(config)
    assert least_bytes(config, jnp.float32, packed=True) < whole
    assert least_bytes(config, jnp.bfloat16, packed=False) < whole


# --- Surroundings


def test_a_model_on_disk_needs_no_home_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """A container may run under a user that has none."""

    def no_home() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    markov.save(tmp_path, markov.chain(0, 1, 2))
    for name in ("HOME", "XDG_CACHE_HOME", "JAXINFER_CACHE", "JAXINFER_COMPILATION_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pathlib.Path, "home", no_home)
    assert generate(load(tmp_path, progress=False), "A", GREEDY)[0].token_ids[:2] == (1, 2)
    assert "compiled programs are not kept: this user has no home folder" in caplog.text


def test_a_cache_folder_that_cannot_be_written_is_said_once(tmp_path: pathlib.Path, monkeypatch, caplog):
    """It is there already, on a file system mounted for reading: JAX warned twice for each program."""
    (tmp_path / "xla").mkdir()
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    monkeypatch.setenv("JAXINFER_COMPILATION_CACHE", "on")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a superuser may write whatever the mode bits say
    assert enable_persistent_cache() is None
    assert caplog.text.count("xla: Permission denied; JAXINFER_CACHE chooses another folder") == 1


def test_the_home_folder_of_nobody_is_a_missing_path():
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load("~no-such-user/model")


def test_a_template_of_too_many_nested_loops_is_refused():
    """Jinja turns it into Python that does not compile."""
    template = "{% for x in [1] %}" * 30 + "{% endfor %}" * 30
    with pytest.raises(ValueError, match="the chat template refuses these messages: too many statically nested"):
        render(template, [{"role": "user"}], add_generation_prompt=True)


# --- Command line


def test_json_is_whole_whatever_the_terminal_can_show(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Characters that the encoding of standard output lacks were printed as question marks."""
    words = ["A", "\u4f60", *(f"w{i}" for i in range(2, markov.VOCAB - 1)), "<eos>"]
    markov.save(tmp_path, markov.chain(0, 1, markov.EOS))
    markov.backend(words).save(str(tmp_path / "tokenizer.json"))
    for encoding in ("latin-1", "utf-8"):
        output = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", output)
        assert jaxinfer.cli.main(["generate", str(tmp_path), "--prompt", "A", "--json", "--quiet"]) == 0
        printed = output.buffer.getvalue().decode(encoding)  # pyright: ignore[reportAttributeAccessIssue]  # a BytesIO
        assert json.loads(printed)["completions"][0]["text"] == "\u4f60"
        assert ("\u4f60" in printed) == (encoding == "utf-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[" * 100_000, "line 1 is not JSON"), (b'{"prompt": "A\\ud800"}', "prompt 0: the text is not Unicode")],
)
def test_bad_lines_of_a_jsonl_file_are_bad_input(tmp_path: pathlib.Path, capsys, content: bytes, message: str):
    markov.save(tmp_path, markov.chain(0, 1))
    (tmp_path / "prompts.jsonl").write_bytes(content)
    arguments = ["generate", str(tmp_path), "--prompts-file", str(tmp_path / "prompts.jsonl")]
    assert jaxinfer.cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: pathlib.Path, capsys):
    markov.save(tmp_path, markov.chain(0, 1, markov.EOS))
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfA\n")
    arguments = ["generate", str(tmp_path), "--prompts-file", str(tmp_path / "prompts.txt"), "--temperature", "0"]
    assert jaxinfer.cli.main(arguments) == 0
    assert capsys.readouterr().out == "BC\n"


def test_closed_standard_streams_are_empty_ones():
    """`jaxinfer ... <&- >&-`, as some supervisors start programs: Python has None for them."""
    command = 'exec "$0" -m jaxinfer.cli pull no-such-model <&- >&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown model")
    script = "import sys; sys.stdin = sys.stdout = None; from jaxinfer.cli import main; main(['pull', 'x']);"
    script += "assert not sys.stdin.read() and not sys.stdout.write('')"
    subprocess.run([sys.executable, "-c", script], check=True, stderr=subprocess.DEVNULL)


def test_an_interruption_while_a_command_is_imported_is_exit_code_130(monkeypatch: pytest.MonkeyPatch):
    """Importing JAX takes a second or two, and Ctrl-C then showed where it was."""

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert jaxinfer.cli.main(["info", "x"]) == 130

"""The command line against a model whose every word is known: A is followed by BC, DEF, G and the end."""

import dataclasses
import io
import json
import pathlib
import subprocess
import sys

import jax
import markov
import numpy as np
import pytest
import safetensors.numpy

import jaxinfer.cli
from jaxinfer.cli import command_line, generate
from jaxinfer.cli import options as cli_options
from jaxinfer.layers.weights import ScaledCodes
from jaxinfer.outputs import Delta
from jaxinfer.quantization.plan import PRESETS
from jaxinfer.sampling_params import SamplingParams

A, BC, DEF, G = range(4)
SUCCESSORS = markov.chain(A, BC, DEF, G, markov.EOS)
GREEDY = ("--temperature", "0")
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and message.content == 'refused' %}"
    "{{ raise_exception('no such system message') }}{% endif %}{{ message.content }}|{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = markov.save(tmp_path_factory.mktemp("model"), SUCCESSORS)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Runs a command line; returns its exit code, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            code = jaxinfer.cli.main(arguments)
        except SystemExit as error:  # argparse ends the process itself
            code = error.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


# --- sampling options


def test_every_sampling_field_has_an_option_that_sets_it() -> None:
    given = SamplingParams(
        n=2,
        max_tokens=None,
        min_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        stop=("x", "y z"),
        stop_token_ids=(5, 6, 8),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=1,
        prompt_logprobs=2,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias={8: -100.0, 9: 1.5},
    )
    defaults = SamplingParams()
    assert all(getattr(given, field.name) != getattr(defaults, field.name) for field in dataclasses.fields(given))
    line = (
        "generate m --n 2 --max-tokens none --min-tokens 3 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 "
        "--seed 7 --stop x --stop-token-ids 5,6 --stop-token-ids 8 --ignore-eos --include-stop-str-in-output "
        "--no-skip-special-tokens --logprobs 1 --prompt-logprobs 2 --presence-penalty -0.5 --frequency-penalty 0.25 "
        "--repetition-penalty 1.5 --logit-bias 8=-100 --logit-bias 9=1.5"
    )
    parsed = command_line.parser().parse_args([*line.split(), "--stop", "y z"])
    assert SamplingParams.from_dict(cli_options.sampling_values(parsed)) == given
    parsed = command_line.parser().parse_args(["generate", "m"])
    assert SamplingParams.from_dict(cli_options.sampling_values(parsed)) == defaults


def test_help_of_an_option_is_its_field_docstring(run) -> None:
    code, out, _ = run("generate", "--help")
    assert code == 0
    assert "End-of-text and stop token ids cannot be drawn before" in out
    assert "Default: 16." in out


def test_help_has_no_words_that_only_python_knows(run) -> None:
    for command in command_line._COMMANDS:
        _, out, _ = run(command, "--help")
        words = " ".join(out.split())
        for python in ("None", "True", "tuple", "construction", "validate_for", "min_tokens", "Namespace"):
            assert python not in words, (command, python)
    assert "log-likelihoods of continuations of prompts, one JSON object each" in " ".join(
        run("score", "--help")[1].split()
    )


def test_help_names_every_plan_that_a_command_takes(run) -> None:
    for command, calibrated in (("quantize", True), ("generate", False)):
        words = " ".join(run(command, "--help")[1].split()).replace("- ", "-")
        for name, plan in PRESETS.items():
            assert (f" {name}, " in words) == (calibrated or not plan.needs_calibration), (command, name)


def test_a_list_of_ids_leaves_the_model_alone() -> None:
    """Values with blanks between them took the MODEL that follows for one more."""
    parsed = command_line.parser().parse_args(["generate", "--stop-token-ids", "5", "MODEL"])
    assert (parsed.model, cli_options.sampling_values(parsed)["stop_token_ids"]) == ("MODEL", [5])
    parsed = command_line.parser().parse_args(["spec-bench", "--k", "2,4", "MODEL"])
    assert (parsed.model, parsed.k) == ("MODEL", [2, 4])
    assert command_line.parser().parse_args(["spec-bench", "MODEL"]).k == [4]


def test_version(run) -> None:
    assert run("--version") == (0, f"jaxinfer {jaxinfer.__version__}\n", "")


def test_help_imports_no_jax() -> None:
    program = (
        "import sys; from jaxinfer.cli.command_line import parser; parser().format_help(); print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- generate


def test_one_completion_is_streamed_with_its_figures_on_standard_error(run, folder: str) -> None:
    code, out, err = run("generate", folder, "--prompt", "A", *GREEDY)
    assert (code, out) == (0, "BCDEFG\n")
    assert err.startswith("[4 tokens, first after ")
    assert run("generate", folder, "--prompt", "A", "--quiet", *GREEDY) == (0, "BCDEFG\n", "")


def test_the_rate_of_a_stream_needs_a_chunk_that_came_by_itself() -> None:
    """The chunk after the first token has run while that was read: both may come at once."""
    assert str(generate.Speed(0.0, 16, [(0.5, 1), (0.5, 16)])) == "[16 tokens, first after 0.50 s]"
    assert str(generate.Speed(0.0, 1, [(0.5, 1)])) == "[1 tokens, first after 0.50 s]"
    three = generate.Speed(0.0, 32, [(0.5, 1), (0.5, 17), (2.0, 32)])
    assert str(three) == "[32 tokens, first after 0.50 s, then 10.0 tokens/s]"
    together = generate.Speed(0.0, 8, [(0.5, 1), (0.5, 5), (0.5004, 8)])
    assert str(together) == "[8 tokens, first after 0.50 s]"


def test_weights_are_kept_as_asked(run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def load(*arguments, **options):
        seen.append(real(*arguments, **options))
        return seen[-1]

    real = generate.load
    monkeypatch.setattr(generate, "load", load)
    weights = ("--quantize", "int8", "--kv-dtype", "int8")
    code, _, err = run("generate", folder, "--prompt", "A", "--max-tokens", "2", *weights)
    assert code == 0, err
    assert isinstance(seen[0].params.layers[0].down, ScaledCodes)
    assert str(seen[0].cache_dtype) == "int8"
    code, _, err = run("generate", folder, "--prompt", "A", "--quantize", "int5")
    assert code == 2
    assert "--quantize 'int5': expected int4" in err


def test_several_completions_come_in_order_under_headings(run, folder: str) -> None:
    code, out, _ = run("generate", folder, "--prompt", "DEF", "--prompt", "A", "--max-tokens", "2", *GREEDY)
    assert (code, out) == (0, "--- prompt 0 ---\nG\n--- prompt 1 ---\nBCDEF\n")
    code, out, _ = run("generate", folder, "--prompt", "DEF", "--n", "2", "--seed", "0")
    assert (code, out) == (0, "--- prompt 0, completion 0 ---\nG\n--- prompt 0, completion 1 ---\nG\n")


def test_json_is_one_object_a_line_and_nothing_else(run, folder: str) -> None:
    arguments = ("--json", "--logprobs", "1", "--prompt-logprobs", "0", "--stop-token-ids", str(G), *GREEDY)
    code, out, err = run("generate", folder, "--prompt", "A|BC", "--prompt", "A", *arguments)
    assert code == 0
    assert err.startswith("[5 tokens in ")
    first, second = map(json.loads, out.splitlines())
    assert first["prompt"] == "A|BC"
    assert first["prompt_token_ids"] == [A, BC]
    assert (first["index"], second["index"]) == (0, 1)
    (completion,) = first["completions"]
    assert completion["token_ids"] == [DEF, G]
    assert (completion["text"], completion["finish_reason"], completion["stop_reason"]) == ("DEF", "stop", G)
    # The successor's logit is 4 * 8 above all others, which leaves it all of the probability in float32.
    assert completion["cumulative_logprob"] == pytest.approx(0, abs=1e-5)
    assert [[entry["token_id"] for entry in table] for table in completion["logprobs"]] == [[DEF], [G]]
    assert completion["logprobs"][0][0]["token"] == "DEF"
    assert completion["logprobs"][0][0]["rank"] == 1
    nothing, table = first["prompt_logprobs"]
    assert nothing is None
    assert [entry["token_id"] for entry in table] == [BC]


def test_prompts_file_holds_one_prompt_a_line(run, folder: str, tmp_path: pathlib.Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("DEF\r\n\n  \nA\n")
    code, out, _ = run("generate", folder, "--prompts-file", str(prompts), "--json", *GREEDY)
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [(record["prompt"], record["completions"][0]["text"]) for record in records] == [
        ("DEF", "G"),
        ("A", "BCDEFG"),
    ]


def test_jsonl_file_holds_texts_ids_or_chats_with_options_of_their_own(
    run, folder: str, tmp_path: pathlib.Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "A"},
        {"token_ids": [BC], "params": {"max_tokens": 1}},
        {"messages": [{"role": "user", "content": "DEF"}]},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = run("generate", folder, "--prompts-file", str(prompts), "--json", "--max-tokens", "2", *GREEDY)
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["completions"][0]["text"] for record in records] == ["BCDEF", "DEF", "G"]
    assert [record["prompt"] for record in records] == ["A", None, "DEF|"]


def test_json_lines_from_standard_input_are_asked_for(run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in ((), ("--prompts-file", "-")):
        monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "A"}\n\n{"token_ids": [2]}\n'))
        code, out, _ = run("generate", folder, *source, "--jsonl", "--json", *GREEDY)
        assert code == 0
        assert [json.loads(line)["completions"][0]["text"] for line in out.splitlines()] == ["BCDEFG", "G"]
    monkeypatch.setattr("sys.stdin", io.StringIO("A\n"))
    code, _, err = run("generate", folder, "--jsonl", *GREEDY)
    assert code == 2
    assert err.startswith("error: standard input line 1 is not JSON")


def test_standard_input_is_one_prompt(run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("A|BC\n"))
    assert run("generate", folder, "--quiet", *GREEDY) == (0, "DEFG\n", "")


def test_chat_option_applies_the_template(run, folder: str) -> None:
    code, out, _ = run("generate", folder, "--chat", "--system", "G", "--prompt", "BC", "--json", "--quiet", *GREEDY)
    record = json.loads(out)
    assert (code, record["prompt"], record["prompt_token_ids"]) == (0, "BC", [G, BC])


def test_model_without_tokenizer_takes_and_gives_ids(run, folder: str, tmp_path: pathlib.Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((pathlib.Path(folder) / name).read_bytes())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"token_ids": [BC]}))
    line = ("generate", str(tmp_path), "--prompts-file", str(prompts), "--quiet", *GREEDY)
    assert run(*line) == (0, f"{DEF} {G} {markov.EOS} \n", "")
    code, out, err = run("generate", str(tmp_path), "--prompt", "A")
    assert (code, out) == (2, "")
    assert "has no tokenizer; give token ids instead" in err


# --- exit codes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "required: COMMAND"),
        (("generate",), "required: MODEL"),
        (("generate", "nosuch", "--prompt", "A"), "nosuch: no such file or folder, and unknown model 'nosuch'; known"),
        (("generate", "./nosuch", "--prompt", "A"), "./nosuch: no such file or folder"),
        (("info", "{empty}"), "no config.json in this folder"),
        (("pull", "nosuch"), "unknown model 'nosuch'"),
        (("generate", "{model}", "--prompt", "A", "--bogus"), "unknown option --bogus (see jaxinfer generate --help)"),
        (
            ("generate", "{model}", "--temp", "0.5"),
            "unknown option --temp; did you mean --temperature? (see jaxinfer gen",
        ),
        (
            ("chat", "{model}", "--max_tokens=5"),
            "unknown option --max_tokens; did you mean --max-tokens? (see jaxinfer c",
        ),
        (("benhc", "{model}"), "unknown command 'benhc'; did you mean bench?"),
        (("serve-me", "{model}"), "unknown command 'serve-me'; the commands are generate, chat, "),
        (("--bogus", "info", "{model}"), "unknown option --bogus"),
        (("info", "m", "x"), "unexpected argument 'x': MODEL is 'm' already (see jaxinfer info --help)"),
        (("generate", "m", "--prompt", "A", "--jsonl"), "--jsonl is for --prompts-file and standard input"),
        (("generate", "m", "--stop-token-ids", "5,x"), "argument --stop-token-ids: 'x' is not a whole number"),
        (("generate", "{model}", "--prompt", "A", "--top-k", "many"), "argument --top-k: 'many' is not a whole number"),
        (("generate", "{model}", "--prompt", "A", "--top-p", "1.5"), "top_p is 1.5; expected a number in (0, 1]"),
        (("generate", "{model}", "--prompt", "A", "--logit-bias", "5"), "'5' is not ID=VALUE"),
        (
            ("generate", "{model}", "--prompt", "A", "--logit-bias", "99=1"),
            "token id 99, which this model's vocabulary",
        ),
        (("generate", "{model}", "--prompt", "A", "--n", "2", *GREEDY), "n is 2 with greedy temperature"),
        (("generate", "{model}", "--prompt", "A", "--dtype", "int4"), "argument --dtype: invalid choice: 'int4'"),
        (("generate", "{model}", "--prompt", "A", "--logprobs", "1"), "only in the --json output"),
        (("generate", "{model}", "--prompt", "A", "--system", "x"), "--system needs --chat"),
        (("generate", "{model}", "--prompt", "A", "--prompts-file", "x"), "not allowed with argument --prompt"),
        (("generate", "{model}", "--prompt", ""), "prompt 0 is empty"),
        (("generate", "{model}", "--prompt", "A", "--max-batch-size", "0"), "--max-batch-size 0; expected an integer"),
        (("generate", "{model}", "--prompt", "|".join("A" * 65)), "prompt 0 has 65 tokens, but the context"),
        (("generate", "{model}", "--prompts-file", "{empty}/none.txt"), "none.txt: No such file or directory"),
        (("generate", "{model}", "--prompts-file", "{empty}"), "Is a directory"),
        (("generate", "{model}", "--chat", "--prompt", "A", "--system", "refused"), "no such system message"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    run, folder: str, tmp_path: pathlib.Path, arguments: tuple[str, ...], expected: str
) -> None:
    code, out, err = run(*(word.format(model=folder, empty=tmp_path) for word in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: expected an object with one of prompt, token_ids, messages"),
        ('{"prompt": "A", "token_ids": [1]}', "line 2: expected an object with one of"),
        ('{"prompt": "A", "temperature": 0}', "line 2: expected an object with one of"),
        ('{"prompt": 5}', "line 2: prompt is a string, token_ids a list of integers"),
        ('{"token_ids": [true]}', "line 2: prompt is a string, token_ids a list of integers"),
        ('{"messages": []}', "line 2: prompt is a string, token_ids a list of integers"),
        ('{"prompt": "A", "params": {"temprature": 0}}', "line 2: no sampling field 'temprature' (did you mean temper"),
        ('{"prompt": "A", "params": 3}', "line 2: params is 3"),
        (
            '{"prompt": "A", "params": {"stop": ["x\\ud800"]}}',
            "line 2: stop: 'x\\ud800' is not Unicode: character 1 is '\\ud800'; it was made from bytes that are not",
        ),
    ],
)
def test_bad_line_of_a_jsonl_file_is_named(run, tmp_path: pathlib.Path, line: str, expected: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "A"}\n' + line)
    code, out, err = run("generate", "unused", "--prompts-file", str(prompts))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {prompts} ")
    assert expected in err


def test_prompts_file_that_is_empty_or_not_utf8(run, tmp_path: pathlib.Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n \n")
    assert run("generate", "unused", "--prompts-file", str(prompts))[2].endswith("holds no prompts; give one a line\n")
    prompts.write_bytes(b"caf\xe9 au lait")
    assert (
        "is not UTF-8 (invalid continuation byte at byte 3)"
        in run("generate", "unused", "--prompts-file", str(prompts))[2]
    )


def test_logits_that_are_not_finite_are_exit_code_1(run, folder: str, tmp_path: pathlib.Path) -> None:
    for path in pathlib.Path(folder).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    arrays = markov.tensors(SUCCESSORS)
    arrays["model.embed_tokens.weight"][DEF] = np.nan
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for form in ((), ("--json",)):
        line = ("generate", str(tmp_path), "--prompt", "A", "--prompt", "DEF", "--quiet", *form, *GREEDY)
        code, out, err = run(*line)
        assert code == 1
        assert "BCDEF" in out
        assert [line[: len("error: prompt 0: ")] for line in err.splitlines()] == [
            "error: prompt 0: ",
            "error: prompt 1: ",
        ]
        assert "not finite" in err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"token_ids": [0, DEF, 0]}))
    line = ("generate", str(tmp_path), "--prompts-file", str(prompts), "--quiet", "--json", "--prompt-logprobs", "0")
    code, out, err = run(*line, *GREEDY)
    assert code == 1, err
    assert any(entry["logprob"] is None for table in json.loads(out)["prompt_logprobs"][1:] for entry in table)


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_exit_code_1(folder: str) -> None:
    line = f"{sys.executable} -m jaxinfer generate {folder} --prompt A --max-tokens 2 --quiet > /dev/full"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_interruption_is_exit_code_130(run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxinfer.cli.generate.stream", interrupted)
    assert run("generate", folder, "--prompt", "A") == (130, "", "")


@pytest.mark.parametrize("module", ["jaxinfer.cli.command_line", "argparse", "jaxinfer.sampling_params", "jax"])
def test_an_interruption_while_a_module_is_imported_is_exit_code_130(module: str) -> None:
    """Only `main` can catch Ctrl-C, so nothing that takes time is imported before it runs."""
    program = f"""
import os, signal, sys
from jaxinfer.cli import main

class Interrupting:
    def find_spec(name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.meta_path.insert(0, Interrupting)
sys.exit(main(["info", "/dev/null/none"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "meets",
    [
        # A callback of the garbage collector, whose exceptions Python prints and forgets: JAX has one.
        "gc.callbacks.append(lambda phase, _: phase == 'start' and interrupt()); gc.collect(); time.sleep(20)",
        # The initialisation of a module in C++, which pybind11 makes an ImportError of.
        "raise ImportError('initialization failed') from KeyboardInterrupt()",
        # A call of C++ that comes back with Ctrl-C's exception set.
        "raise SystemError('returned a result with an exception set') from KeyboardInterrupt()",
    ],
    ids=["garbage collector", "C++ module", "C++ call"],
)
def test_an_interruption_that_others_swallow_is_exit_code_130(meets: str) -> None:
    program = f"""
import gc, os, signal, sys, time
from jaxinfer.cli import command_line, main

def interrupt():
    gc.callbacks.clear()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)

def run(arguments):
    {meets}

signal.signal(signal.SIGINT, signal.default_int_handler)
command_line.run = run
sys.exit(main([]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupted_process_ends_at_once() -> None:
    """Not by way of what is done at exit, where threads of XLA that still compile abort the process."""
    program = """
import atexit, os
from jaxinfer.cli import command_line, main

def run(arguments):
    atexit.register(os.abort)
    print("half an answer", end="")
    raise KeyboardInterrupt

command_line.run = run
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "half an answer", "")


def test_other_errors_keep_their_traceback(run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("jaxinfer.cli.generate.stream", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run("generate", folder, "--prompt", "A")
    with pytest.raises(ValueError, match="max_batch_size=0"):
        run("--traceback", "generate", folder, "--prompt", "A", "--max-batch-size", "0", "--json")


def test_reader_that_goes_away_is_no_error(folder: str) -> None:
    command = [sys.executable, "-m", "jaxinfer", "info", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


# --- chat


@pytest.fixture
def say(run, folder: str, monkeypatch: pytest.MonkeyPatch):
    """Runs `chat` with lines on standard input and a `stream` that repeats what it was given: returns what was asked
    (the token ids of each turn), and what `run` returns."""
    asked: list[list[int]] = []

    def stream(model, prompt, params):
        asked.append(prompt)
        words = [model.tokenizer.decode([token]) for token in prompt]
        if words[-1] == "G":
            yield Delta(0, 0, (BC,), "BC")
            raise KeyboardInterrupt
        reason = "error" if words[-1] == "DEF" else "stop"
        yield Delta(0, 0, (BC,), "B")
        yield Delta(0, 0, (BC,), "C", finish_reason=reason, stop_reason="not finite" if reason == "error" else None)

    def call(*lines: str, interactive: bool = False, arguments: tuple[str, ...] = ()):
        asked.clear()
        stdin = io.StringIO("".join(f"{line}\n" for line in lines))
        stdin.isatty = lambda: interactive  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("jaxinfer.cli.chat.stream", stream)
        return (asked, *run("chat", folder, *arguments))

    return call


def test_chat_remembers_until_reset(say) -> None:
    asked, code, out, err = say("A", "", "A", "/reset", "A", arguments=("--system", "G"))
    assert asked == [[G, A], [G, A, BC, A], [G, A]]
    assert (code, out, err) == (0, "BC\nBC\nBC\n\n", "")


def test_chat_ends_at_exit_and_names_unknown_commands(say) -> None:
    asked, code, out, err = say("/what now", "/exit", "A")
    assert (asked, code, out) == ([], 0, "")
    assert err.startswith("no command /what: /reset forgets the conversation")


def test_interruption_stops_the_answer_of_a_person_and_the_program_of_a_pipe(say) -> None:
    asked, code, out, _ = say("G", "A", interactive=True)
    assert asked == [[G], [G, BC, A]]
    assert (code, out) == (0, "> BC\n> BC\n> \n")
    _, code, out, _ = say("G", "A")
    assert (code, out) == (130, "BC\n")


def test_failed_answer_is_forgotten_or_ends_a_pipe(say) -> None:
    asked, code, _, err = say("DEF", "A", interactive=True)
    assert asked == [[DEF], [A]]
    assert code == 0
    assert "error: not finite" in err
    assert say("DEF", "A")[1] == 1


def test_a_message_that_is_not_unicode_is_named(say) -> None:
    """Bytes that are not UTF-8, as Python reads them from a terminal of no locale."""
    asked, code, _, err = say("A\udcff", "A", interactive=True)
    assert (asked, code) == ([[A]], 0)
    assert "error: the message is not Unicode: character 1 is '\\udcff'" in err
    assert say("A\udcff", "A")[:2] == ([], 2)


def test_a_chat_prompt_that_cannot_be_encoded_is_numbered(run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("A", "A\\ud800")
    text = "".join(f'{{"messages": [{{"role": "user", "content": "{line}"}}]}}\n' for line in lines)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    code, out, err = run("generate", folder, "--jsonl")
    assert (code, out) == (2, "")
    assert err.startswith("error: prompt 1: the text is not Unicode: character 1 is")


def test_chat_of_a_pipe_that_is_not_utf8(run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"A\xff\n"), encoding="utf-8"))
    assert run("chat", folder) == (2, "", "error: standard input is not UTF-8 (invalid start byte at byte 1)\n")


def test_chat_generates_until_the_context_is_full(run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real stream: one turn fits, then the conversation is longer than the model's 64 tokens."""
    monkeypatch.setattr("sys.stdin", io.StringIO("DEF\n" + "|".join(["A"] * 70) + "\n"))
    code, out, err = run("chat", folder, *GREEDY)
    assert (code, out) == (2, "G\n")
    assert "the context of" in err


def test_chat_with_a_base_model_is_refused_before_anything_is_typed(run, tmp_path: pathlib.Path) -> None:
    code, _, err = run("chat", str(markov.save(tmp_path, SUCCESSORS)))
    assert code == 2
    assert "no chat template" in err


# --- info and pull


def test_info_counts_by_kind_without_reading_weights(run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("checkpoints.safetensors.SafetensorsFolder.read_into")
    code, out, _ = run("info", folder, "--json", "--dtype", "bfloat16")
    assert code == 0
    facts = json.loads(out)
    # Embedding and head 64 * 64; q, o 16 * 64, k, v 8 * 64; three of 32 * 64 in the MLP; three norms of 64, in float32.
    assert facts["parameters"] == 2 * 4096 + 2 * 1024 + 2 * 512 + 3 * 2048 + 3 * 64
    assert facts["memory"] == {
        "embedding": 2 * 4096,
        "attention": 2 * 3072,
        "mlp": 2 * 6144,
        "norms": 4 * 192,
        "head": 2 * 4096,
        "total": 2 * (4096 + 3072 + 6144 + 4096) + 4 * 192,
    }
    # Keys and values of one layer, one head of 8, two bytes each.
    assert facts["kv_cache"] == {"bytes_per_token": 32, "context": 64, "bytes_full_context": 2048}
    assert facts["tokenizer"] == {
        "num_tokens": 64,
        "bos_token_id": None,
        "adds_bos": False,
        "eos_token_ids": [63],
        "chat_template": True,
    }
    assert facts["file"] == {"F32": {"tensors": 12, "bytes": 4 * 17600}}
    assert facts["config"]["num_kv_heads"] == 1
    code, out, _ = run("info", folder)
    assert code == 0
    assert "  per token  64 bytes\n" in out  # float32 on a CPU
    assert "  F32    12 tensors, 70.4 kB\n" in out
    assert "  1  full attention, rope: kind default, theta 10000.0, rotary_dim 8\n" in out


def test_info_counts_packed_weights_as_they_are_kept(run, folder: str, tmp_path: pathlib.Path) -> None:
    store = str(tmp_path / "store")
    assert run("quantize", folder, "--plan", "int4", "--no-judge", "--out", store, "--quiet")[0] == 0
    code, out, _ = run("info", store, "--json")
    facts = json.loads(out)
    model = jaxinfer.load(store, progress=False)
    assert (code, facts["precisions"]) == (0, ["float32", "int4"])
    assert facts["memory"]["total"] == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert facts["memory"]["embedding"] == 4 * 4096
    assert facts["memory"]["attention"] < 3072  # about half a byte a weight, and scales and zeros
    assert "\nmemory, float32 and int4\n" in run("info", store)[1]


def test_info_says_whether_the_tensors_fit(run, folder: str, tmp_path: pathlib.Path) -> None:
    sound = json.loads(run("info", folder, "--json")[1])["check"]
    assert sound == {"missing": 0, "unexpected": 0, "misshapen": 0, "integers": 0, "problem": None}
    assert "  check  every tensor fits the configuration\n" in run("info", folder)[1]
    for path in pathlib.Path(folder).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    arrays = markov.tensors(SUCCESSORS)
    del arrays["model.layers.0.mlp.up_proj.weight"], arrays["model.norm.weight"]
    arrays["model.layers.0.strange.weight"] = np.zeros(3, np.float32)
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    code, out, err = run("info", str(tmp_path), "--json")
    check = json.loads(out)["check"]
    assert (code, check["missing"], check["unexpected"], check["misshapen"]) == (2, 2, 1, 0)
    assert err.startswith(
        f"error: {tmp_path}: the tensors do not fit the configuration; 2 missing: norm.weight (model.no"
    )
    assert err.count("\n") == 1
    code, out, _ = run("info", str(tmp_path))
    assert code == 2
    assert "  check  2 missing, 1 unexpected\n" in out


def test_info_has_each_rope_once(run, folder: str, tmp_path: pathlib.Path) -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    factors |= {"original_max_position_embeddings": 16, "rope_theta": 10000.0}
    config = markov.CONFIG | {"num_hidden_layers": 5, "rope_parameters": factors}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = run("info", str(tmp_path), "--json")
    facts = json.loads(out)["config"]
    assert code == 0
    assert facts["layers"] == [{"window": None, "rope": 0}] * 5
    assert [rope["kind"] for rope in facts["ropes"]] == ["longrope"]
    assert out.count("longrope") == 1


def test_info_of_a_configuration_alone(run, folder: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(markov.CONFIG))
    code, out, _ = run("info", str(tmp_path), "--json")
    facts = json.loads(out)
    assert (code, facts["tokenizer"], facts["file"], facts["parameters"]) == (0, None, {}, 17600)
    assert facts["check"] is None


def test_pull_prints_the_path(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxinfer.cli.pull.pull", lambda name, progress: pathlib.Path("/models") / name)
    assert run("pull", "some-model") == (0, "/models/some-model\n", "")

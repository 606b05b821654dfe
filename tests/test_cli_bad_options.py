"""Command lines that are wrong: refused before the work begins, in the words of the command line."""

import io
import pathlib

import gguf_files
import markov
import numpy as np
import pytest

import jaxinfer.cli
from jaxinfer.cli import command_line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(markov.save(tmp_path_factory.mktemp("model"), markov.chain(0, 1, 2, markov.EOS)))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # In the words of the command line, where the library says `context=0` or `quantize='int5'`.
        ("plan {model} --context 0", "--context 0; expected 1 to 64"),
        ("plan {model} --batch 1.5", "argument --batch: '1.5' is not a whole number"),
        ("plan {model} --quantize int5", "--quantize 'int5': expected int4, int4-g128"),
        ("plan {model} --gpu-memory 12", "--gpu-memory '12' is a GPU of 12 bytes; write a size with its unit: 24GiB"),
        ("plan {model} --draft {model} --k 0", "--draft: --k 0; expected 1 to 15 drafted tokens a step"),
        ("plan {model} --k 4", "--k 4 goes with --draft, the model that drafts so many tokens; give both"),
        ("quantize {model} --plan int4 --samples 0 --out {out}/store", "--samples 0; expected a whole number from 1"),
        ("quantize {model} --plan int4 --length 1 --out {out}/store", "--length 1; expected a whole number from 2"),
        (
            "quantize {model} --plan int4 --no-judge --samples 9 --out {out}/store",
            "--samples 9: nothing looks at text; a method that calibrates, or --judge, would",
        ),
        ("generate {model} --prompt A --kv-dtype a,b", "--kv-dtype 'a,b': a cache can be float32"),
        ("quantize {model} --plan int5 --out {out}/store", "--plan 'int5': expected int4, int4-g128"),
        (
            "quantize {model} --plan {out}/none.toml --out {out}/store",
            "none.toml: no such plan; give a .toml",
        ),
        (
            "quantize {model} --plan int4-gptq --out {out}/store --calibration {out}/none.txt",
            "none.txt: no such file; expected a text or .jsonl file to calibrate with",
        ),
        (
            "quantize {model} --plan int4-gptq --out {out}/store --calibration {out}",
            " is a folder; name the text and .jsonl files in it one by one",
        ),
        ("bench {model} --decode-chunk 99999999999", "--decode-chunk 99999999999; expected at most 4096"),
        ("bench {model} --max-decode-batch 0", "--max-decode-batch 0; expected an integer of at least 1"),
        ("bench {model} --max-context 0", "--max-context 0; expected an integer of at least 1"),
        ("bench {model} --k 0", "--k 0 goes with --draft, which says what drafts; give both"),
        ("quantize {model} --plan int4 --out {out}/s\udcff", r"/s\udcff': the path is not Unicode: character"),
        ("convert {model} {out}/s\udcff", r"/s\udcff': the path is not Unicode: character"),
        ("perplexity {model} {out}/text.txt --stride 0", "--stride 0; expected an integer from 1 to 63"),
        # Tiers are for what generates without engine and draft.
        (
            "bench {model} --kv-dtype tiered --host-pages 4",
            "--host-pages 4 with a tiered cache, whose pages stay on the device",
        ),
        ("bench {model} --kv-dtype tiered:0,1", "TieredKV(recent=0): expected an integer of at least 1"),
        ("score {model} --continuation A --kv-dtype tiered", "argument --kv-dtype: invalid choice: 'tiered'"),
        # What would only be found after all the measuring.
        ("sensitivity {model} --tokens 0", "--tokens 0; expected a whole number from 1"),
        (
            "sensitivity {model} --budget much",
            "--budget 'much': expected a size such as 60MB, '4.5 bits' (a weight)",
        ),
        ("sensitivity {model} --budget 4.5.5bits", "--budget '4.5.5bits': expected a size"),
        (
            "sensitivity {model} --precisions 3:64,8",
            "--budget int4 has weights in int4 g64 rtn, which is not among",
        ),
        ("sensitivity {model} --plan {out}/none/best.toml", "none/best.toml: there is no folder"),
        ("sensitivity {model} --plan {out}/mine.toml", "mine.toml exists already; remove it, or write to another path"),
        ("sensitivity {model} --heat-map {out}", "is a folder; name a file"),
        ("sensitivity {model} --heat-map {out}/map.bmpx", "map.bmpx: no picture format .bmpx; there are "),
        ("bench {model} --timeline {out}/none/t.png", "none/t.png: there is no folder"),
        ("plan {model} --chart {out}/plan.xyz", "plan.xyz: no picture format .xyz"),
        ("spec-bench {model} --prompt A --repeats 0", "--repeats 0; expected at least 1"),
        # Files of prompts and pairs.
        (
            "score {model} --pairs-file {out}/latin1",
            "latin1 is not UTF-8 (invalid continuation byte at byte 0)",
        ),
        ("score {model} --pairs-file /dev/null", "/dev/null holds no pairs; give one JSON object a line"),
        ("score {model} --pairs-file {out}/deep", "deep line 1 is not JSON: maximum recursion depth"),
        ("spec-bench {model} --prompts-file {out}/latin1", "latin1 is not UTF-8"),
        ("perplexity {model} {out}/latin1", "latin1 is not UTF-8"),
        ("generate {model} --prompts-file a\0b", "'a\\x00b' is no name of a file"),
        # Half a surrogate pair is how Python has a byte of the command line that is not UTF-8.
        ("generate {model} --prompt A --stop a\udcff", r"argument --stop: 'a\udcff' is not Unicode: character 1 is"),
        ("generate {model} --prompt a\udcff", r"argument --prompt: 'a\udcff' is not Unicode"),
        ("chat {model} --system a\udcff", r"argument --system: 'a\udcff' is not Unicode"),
        ("score {model} --continuation a\udcff", r"argument --continuation: 'a\udcff' is not Unicode"),
        ("spec-bench {model} --prompt a\udcff", r"argument --prompt: 'a\udcff' is not Unicode"),
        # An empty variable of a shell is neither the current folder nor a file.
        ("generate {model} --prompts-file ", "argument --prompts-file: the path is empty; name a file or a folder"),
        ("perplexity {model} ", "argument FILE: the path is empty"),
        ("quantize {model} --plan int4 --out ", "argument --out: the path is empty"),
        ("sensitivity {model} --calibration ", "argument --calibration: the path is empty"),
        ("convert {model} ", "argument OUT: the path is empty"),
        ("quantize {model} --plan int4 --out {out}", " exists already; remove it, or write to another path"),
        ("bench {model} --seed -1", "--seed -1; expected an integer of at least 0"),
        (
            "generate {model} --prompt A --logit-bias 1=1 --logit-bias 1=2",
            "logit_bias is ((1, 1.0), (1, 2.0)); expected each token id once",
        ),
        # What cannot be a model.
        ("info {out}/parrot.gguf", "architecture 'parrot'"),
        ("generate {out}/parrot.gguf --prompt A", "architecture 'parrot'"),
    ],
)
def test_bad_options(
    capsys: pytest.CaptureFixture[str], folder: str, tmp_path: pathlib.Path, line: str, expected: str
) -> None:
    (tmp_path / "text.txt").write_text("A|BC|DEF")
    (tmp_path / "mine.toml").write_text("# by hand")
    (tmp_path / "latin1").write_bytes(b"\xe9A")
    (tmp_path / "deep").write_text("[" * 100_000)
    gguf_files.write(tmp_path / "parrot.gguf", {"general.architecture": "parrot"}, {"w": np.zeros(32, np.float32)})
    try:
        code = jaxinfer.cli.main([word.format(model=folder, out=tmp_path) for word in line.split(" ")])
    except SystemExit as error:
        code = error.code
    shown = capsys.readouterr()
    assert (code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert expected in shown.err
    assert shown.err.startswith("error: ")


def test_a_model_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty variable of a shell is not the folder that one is in."""
    assert jaxinfer.cli.main(["info", ""]) == 2
    assert capsys.readouterr().err.startswith("error: the model is ''; give the path of a folder or .gguf file")


def test_a_byte_order_mark_is_not_text(capsys, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('\ufeff{"prompt": [0], "continuation": [99]}\n'))
    assert jaxinfer.cli.main(["score", folder, "--pairs-file", "-"]) == 2
    assert "continuation 0 holds 99" in capsys.readouterr().err


def test_an_error_is_as_long_as_people_read() -> None:
    assert command_line.describe(ValueError("a" * 100_000)) == "a" * command_line.LONGEST_ERROR + "..."


def test_only_names_of_options_are_translated() -> None:
    parser = command_line.parser().parse_args(["plan", "m"]).parser
    given = "context=0 and kv_dtype='x', head_dim=64; a==b; path/context=1; context= 2"
    assert parser.in_options(given) == "--context 0 and --kv-dtype 'x', head_dim=64; a==b; path/--context 1; context= 2"

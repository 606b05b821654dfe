"""`jaxinfer score` and `jaxinfer perplexity` through their `main`."""

import io
import json
import math
import pathlib

import markov
import pytest

from jaxinfer.cli import main

SURE = 4 * math.sqrt(markov.VOCAB)
"""Logit of a successor; all other logits are 0."""
CERTAIN = SURE - math.log(math.exp(SURE) + markov.VOCAB - 1)
IMPOSSIBLE = -math.log(math.exp(SURE) + markov.VOCAB - 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """After "A" comes "BC", then "DEF"."""
    return str(markov.save(tmp_path_factory.mktemp("markov"), markov.chain(0, 1, 2, 3)))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_score_prints_one_object_a_continuation(run, folder: str) -> None:
    code, out, err = run("score", folder, "--prompt", "A", "--continuation", "|BC|DEF", "--continuation", "|G")
    assert (code, err) == (0, "")
    good, bad = (json.loads(line) for line in out.splitlines())
    assert (good["index"], good["num_tokens"], good["is_greedy"]) == (0, 2, True)
    assert (good["prompt"], good["continuation"], bad["continuation"]) == ("A", "|BC|DEF", "|G")
    assert good["logprob"] == pytest.approx(2 * CERTAIN, abs=1e-5)
    assert (bad["index"], bad["num_tokens"], bad["is_greedy"]) == (1, 1, False)
    assert bad["token_logprobs"] == pytest.approx([IMPOSSIBLE], abs=1e-4)


def test_score_reads_pairs_of_text_or_ids(
    run, folder: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": "A", "continuation": "|BC"}, {"prompt": [0, 1], "continuation": [2]}]
    text = "\n\n".join(map(json.dumps, lines)) + "\n"
    (tmp_path / "pairs.jsonl").write_text(text)
    code, out, _ = run("score", folder, "--pairs-file", str(tmp_path / "pairs.jsonl"))
    assert code == 0
    assert [json.loads(line)["is_greedy"] for line in out.splitlines()] == [True, True]
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert run("score", folder, "--pairs-file", "-") == (0, out, "")


def test_perplexity_of_a_file_and_of_standard_input(
    run, folder: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("A|BC|DEF|A")
    code, out, err = run("perplexity", folder, str(tmp_path / "text.txt"), "--json", "--window", "3", "--stride", "1")
    assert (code, err) == (0, "")
    logprob = 2 * CERTAIN + IMPOSSIBLE
    expected = {"perplexity": math.exp(-logprob / 3), "logprob": logprob, "num_tokens": 3}
    assert json.loads(out) == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr("sys.stdin", io.StringIO("A|BC"))
    assert run("perplexity", folder) == (0, "perplexity 1.0000 (1 tokens, log-likelihood 0.00)\n", "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ('{"prompt": "A"}', "line 1: expected an object with prompt and continuation, nothing else"),
        ('{"prompt": "A", "continuation": 3}', "line 1: expected an object with prompt and continuation"),
        ('{"prompt": [0], "continuation": [99]}', "continuation 0 holds 99; token ids of this model are 0 to 63"),
    ],
)
def test_bad_pairs_are_one_line_and_exit_code_2(
    run, folder: str, tmp_path: pathlib.Path, line: str, message: str
) -> None:
    (tmp_path / "pairs.jsonl").write_text(line)
    code, out, err = run("score", folder, "--pairs-file", str(tmp_path / "pairs.jsonl"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --continuation (with or without --prompt), or --pairs-file"),
        (("--pairs-file", "x", "--continuation", "y"), "give --continuation (with or without --prompt)"),
        (("--pairs-file", "x", "--prompt", "y"), "--prompt goes with --continuation"),
        (("--pairs-file", "missing.jsonl"), "missing.jsonl: No such file"),
    ],
)
def test_bad_options(run, folder: str, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run("score", folder, *arguments)
    assert (code, out) == (2, "")
    assert message in err

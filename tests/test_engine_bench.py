"""Workloads, their replay, `jaxinfer bench`, and the throughput benchmark on other engines."""

import dataclasses
import inspect
import json
import math
import pathlib
import sys
import time
import types

import engine_cases as cases
import markov
import pytest

from benchmarks import llm, throughput
from jaxinfer.cli import bench, main
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.settings import Settings
from jaxinfer.engine.workload import Arrival, random_workload, read_workload, replay
from jaxinfer.sampling_params import SamplingParams


def test_random_workload_is_the_same_for_the_same_seed() -> None:
    def draw(seed: int, rate: float = 50.0) -> list[Arrival]:
        return random_workload(
            96,
            num_requests=400,
            rate=rate,
            prompt_tokens=(3, 5),
            output_tokens=(7, 7),
            params=SamplingParams(temperature=0.5),
            seed=seed,
        )

    arrivals = draw(1)
    assert arrivals == draw(1) != draw(2)
    assert {len(arrival.prompt) for arrival in arrivals} == {3, 4, 5}
    assert {arrival.params for arrival in arrivals} == {SamplingParams(temperature=0.5, max_tokens=7)}
    times = [arrival.seconds for arrival in arrivals]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400 / 50, rel=0.2)  # the standard deviation is a twentieth
    assert {arrival.seconds for arrival in draw(1, math.inf)} == {0.0}


def test_replay_submits_when_it_is_time_and_counts_from_then(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "workload.jsonl"
    lines = [
        {"token_ids": cases.prompt(4, 12), "arrival": 0.3, "params": {"max_tokens": 20}},
        {"prompt_tokens": 9},
        {"prompt": "<3>|<5>", "params": {"max_tokens": 2}},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    arrivals = read_workload(path, cases.model(), cases.params(max_tokens=5))
    assert [arrival.seconds for arrival in arrivals] == [0.0, 0.0, 0.3]
    with cases.engine() as engine:
        heard: list[int] = []
        start = time.perf_counter()
        assert replay(engine, arrivals, heard.append) == dict.fromkeys("012", "length")
        assert time.perf_counter() - start >= 0.3
        metrics = engine.metrics()
        assert sum(heard) == 3 and metrics.output_tokens == 20 + 5 + 2
        # As if everything had come ten seconds ago: the latencies know.
        engine.reset_metrics()
        engine.submit(cases.prompt(5), cases.params(), arrived=time.perf_counter() - 10)
        while engine.has_work:
            engine.step()
        assert engine.metrics().time_to_first_token.mean > 10


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"text": "a"}', "line 2: expected an object with one of prompt, token_ids, prompt_tokens"),
        ('{"prompt": "a", "token_ids": [1]}', "line 2: expected an object with one of"),
        ('{"prompt": 3}', "line 2: prompt is a string, token_ids a list of integers"),
        ('{"prompt_tokens": 0}', "line 2: prompt is a string, token_ids a list"),
        ('{"prompt_tokens": true}', "line 2: prompt is a string, token_ids a list"),
        ('{"prompt_tokens": 1000000000}', "prompt_tokens an integer from 1 to the context, 128"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('{"prompt": "a", "arrival": -1}', "line 2: arrival is -1; expected seconds from 0 on"),
        ('{"prompt": "a", "params": {"top_q": 1}}', "line 2: no sampling field 'top_q'"),
        ('{"prompt": "a", "params": 3}', "line 2: params is 3; expected an object"),
    ],
    ids=str,
)
def test_bad_lines_are_named(tmp_path: pathlib.Path, line: str, message: str) -> None:
    path = tmp_path / "workload.jsonl"
    path.write_text('{"prompt_tokens": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_workload(path, cases.model(), cases.params())
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no requests; give one JSON object a line"):
        read_workload(path, cases.model(), cases.params())


def test_file_that_is_not_utf8_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "workload.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(ValueError, match=r"workload.jsonl is not UTF-8 at byte 15; save it as UTF-8"):
        read_workload(path, cases.model(), cases.params())


def test_command_prints_a_table_and_json(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = markov.save(tmp_path / "model", {0: 1})
    sizes = ["--max-decode-batch", "1", "--max-prefill-tokens", "64", "--max-context", "64", "--requests", "3"]
    lengths = ["--prompt-tokens", "2", "9", "--output-tokens", "5", "5", "--rate", "100"]
    assert main(["bench", str(folder), *sizes, *lengths, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["submitted"], record["finished"], record["output_tokens"]) == (3, {"length": 3}, 15)
    assert record["compilations_after_warmup"] == 0
    assert record["time_per_output_token"]["p95"] > 0
    picture = tmp_path / "timeline.png"
    mixed = ["--policy", "mixed", "--timeline", str(picture), "--draft", "ngram", "--k", "2", "--no-warmup"]
    assert main(["bench", str(folder), *sizes, *lengths, *mixed]) == 0
    shown = capsys.readouterr().out
    assert "time per output token, ms" in shown and "accepted by position: " in shown and picture.exists()


def test_bench_makes_programs_for_its_workload_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three requests of 11 and 5 tokens on a model with a context of 64: a batch of 3 rows, a context of 15."""
    made: list[Settings] = []

    class Recorded(Engine):
        def warmup(self, **_: object) -> None:
            made.append(self.settings)
            raise ValueError("enough")

    monkeypatch.setattr(bench, "Engine", Recorded)
    folder = markov.save(tmp_path / "model", {0: 1})
    shape = ["--requests", "3", "--prompt-tokens", "11", "11", "--output-tokens", "5", "5"]
    assert main(["bench", str(folder), *shape, "--decode-order", "longest"]) == 2
    (settings,) = made
    assert settings.rules.decode_order == "longest"
    assert (settings.decode_rows, settings.max_context, settings.page_widths) == ((1, 3), 15, (1,))
    assert settings.rules.prefill_lengths == (64,)
    capsys.readouterr()
    # The lengths of its own fit a short context, and what does not fit is refused before anything is compiled.
    assert main(["bench", str(folder), "--requests", "3"]) == 2
    assert made[1].max_context <= 63 and "enough" in capsys.readouterr().err
    workload = tmp_path / "workload.jsonl"
    workload.write_text('{"prompt_tokens": 3}\n' + json.dumps({"token_ids": [1] * 65}))
    assert main(["bench", str(folder), "--workload", str(workload)]) == 2
    assert "prompt 1 has 65 tokens, but the context of" in capsys.readouterr().err
    workload.write_text('{"prompt_tokens": 3}\n{"prompt_tokens": 5, "params": {"logprobs": 2}}\n')
    options = ["--prefill-tile", "32", "--host-pages", "4"]
    assert main(["bench", str(folder), "--workload", str(workload), *options]) == 2
    assert (made[2].packed[0], made[2].host_pages) == ((3, 32, 64), 4)
    assert [layout.variant.num_logprobs for layout in made[2].layouts] == [None, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "0"], "error: --rate 0.0; expected a number above 0\n"),
        (["--requests", "-1"], "error: --requests -1; expected a number above 0\n"),
        (["--prompt-tokens", "9", "2"], "--prompt-tokens 9 2: expected two lengths of at least 1"),
        (["--output-tokens", "1", "999999999"], "the smaller first, and at most the context, 64"),
        (["--workload", "none.jsonl"], "none.jsonl: No such file"),
        (["--prefill-tile", "48"], ": expected multiples of --prefill-tile 48\n"),
        (["--host-pages", "4", "--no-prefix-cache"], "--host-pages needs the prefix cache"),
    ],
    ids=str,
)
def test_bad_options_are_one_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    folder = markov.save(tmp_path / "model", {0: 1})
    assert main(["bench", str(folder), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# --- The benchmark that other engines run too


@pytest.mark.parametrize("engine", ["vllm", "nanovllm"])
def test_throughput_runs_on_other_engines_by_another_import(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stand-ins with no more than the signatures of vLLM and nano-vllm; nothing of jaxinfer is needed, nor recorded."""

    @dataclasses.dataclass
    class Params:
        temperature: float = 1.0
        max_tokens: int = 64
        ignore_eos: bool = False

    class LLM:
        def __init__(self, model: str, **options: object) -> None:
            assert model == "folder"
            extra = {"load_format", "skip_tokenizer_init", "enable_prefix_caching"} if engine == "vllm" else set()
            assert options.keys() == {"max_model_len"} | extra and options["max_model_len"] == 64

        def generate(self, prompts: list, sampling_params: list[Params], use_tqdm: bool = True) -> list:
            given = [prompt["prompt_token_ids"] if engine == "vllm" else prompt for prompt in prompts]
            assert all(isinstance(token, int) for ids in given for token in ids)
            served.append((len(given), sum(params.max_tokens for params in sampling_params)))
            assert all(params.ignore_eos and params.temperature == 0.6 for params in sampling_params)
            return given

    served: list[tuple[int, int]] = []
    module = types.ModuleType(engine)
    module.LLM, module.SamplingParams = LLM, Params  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, engine, module)
    options = ["--engine", engine, "--model", "folder", "--requests", "5", "--longest", "32", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["throughput.py", *options])
    throughput.main()
    total = sum(throughput.workload(5, 32, 10_000)[1])
    assert served == [(1, 16), (5, total), (5, total)]
    assert capsys.readouterr().out.count(f"{total} output tokens in") == 2


def test_workload_of_the_throughput_benchmark_is_the_peers_one() -> None:
    prompts, outputs = throughput.workload(256, 1024, 10_000)
    assert (len(prompts), sum(outputs)) == (256, 133_966)
    assert min(map(len, prompts)) >= 100 and max(map(len, prompts)) <= 1024
    assert list(inspect.signature(llm.LLM.generate).parameters) == ["self", "prompts", "sampling_params", "use_tqdm"]

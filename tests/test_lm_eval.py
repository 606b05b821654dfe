"""The lm-evaluation-harness adapter against the harness' own `hf` model, recorded by `tests/oracle/make_lm_eval.py`."""

import asyncio
import dataclasses
import importlib.metadata
import json
import logging
import pathlib
import shutil
import threading
import tomllib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import lm_eval_tasks
import markov
import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'jaxinfer[eval]'")

from lm_eval.api.instance import Instance  # noqa: E402  (skipped above where there is none)
from lm_eval.api.registry import get_model, model_registry  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import jaxinfer.evaluation.lm_eval as adapter  # noqa: E402
from jaxinfer.evaluation.lm_eval import JaxinferLM  # noqa: E402
from jaxinfer.model import Model, load  # noqa: E402
from jaxinfer.tiers import TieredKV  # noqa: E402

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "lm_eval"
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
SETTINGS = sorted(EXPECTED["requests"])
TOLERANCE = 1e-3
"""Per log-likelihood, as issue 5 asks."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """The recorded model with each of its two tokenizers."""
    found = {}
    for tokenizer in ("plain", "bos"):
        folder = tmp_path_factory.mktemp(tokenizer)
        for source in (FOLDER / "model", FOLDER / tokenizer):
            shutil.copytree(source, folder, dirs_exist_ok=True)
        found[tokenizer] = dataclasses.replace(load(folder, dtype=jnp.float32, progress=False), name=tokenizer)
    return found


def adapter_for(models: dict[str, Model], name: str, **more: Any) -> JaxinferLM:
    recorded = EXPECTED["requests"][name]
    return JaxinferLM(models[recorded["tokenizer"]], **recorded["settings"], **more)


def instances(kind: str, recorded: list[dict[str, Any]]) -> list[Instance]:
    return [
        Instance(kind, {}, tuple(one["arguments"]), index, metadata=("requests", index, 1))
        for index, one in enumerate(recorded)
    ]


# --- Requests


@pytest.mark.parametrize("name", SETTINGS)
def test_token_ids_are_those_of_hf(models: dict[str, Model], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-evaluation-harness#1465, #3333, #1854: BOS missing or doubled, in all three kinds of requests."""
    model, recorded = adapter_for(models, name), EXPECTED["requests"][name]
    for one in recorded["loglikelihood"]:
        assert list(model._encode(*one["arguments"])) == one["ids"]
    for one in recorded["generate_until"]:
        context, options = one["arguments"]
        assert model._prompt(context, options["max_gen_toks"])[0] == one["ids"]
    windows: list[list[list[int]]] = []

    def remember(pairs: list[tuple[list[int], list[int]]]) -> Iterator[tuple[int, tuple[float, bool]]]:
        windows.extend([context, continuation] for context, continuation in pairs)
        return iter([(index, (-1.0, False)) for index in range(len(pairs))])

    monkeypatch.setattr(model, "_score", remember)
    rolling = recorded["loglikelihood_rolling"]
    counts = model.loglikelihood_rolling(instances("loglikelihood_rolling", rolling), disable_tqdm=True)
    assert windows == [pair for one in rolling for pair in one["ids"]]
    assert counts == [-len(one["ids"]) for one in rolling]
    assert any(len(one["ids"]) > 1 for one in rolling)  # a text longer than the context


@pytest.mark.parametrize("name", ["plain", "bos", "short"])
def test_answers_are_those_of_hf(models: dict[str, Model], name: str) -> None:
    model, recorded = adapter_for(models, name), EXPECTED["requests"][name]
    pairs = recorded["loglikelihood"]
    answers = model.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    for (logprob, is_greedy), one in zip(answers, pairs, strict=True):
        assert logprob == pytest.approx(one["answer"][0], abs=TOLERANCE)
        assert is_greedy == one["answer"][1]
    answers = model._loglikelihood_tokens([(("", ""), *one["ids"]) for one in recorded["tokens"]])
    for (logprob, is_greedy), one in zip(answers, recorded["tokens"], strict=True):
        assert logprob == pytest.approx(one["answer"][0], abs=TOLERANCE)
        assert is_greedy == one["answer"][1]
    assert {one["answer"][1] for one in recorded["tokens"]} == {True, False}
    texts = recorded["loglikelihood_rolling"]
    for logprob, one in zip(
        model.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True), texts, strict=True
    ):
        assert logprob == pytest.approx(one["answer"], abs=TOLERANCE)


def test_log_likelihoods_do_not_depend_on_how_many_are_asked_for(models: dict[str, Model]) -> None:
    """lm-evaluation-harness#704 (trap M5): one by one, in fours and in fives."""
    recorded = EXPECTED["requests"]["plain"]["loglikelihood"][:8]
    for size in (1, 4, 5):
        model, answers = adapter_for(models, "plain", batch_size=size), []
        for start in range(0, len(recorded), size):
            answers += model.loglikelihood(
                instances("loglikelihood", recorded[start : start + size]), disable_tqdm=True
            )
        for (logprob, _), one in zip(answers, recorded, strict=True):
            assert logprob == pytest.approx(one["answer"][0], abs=1e-4)


@pytest.mark.parametrize(("name", "reverse"), [("plain", False), ("plain", True), ("bos", False), ("short", True)])
def test_generated_texts_are_those_of_hf(models: dict[str, Model], name: str, reverse: bool) -> None:
    """lm-evaluation-harness#3587: requests with different `until` in one call, in both orders."""
    recorded = EXPECTED["requests"][name]["generate_until"][:: -1 if reverse else 1]
    model = adapter_for(models, name)
    texts = model.generate_until(instances("generate_until", recorded), disable_tqdm=True)
    assert texts == [one["answer"] for one in recorded]
    assert len({str(one["arguments"][1]["until"]) for one in recorded}) > 10


def test_a_tiered_cache_generates_and_says_that_it_scores_nothing(
    models: dict[str, Model], tmp_path: pathlib.Path
) -> None:
    recorded = EXPECTED["requests"]["plain"]
    tiered = dataclasses.replace(models["plain"], kv_dtype=TieredKV(recent=4096, int8=4096))  # nothing is as old
    model = JaxinferLM(tiered, samples_file=tmp_path / "samples.jsonl")
    texts = model.generate_until(instances("generate_until", recorded["generate_until"][:3]), disable_tqdm=True)
    assert texts == [one["answer"] for one in recorded["generate_until"][:3]]
    with pytest.raises(ValueError, match=r"only generate and stream work with a tiered cache"):
        model.loglikelihood(instances("loglikelihood", recorded["loglikelihood"][:1]), disable_tqdm=True)


def test_special_tokens_in_until_end_an_answer() -> None:
    """They are no part of the text, where they would never be found."""
    model = JaxinferLM(markov.model(markov.chain(0, 1, 2, 3, markov.EOS)))
    eos = markov.WORDS[markov.EOS]
    recorded: list[dict[str, Any]] = [
        {"arguments": ("A", {"until": [eos, "G"], "max_gen_toks": 9})},
        {"arguments": ("A", {"until": [eos], "max_gen_toks": 9})},
        {"arguments": ("A", {"until": [], "max_gen_toks": 2})},
    ]
    assert model.generate_until(instances("generate_until", recorded), disable_tqdm=True) == [
        "BCDEF",
        "BCDEFG",
        "BCDEF",
    ]


def test_repeated_requests_that_sample_differ_and_a_seed_repeats_them(models: dict[str, Model]) -> None:
    request = {"arguments": ("The horse has", {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12})}
    repeated = instances("generate_until", [request]) * 4
    model = adapter_for(models, "plain", seed=5)
    texts = model.generate_until(repeated, disable_tqdm=True)
    assert len(set(texts)) == 4
    assert model.generate_until(repeated, disable_tqdm=True) == texts


# --- Whole runs


@pytest.mark.parametrize("name", sorted(EXPECTED["tasks"]))
def test_tasks_end_as_with_hf(models: dict[str, Model], name: str) -> None:
    """Few shots, chats, templates, metrics; and lm-evaluation-harness#3106: the bootstrap ends though JAX is up."""
    chat = name.endswith(" chat")
    model = JaxinferLM(models[name.removesuffix(" chat")])
    results = lm_eval.simple_evaluate(
        model,
        tasks=lm_eval_tasks.tasks(),
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        bootstrap_iters=1000,
    )
    for task, expected in EXPECTED["tasks"][name].items():
        for sample, wanted in zip(results["samples"][task], expected["samples"], strict=True):
            assert [list(arguments) for arguments in sample["arguments"]] == wanted["arguments"]
            for got, response in zip(sample["filtered_resps"], wanted["responses"], strict=True):
                if task.startswith("say"):
                    assert got == response
                elif task == "stories":
                    assert got == pytest.approx(response, abs=TOLERANCE)
                else:
                    assert got[0] == pytest.approx(response[0], abs=TOLERANCE)
                    assert got[1] == response[1]
        for metric, value in expected["metrics"].items():
            exact = metric.startswith(("acc", "exact_match"))
            assert results["results"][task][metric] == (value if exact else pytest.approx(value, rel=TOLERANCE))
    assert results["results"]["last_word"]["perplexity_stderr,none"] > 0


def test_the_chat_template_is_rendered_as_hf_renders_it(models: dict[str, Model]) -> None:
    model = JaxinferLM(models["plain"])
    conversation = lm_eval_tasks.chat()
    assert model.apply_chat_template(conversation[:2]) == EXPECTED["chat"]["asked"]
    assert model.apply_chat_template(conversation, add_generation_prompt=False) == EXPECTED["chat"]["continued"]
    assert model.chat_template(True) == models["plain"].tokenizer.chat_template
    assert model.chat_template(False) is None


def test_a_template_that_trims_messages_or_has_no_place_for_a_system(
    models: dict[str, Model], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = models["plain"].tokenizer
    trimming = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.role }}] {{ m.content | trim }};{% endfor %}"
    )
    model = JaxinferLM(models["plain"])
    tokenizer.chat_templates["trimming"] = trimming
    try:
        assert model.chat_template("trimming") == trimming
        with caplog.at_level(logging.WARNING, logger="jaxinfer"):
            text = model.apply_chat_template(lm_eval_tasks.chat(), add_generation_prompt=False)
    finally:
        del tokenizer.chat_templates["trimming"]
    assert text == "[user] How many legs has a horse?;[assistant] It has"
    assert "without its system message" in caplog.text


# --- Going on


def test_an_interrupted_run_goes_on(
    models: dict[str, Model], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer is a line as soon as it is known, and is not computed again; half a line is."""
    path = tmp_path / "run" / "samples.jsonl"
    recorded = EXPECTED["requests"]["plain"]["loglikelihood"]
    requests = instances("loglikelihood", recorded)
    whole = adapter.scored_pairs
    computed: list[int] = []

    def interrupted(*arguments: Any, **options: Any) -> Iterator[Any]:
        for count, answer in enumerate(whole(*arguments, **options)):
            if count == 7:
                raise KeyboardInterrupt
            yield answer

    def counted(model: Model, pairs: Any) -> Iterator[Any]:
        computed.append(len(pairs))
        return whole(model, pairs)

    monkeypatch.setattr(adapter, "scored_pairs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        adapter_for(models, "plain", samples_file=path).loglikelihood(requests, disable_tqdm=True)
    lines = path.read_text().splitlines()
    assert len(lines) == 7
    path.write_text("\n".join(lines)[:-20])
    monkeypatch.setattr(adapter, "scored_pairs", counted)
    model = adapter_for(models, "plain", samples_file=path)
    answers = model.loglikelihood(requests, disable_tqdm=True)
    assert computed == [len(requests) - 6]
    for (logprob, is_greedy), one in zip(answers, recorded, strict=True):
        assert logprob == pytest.approx(one["answer"][0], abs=TOLERANCE)
        assert is_greedy == one["answer"][1]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["key"] for record in records}) == len(records) == len(requests)
    assert {"type": "loglikelihood", "task": "requests", "doc_id": 0, "idx": 0}.items() <= min(
        records, key=lambda record: record["idx"]
    ).items()
    again = adapter_for(models, "plain", samples_file=path)
    assert again.loglikelihood(requests, disable_tqdm=True) == answers
    assert computed == [len(requests) - 6, 0]
    adapter_for(models, "short", samples_file=path).loglikelihood(requests[:1], disable_tqdm=True)
    assert computed[-1] == 1  # other settings, other answers


def test_answers_of_other_weights_are_not_taken_for_these(models: dict[str, Model], tmp_path: pathlib.Path) -> None:
    """The same name, other numbers: a cache of int8, a folder written anew, packed while loading."""
    path = tmp_path / "samples.jsonl"
    requests = instances("loglikelihood", EXPECTED["requests"]["plain"]["loglikelihood"])[:2]
    plain = models["plain"]
    packed = load(FOLDER / "model", dtype=jnp.float32, quantize="int8", progress=False)
    other = plain.params.embed_tokens * 2
    others = [
        plain,
        dataclasses.replace(plain, kv_dtype=jnp.dtype("int8")),
        dataclasses.replace(plain, params=dataclasses.replace(plain.params, embed_tokens=other)),
        dataclasses.replace(plain, params=packed.params),
    ]
    for count, model in enumerate([*others, *others], 1):
        answers = JaxinferLM(model, samples_file=path).loglikelihood(requests, disable_tqdm=True)
        assert answers == JaxinferLM(model).loglikelihood(requests, disable_tqdm=True)
        assert len(path.read_text().splitlines()) == 2 * min(count, len(others))


def test_a_file_of_something_else_is_left_alone(models: dict[str, Model], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("milk\neggs\n")
    with pytest.raises(ValueError, match=r"notes\.txt line 1 is no answered sample"):
        adapter_for(models, "plain", samples_file=path)
    assert path.read_text() == "milk\neggs\n"


def test_the_cache_of_the_harness_fills_as_answers_come(models: dict[str, Model], tmp_path: pathlib.Path) -> None:
    from lm_eval.api.model import CachingLM

    cached = CachingLM(adapter_for(models, "plain"), str(tmp_path / "answers.db"))
    requests = instances("loglikelihood", EXPECTED["requests"]["plain"]["loglikelihood"][:3])
    cached.lm.loglikelihood(requests, disable_tqdm=True)
    assert len(cached.dbdict) == 3
    cached.dbdict.close()


# --- Registration and errors


def test_registered_as_jaxinfer() -> None:
    assert get_model("jaxinfer") is JaxinferLM
    assert "hf" in model_registry
    with (pathlib.Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        (name, value), *rest = tomllib.load(file)["project"]["entry-points"]["lm_eval.models"].items()
    assert (name, rest) == ("jaxinfer", [])
    assert importlib.metadata.EntryPoint(name, value, "lm_eval.models").load() is JaxinferLM
    adapter.register()  # twice is as good as once


def test_inside_an_event_loop_and_a_thread(models: dict[str, Model]) -> None:
    """InternLM/lmdeploy#1399: a notebook cell runs inside a loop."""
    model = adapter_for(models, "plain")
    requests = instances("loglikelihood", EXPECTED["requests"]["plain"]["loglikelihood"][:2])
    expected = model.loglikelihood(requests, disable_tqdm=True)

    async def cell() -> list[tuple[float, bool]]:
        return model.loglikelihood(requests, disable_tqdm=True)

    assert asyncio.run(cell()) == expected
    said: list[list[tuple[float, bool]]] = []
    thread = threading.Thread(target=lambda: said.append(model.loglikelihood(requests, disable_tqdm=True)))
    thread.start()
    thread.join()
    assert said == [expected]


def test_logits_that_are_not_finite_end_the_run_when_the_rest_is_kept(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "samples.jsonl"
    model = JaxinferLM(markov.with_nan_token(markov.model(markov.chain(0, 1, 2, 3)), 5), samples_file=path)
    recorded = [{"arguments": ("A", "|BC")}, {"arguments": (f"A|{markov.WORDS[5]}", "|BC")}]
    with pytest.raises(ValueError, match="not finite for 1 requests, the first in document 1 of requests"):
        model.loglikelihood(instances("loglikelihood", recorded), disable_tqdm=True)
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams=4: there is no beam search"),
        ({"typical_p": 0.5}, "generation option 'typical_p' is not known; known are do_sample, temperature, until"),
        ({"max_gen_toks": 96}, "max_gen_toks=96 leaves no room for a prompt in a context of 96"),
        ({"do_sample": True, "top_p": 2.0, "max_gen_toks": 9}, "top_p"),
    ],
)
def test_bad_generation_options(models: dict[str, Model], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapter_for(models, "plain").generate_until(
            instances("generate_until", [{"arguments": ("A", options)}]), disable_tqdm=True
        )


def test_bad_models_and_documents(models: dict[str, Model]) -> None:
    with pytest.raises(ValueError, match="has no tokenizer, and the harness asks in text"):
        JaxinferLM(markov.model({}, text=False))
    with pytest.raises(ValueError, match="max_length=97: expected 2 to the context of plain, 96"):
        JaxinferLM(models["plain"], max_length=97)
    long = [{"arguments": ("A", lm_eval_tasks.STORIES[2] * 3)}]
    with pytest.raises(ValueError, match="the context of plain is 96; leave the document out"):
        adapter_for(models, "plain").loglikelihood(instances("loglikelihood", long), disable_tqdm=True)
    with pytest.raises(ValueError, match="the continuation '' adds no token to its context 'A'"):
        adapter_for(models, "plain").loglikelihood(
            instances("loglikelihood", [{"arguments": ("A", "")}]), disable_tqdm=True
        )

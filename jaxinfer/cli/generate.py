"""`jaxinfer generate MODEL`: a single completion is streamed; several come with a progress bar, or as JSON lines."""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from checkpoints.progress import progress_bar
from jaxinfer.cli.options import json_line, loading, read_text, sampling_values, shown_name
from jaxinfer.generation import generate, stream
from jaxinfer.model import Model, load
from jaxinfer.request import Prompt
from jaxinfer.sampling_logprobs import Logprob
from jaxinfer.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Job:
    """A prompt before it meets a tokenizer: exactly one of text, token ids or chat messages."""

    params: SamplingParams
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


def run(options: argparse.Namespace) -> int:
    """Checks everything that needs no model, loads it, and generates."""
    if options.system is not None and not options.chat:
        raise ValueError("--system needs --chat, which is what has a place for it")
    if options.jsonl and options.prompt is not None:
        raise ValueError("--jsonl is for --prompts-file and standard input; with --prompt leave it out")
    jobs = list(_jobs(options))
    if not options.json and any(
        job.params.logprobs is not None or job.params.prompt_logprobs is not None for job in jobs
    ):
        raise ValueError("log-probabilities are only in the --json output; add --json")

    model = load(options.model, **loading(options), progress=not options.quiet)
    prompts = [_prompt(model, job, index) for index, job in enumerate(jobs)]
    params = [job.params for job in jobs]
    if options.json:
        return _print_json(model, jobs, prompts, params, options)
    return _print_text(model, prompts, params, options)


def _print_text(model: Model, prompts: list[Prompt], params: list[SamplingParams], options: argparse.Namespace) -> int:
    """A single completion as it comes; several in order, each under a heading, when all are there."""
    single = len(prompts) == 1 and params[0].n == 1
    texts: dict[tuple[int, int], list[str]] = {}
    failures = []
    speed = Speed()
    total = sum(row.n for row in params)
    shown = not single and not options.quiet
    with progress_bar(total=total, unit="completion", desc="Generating", shown=shown, leave=False) as bar:
        for delta in stream(model, prompts, params, max_batch_size=options.max_batch_size):
            speed.count(len(delta.token_ids))
            text = delta.text if model.tokenizer is not None else "".join(f"{token} " for token in delta.token_ids)
            if single:
                print(text, end="", flush=True)
            texts.setdefault((delta.prompt_index, delta.sample_index), []).append(text)
            bar.update(delta.finish_reason is not None)
            if delta.finish_reason == "error":
                failures.append((delta.prompt_index, str(delta.stop_reason)))
    if single:
        print()
    else:
        for (prompt, sample), pieces in sorted(texts.items()):
            heading = f"prompt {prompt}" + (f", completion {sample}" if params[prompt].n > 1 else "")
            print(f"--- {heading} ---", "".join(pieces), sep="\n")
    if not options.quiet:
        print(speed if single else speed.total(), file=sys.stderr)
    return _report(failures)


def _print_json(
    model: Model, jobs: Sequence[Job], prompts: list[Prompt], params: list[SamplingParams], options: argparse.Namespace
) -> int:
    speed = Speed()
    outputs = generate(model, prompts, params, max_batch_size=options.max_batch_size, progress=not options.quiet)
    failures = []
    for index, (job, output) in enumerate(zip(jobs, outputs, strict=True)):
        for completion in output.completions:
            speed.count(len(completion.token_ids))
            if completion.finish_reason == "error":
                failures.append((index, str(completion.stop_reason)))
        record = {
            "index": index,
            "prompt": _text(model, job),
            "prompt_token_ids": output.prompt_token_ids,
            "completions": [
                {
                    "text": completion.text,
                    "token_ids": completion.token_ids,
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                    "cumulative_logprob": completion.cumulative_logprob,
                    "logprobs": _tables(model, completion.logprobs),
                }
                for completion in output.completions
            ],
            "prompt_logprobs": _tables(model, output.prompt_logprobs),
        }
        print(json_line(record))
    if not options.quiet:
        print(speed.total(), file=sys.stderr)
    return _report(failures)


def _report(failures: Sequence[tuple[int, str]]) -> int:
    for prompt, reason in sorted(failures):
        print(f"error: prompt {prompt}: {reason}", file=sys.stderr)
    return 1 if failures else 0


def _tables(model: Model, tables: Sequence[Mapping[int, Logprob] | None] | None) -> list | None:
    """Log-probabilities as JSON: for each position a list of tokens, that of the text itself first.

    null is a prompt token's whose logits were not finite.
    """
    if tables is None:
        return None
    return [
        None
        if table is None
        else [
            {
                "token_id": token,
                "token": None
                if model.tokenizer is None
                else model.tokenizer.decode([token], skip_special_tokens=False),
                "logprob": score.logprob if math.isfinite(score.logprob) else None,
                "rank": score.rank,
            }
            for token, score in table.items()
        ]
        for table in tables
    ]


AT_ONCE_S = 0.01
"""Chunks within so many seconds were ready together: the time between is what reading them took."""


@dataclasses.dataclass
class Speed:
    """Counts tokens as they come, `count` being told of each chunk that has any."""

    start: float = dataclasses.field(default_factory=time.perf_counter)
    num_tokens: int = 0
    arrivals: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """When each chunk came, and how many tokens there were then."""

    def count(self, num_tokens: int) -> None:
        if num_tokens:
            self.num_tokens += num_tokens
            self.arrivals.append((time.perf_counter(), self.num_tokens))

    def __str__(self) -> str:
        """After a stream: the time to the first token, and the rate from the second chunk on, if more came later.

        The second runs while the first, of one token, is read, and may come with it: no time to divide by.
        """
        first = self.arrivals[0][0] if self.arrivals else time.perf_counter()
        words = f"[{self.num_tokens} tokens, first after {first - self.start:.2f} s"
        if len(self.arrivals) < 3:
            return f"{words}]"
        (since, before), (until, total) = self.arrivals[1], self.arrivals[-1]
        if until - since < AT_ONCE_S:
            return f"{words}]"
        return f"{words}, then {(total - before) / (until - since):.1f} tokens/s]"

    def total(self) -> str:
        """After a batch."""
        seconds = time.perf_counter() - self.start
        return f"[{self.num_tokens} tokens in {seconds:.2f} s, {self.num_tokens / seconds:.1f} tokens/s]"


def _text(model: Model, job: Job) -> str | None:
    """The prompt as text: what was given, or what the chat template made of messages; None for token ids."""
    if job.text is None and job.messages is not None and model.tokenizer is not None:
        return model.tokenizer.render_chat(job.messages)
    return job.text


def _prompt(model: Model, job: Job, index: int) -> Prompt:
    """What `jaxinfer.generate` takes."""
    if job.token_ids is not None:
        return list(job.token_ids)
    if job.messages is not None:
        if model.tokenizer is None:
            raise ValueError(f"prompt {index} is a chat, but {model.name} has no tokenizer; give token ids instead")
        try:
            return model.tokenizer.apply_chat_template(job.messages)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
    assert job.text is not None
    return job.text


def _jobs(options: argparse.Namespace) -> Iterator[Job]:
    """The prompts, from wherever they come, each with its sampling parameters."""
    values = sampling_values(options)
    shared = SamplingParams.from_dict(values)
    if options.jsonl or (options.prompts_file is not None and options.prompts_file.endswith(".jsonl")):
        name = "-" if options.prompts_file is None else options.prompts_file
        for number, line in enumerate(_lines(name), 1):
            yield _from_json(line, f"{shown_name(name)} line {number}", values, options)
        return
    if options.prompt is not None:
        texts = options.prompt
    elif options.prompts_file is not None:
        texts = _lines(options.prompts_file)
    elif sys.stdin.isatty():
        raise ValueError("no prompt; give --prompt or --prompts-file, or pipe a text in")
    else:
        texts = [read_text("-").removesuffix("\n")]
    for text in texts:
        yield _chat_or_text(text, shared, options)


def _chat_or_text(text: str, params: SamplingParams, options: argparse.Namespace) -> Job:
    if not options.chat:
        return Job(params, text=text)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return Job(params, text=text, messages=(*system, {"role": "user", "content": text}))


def _lines(name: str) -> list[str]:
    """Lines of a file that are not blank; `-` is standard input."""
    if name == "-" and sys.stdin.isatty():
        raise ValueError("standard input is a terminal; pipe the prompts in, or name a file")
    lines = [line for line in read_text(name).split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{shown_name(name)} holds no prompts; give one a line")
    return [line.removesuffix("\r") for line in lines]


def _from_json(line: str, where: str, values: dict[str, Any], options: argparse.Namespace) -> Job:
    """One line of a .jsonl file."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    kinds = ("prompt", "token_ids", "messages")
    if not isinstance(record, dict) or len(record.keys() & set(kinds)) != 1 or record.keys() - {*kinds, "params"}:
        raise ValueError(f"{where}: expected an object with one of {', '.join(kinds)}, and optionally params")
    own = record.get("params", {})
    if not isinstance(own, dict):
        raise ValueError(f"{where}: params is {own!r}; expected an object of sampling options")
    try:
        params = SamplingParams.from_dict(values | own)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    match record:
        case {"prompt": str(text)}:
            return _chat_or_text(text, params, options)
        case {"token_ids": list(ids)} if all(type(token) is int for token in ids):
            return Job(params, token_ids=tuple(ids))
        case {"messages": list(messages)} if messages and all(isinstance(message, dict) for message in messages):
            return Job(params, messages=tuple(messages))
    raise ValueError(f"{where}: prompt is a string, token_ids a list of integers, messages a list of objects")

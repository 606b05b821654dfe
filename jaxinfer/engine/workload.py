"""Requests with times of arrival: from a file or drawn at random, replayed against an engine."""

import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxinfer.engine.engine import Engine
from jaxinfer.model import Model
from jaxinfer.request import Prompt
from jaxinfer.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request and when it comes, in seconds from the start."""

    seconds: float
    prompt: Prompt
    params: SamplingParams


def random_workload(
    num_tokens: int,
    *,
    num_requests: int,
    rate: float = math.inf,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    params: SamplingParams,
    seed: int = 0,
) -> list[Arrival]:
    """Prompts of random ids below `num_tokens`, lengths drawn uniformly from both ranges, ends included.

    Arrivals are a Poisson process of `rate` requests a second; all at once if it is infinite. `params` are everybody's,
    but for max_tokens. The same seed gives the same workload.
    """
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0 / rate, num_requests) if math.isfinite(rate) else np.zeros(num_requests)
    prompts = rng.integers(*prompt_tokens, num_requests, endpoint=True)
    outputs = rng.integers(*output_tokens, num_requests, endpoint=True)
    return [
        Arrival(
            float(when),
            rng.integers(0, num_tokens, length).tolist(),
            dataclasses.replace(params, max_tokens=int(most)),
        )
        for when, length, most in zip(np.cumsum(gaps), prompts, outputs, strict=True)
    ]


def read_workload(path: str | os.PathLike[str], model: Model, params: SamplingParams) -> list[Arrival]:
    """Reads JSON lines: one of `prompt` (text), `token_ids`, or `prompt_tokens` (that many random ids); optionally
    `arrival` in seconds (default 0) and `params`, sampling fields that replace those of `params`.

    Raises ValueError naming the line and what is wrong with it.
    """
    rng = np.random.default_rng(0)
    arrivals = []
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    for number, line in enumerate(text.split("\n"), 1):  # JSON may hold other line ends as they are
        if not line.strip():
            continue
        where = f"{os.fspath(path)} line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        try:
            arrivals.append(_arrival(record, model, params, rng))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not arrivals:
        raise ValueError(f"{os.fspath(path)} holds no requests; give one JSON object a line")
    return sorted(arrivals, key=lambda arrival: arrival.seconds)


def _arrival(record: Any, model: Model, params: SamplingParams, rng: np.random.Generator) -> Arrival:
    kinds = {"prompt", "token_ids", "prompt_tokens"}
    if not isinstance(record, dict) or len(record.keys() & kinds) != 1 or record.keys() - kinds - {"arrival", "params"}:
        raise ValueError("expected an object with one of prompt, token_ids, prompt_tokens; optionally arrival, params")
    seconds, own = record.get("arrival", 0.0), record.get("params", {})
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"arrival is {seconds!r}; expected seconds from 0 on")
    if not isinstance(own, dict):
        raise ValueError(f"params is {own!r}; expected an object of sampling fields")
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    row = SamplingParams.from_dict(fields | own)
    longest = model.config.max_position_embeddings
    match record:
        case {"prompt": str(text)}:
            return Arrival(float(seconds), text, row)
        case {"token_ids": list(ids)}:
            return Arrival(float(seconds), ids, row)
        case {"prompt_tokens": int(count)} if not isinstance(count, bool) and 0 < count <= longest:
            return Arrival(float(seconds), rng.integers(0, model.config.num_tokens, count).tolist(), row)
    raise ValueError(
        f"prompt is a string, token_ids a list of integers, prompt_tokens an integer from 1 to the context, {longest}"
    )


def replay(
    engine: Engine, arrivals: Sequence[Arrival], on_finish: Callable[[int], object] | None = None
) -> dict[str, str]:
    """Submits each request at its time, whatever the engine is doing, and runs until all have ended.

    Latencies in the engine's metrics count from the time of arrival. `on_finish(count)` hears of completions that have
    ended. Returns the finish reason of each request by its id, which is its number in `arrivals`. `arrivals` must be in
    order of time.
    """
    start = time.perf_counter()
    reasons: dict[str, str] = {}
    following = 0
    while following < len(arrivals) or engine.has_work:
        now = time.perf_counter() - start
        while following < len(arrivals) and arrivals[following].seconds <= now:
            arrival = arrivals[following]
            engine.submit(arrival.prompt, arrival.params, request_id=str(following), arrived=start + arrival.seconds)
            following += 1
        if not engine.has_work:
            time.sleep(arrivals[following].seconds - now)
            continue
        ended = [delta for delta in engine.step() if delta.finish_reason is not None]
        reasons |= {str(delta.request_id): str(delta.finish_reason) for delta in ended}
        if ended and on_finish is not None:
            on_finish(len(ended))
    return reasons

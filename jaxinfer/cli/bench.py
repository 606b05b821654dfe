"""`jaxinfer bench MODEL`: serves a workload with the engine and prints latencies, rates and how full everything was."""

import argparse
import dataclasses

import jax

from checkpoints.progress import progress_bar
from jaxinfer.batch import cache_tokens
from jaxinfer.cli.options import json_line, loading
from jaxinfer.cli.output_files import check_picture
from jaxinfer.cli.spec_bench import make_draft
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.settings import default_decode_batch
from jaxinfer.engine.workload import random_workload, read_workload, replay
from jaxinfer.generation import requests_for
from jaxinfer.model import load
from jaxinfer.sampling_params import SamplingParams


def run(options: argparse.Namespace) -> int:
    """Loads, warms up, replays, prints."""
    params = SamplingParams(temperature=options.temperature, ignore_eos=True, seed=options.seed)
    on_cpu = jax.default_backend() == "cpu"
    if options.requests is None:
        options.requests = 8 if on_cpu else 64
    for name, value in (("--rate", options.rate), ("--requests", options.requests)):
        if not value > 0:
            raise ValueError(f"{name} {value}; expected a number above 0")
    if options.host_pages and options.no_prefix_cache:
        raise ValueError("--host-pages needs the prefix cache, which is what finds them; leave out --no-prefix-cache")
    if options.seed < 0:
        raise ValueError(f"--seed {options.seed}; expected an integer of at least 0")
    if options.draft is None and options.k is not None:
        raise ValueError(f"--k {options.k} goes with --draft, which says what drafts; give both")
    check_picture("--timeline", options.timeline)
    shown = not options.quiet
    random_weights = {} if options.random_weights is None else {"random_weights": options.random_weights}
    model = load(options.model, **loading(options), progress=shown, **random_weights)
    if options.workload is not None:
        arrivals = read_workload(options.workload, model, params)
    else:
        context = model.config.max_position_embeddings
        prompts, outputs = ((16, 128), (16, 32)) if on_cpu else ((100, 1024), (100, 1024))
        arrivals = random_workload(
            model.config.num_tokens,
            num_requests=options.requests,
            rate=options.rate,
            prompt_tokens=_bounds("--prompt-tokens", options.prompt_tokens, prompts, context),
            output_tokens=_bounds("--output-tokens", options.output_tokens, outputs, context),
            params=params,
            seed=options.seed,
        )
    # Checked before anything is compiled, and nothing is compiled for longer or more requests than there are.
    requests = requests_for(model, [one.prompt for one in arrivals], [one.params for one in arrivals])
    config = EngineConfig(
        max_decode_batch=min(len(requests), default_decode_batch())
        if options.max_decode_batch is None
        else options.max_decode_batch,
        max_prefill_tokens=options.max_prefill_tokens,
        max_context=max(map(cache_tokens, requests)) if options.max_context is None else options.max_context,
        decode_chunk=options.decode_chunk,
        decode_stall_ms=options.decode_stall_ms,
        decode_order=options.decode_order,
        policy=options.policy,
        prefill_tile=options.prefill_tile,
        prefix_cache=False if options.no_prefix_cache else None,
        host_pages=options.host_pages,
        sampling=tuple(dict.fromkeys(dataclasses.replace(one.params, max_tokens=None) for one in arrivals)),
    )
    draft = None if options.draft is None else make_draft(model, options.draft, 4 if options.k is None else options.k)
    with Engine(model, config, draft=draft) as engine:
        if not options.no_warmup:
            engine.warmup(progress=shown)
        engine.reset_metrics()
        with progress_bar(total=len(requests), unit="completion", desc="Serving", shown=shown, leave=False) as bar:
            replay(engine, arrivals, bar.update)
        metrics = engine.metrics()
        if options.timeline is not None:
            engine.plot_timeline(options.timeline)
    print(json_line(dataclasses.asdict(metrics)) if options.json else metrics)
    return 0


def _bounds(name: str, given: list[int] | None, default: tuple[int, int], context: int) -> tuple[int, int]:
    """The lengths given, or the default ones, of which prompt and output may have half of the context each."""
    if given is None:
        low, high = default
        return min(low, context // 2), min(high, context // 2)
    low, high = given
    if not 1 <= low <= high <= context:
        raise ValueError(
            f"{name} {low} {high}: expected two lengths of at least 1, the smaller first, and at most the context, "
            f"{context}"
        )
    return low, high

"""The engine: continuous batching over one pool of cache pages, with prefill and decode as separate kinds of work.

    import jaxinfer as ji
    model = ji.load("smollm2-135m-instruct")
    with ji.Engine(model, ji.EngineConfig(max_decode_batch=64)) as engine:
        engine.warmup()                                   # optional: compile now, in threads, not while serving
        outputs = engine.generate(prompts, params)        # a batch: prompts first, a bar with rates
        for delta in engine.stream("Once upon", params):  # one reader; several streams share the device
            print(delta.text, end="", flush=True)
        print()
        scores = engine.score(questions, answers)         # log-likelihoods; prefixes are computed once and kept
        print(engine.metrics())                           # latencies, rates, pages, compilations
        engine.plot_timeline("timeline.png")              # prefill and decode programs over time (jaxinfer[plot])

The results are those of `ji.generate`: a request's tokens depend on itself and its seed, not on its company, on the
order of arrival, on a cached prefix or on a preemption (in float32; in 16 bits up to near-ties, since a prompt may be
computed in other pieces).

Driving it yourself. `submit` queues a request and returns its id; `step` dispatches a round of work and returns the
news (`Delta`) of submitted requests, each with its `request_id`; `abort` ends one. `stream_async` is an async iterator
for servers. Streams, batches and submits may be used at once, from several threads.

    engine.submit(prompt, params, request_id="42", callback=print)
    while engine.has_work:
        for delta in engine.step():
            ...

What a round does. Prompts wait in a queue, first come, first served; sequences with a first token are decoded together,
`decode_chunk` steps at a time, in one program. While somebody reads along, at most `decode_stall_tokens` of prompts (or
`decode_stall_ms`) are computed between two chunks, so a long prompt comes in pieces and nobody's text stops; during
`generate` prompts go first. A chunk runs while the one before it is read: the host decides on stop strings and arrivals
one chunk late. `policy="mixed"` is one queue in which prompts always go first, as a baseline to measure against.

Batches. For throughput alone, `decode_order="longest"` decodes those with most of their `max_tokens` to come, as many
as it takes for all to end together: no step has few rows, which would cost nearly what many do, but short answers come
late. On a GPU with a kernel for prompts `prefill_tile` fills prefill calls with prompts of any lengths, and needs few
programs for it.

Speculation. `Engine(model, config, draft=ji.NgramDraft(k=4))`, a `ModelDraft`, a `SelfDraft`, or a `Speculation` with
a policy of its own, turns decode chunks into ones that draft, verify and accept: the results stay what they are (greedy
and seeded requests their tokens, others their distribution), preempted, forked and with cached prefixes too. Chunks
have fewer steps then, half or a quarter, each of 1 to k + 1 tokens. The adaptive policy keeps a controller for each of
`decode_rows`: it drafts while the measured acceptance and step times say that it pays, says in the log when it stops
(large batches) and starts again, and each length that it may choose is a program that `warmup` compiles. A draft with a
cache of its own has it in pages numbered as the target's: the pool is smaller by it, a cached prefix is cached for
both, and while nothing is drafted the draft computes nothing; what it missed it catches up on before the next chunk
that drafts. A request needs places for k tokens behind its last. `metrics().speculation` has acceptance by position,
accepted lengths, steps and the time of drafting, verifying and catching up.

Memory. The pool takes `memory_fraction` of what is free when the engine is made, or `num_pages`; `close`, or leaving
the `with` block, gives it back at once, and the weights go with the model (`del model`). Pages of finished requests
stay known by their tokens: prompts that begin the same skip that part (`prefix_cache`). Completions of one request
(n > 1) share the pages of its prompt. When pages run out the latest arrival gives way and is computed again later.
`host_pages` adds a second tier in pinned host memory for what the pool evicts, of preempted sequences too: it comes
back when it is asked for, if copying takes less time (measured by `warmup`) than computing does at the rate of late. A
request that could never fit is refused (`RequestTooLong`); what is wrong with a request ends that request alone: NaN in
its logits or an exception in its callback with finish reason "error", `abort` and closed streams with "abort".

Tiers. A model loaded with `kv_dtype="tiered"` has its cache in tiers here as in `ji.generate`: the newest tokens of a
sequence as they are, older pages in int8, the oldest in int4. Each tier has a pool of its own (`tier_pages`, or shared
out of `memory_fraction`); a round begins with the moves of pages that have aged, and computes one piece of a prompt at
most. Requests are admitted, and preempted, by the pages of each tier, and `metrics().tier_pages_owned` counts them.
Completions of one request share the pages of its prompt, wherever those are. There is no prefix cache: what an older
page holds is what its sequence's length has made of it. Tokens are those of `generate` where prompts are cut into the
same pieces and chunks have as many steps; a sequence that was preempted is computed in other pieces, and may go on
differently by what rounding does. A draft, `host_pages`, `prefix_cache=True`, `num_pages`, `prefill_tile` and `score`
are refused.

Compilation. Programs exist in a few sizes (`prefill_lengths`, `prefill_rows`, `decode_rows`); fewer sizes compile
sooner, more waste less padding. `sampling` holds examples of what will be asked for: a request that needs more (say,
logprobs) compiles when it comes, as `score` does for its shapes, and `metrics().compilations_after_warmup` counts it.

`jaxinfer bench MODEL` serves a made-up or recorded workload and prints the metrics. Modules: `pages`, `host_pages`,
`prefix_cache`, `sequence`, `rules`, `seats`, `scheduler` (plain Python); `layout`, `config`, `settings`, `rows`,
`programs`, `page_table`, `calls`, `first_rows`, `work`, `runner`, `host_store` (the device); `jobs`, `core`, `readers`,
`engine` (requests and rounds), `scoring`; `metrics`, `snapshot`, `timeline`, `workload`; with a draft `drafting` (the
policy at work), `drafting_runner`, `drafting_programs`, `drafting_rows` (the device), `drafting_metrics`; with tiers
`tiering` (memory), `tiered_scheduler`, `tiered_runner`.

What the engine refuses has names (`from jaxinfer.engine import EngineClosed`), all of them ValueErrors: `EngineClosed`,
`DuplicateRequest`, `UnknownRequest`, which are `EngineError`s, and `RequestTooLong`.
"""

from jaxinfer.engine.errors import DuplicateRequest as DuplicateRequest
from jaxinfer.engine.errors import EngineClosed as EngineClosed
from jaxinfer.engine.errors import EngineError as EngineError
from jaxinfer.engine.errors import RequestTooLong as RequestTooLong
from jaxinfer.engine.errors import UnknownRequest as UnknownRequest

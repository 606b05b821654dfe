"""The functional front door: `generate` and `stream` for prompts, `logits` for teacher-forced scores."""

from collections.abc import Generator, Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from checkpoints.progress import BEFORE_TOKENS, progress_bar
from jaxinfer import kv_cache, steps, tiered_batch
from jaxinfer.batch import PAGE_SIZE, Batch, Limits, bucket, cache_tokens, pool_pages
from jaxinfer.memory import free_device_bytes, free_host_bytes, shown_bytes
from jaxinfer.model import Model, check_loaded
from jaxinfer.outputs import Delta, RequestOutput
from jaxinfer.request import Prompt, Request, encode_prompt, list_prompts, per_prompt
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sampling_state import request_seed
from jaxinfer.speculative.batch import SpeculativeBatch
from jaxinfer.speculative.proposer import Draft
from jaxinfer.speculative.speculation import Speculation, as_speculation
from jaxinfer.tiered_batch import TieredBatch
from jaxinfer.tiers import TieredKV


def generate(
    model: Model,
    prompts: Prompt | Iterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams] | None = None,
    *,
    max_batch_size: int = 64,
    progress: bool = False,
    draft: Draft | Speculation | None = None,
) -> list[RequestOutput]:
    """Generates completions of every prompt and returns one RequestOutput a prompt, in order.

    `prompts` are strings or lists of token ids (one prompt may stand alone); `params` is one SamplingParams for all or
    one for each. Up to `max_batch_size` completions run at once, fewer where the KV cache would not fit. Every prompt
    and parameter is checked before anything runs: ValueError names the first that is wrong and the remedy.

    `draft` turns on speculative decoding (`NgramDraft`, `ModelDraft`, `SelfDraft`, or a `Speculation` with more options
    and a report): same results, several tokens a step. Greedy and seeded completions keep their tokens (in float32; in
    16 bits up to near-ties), unseeded ones their distribution.
    """
    check_loaded(model)
    requests = requests_for(model, prompts, params)
    speculation = None if draft is None else as_speculation(draft)
    groups = _groups(model, requests, max_batch_size, speculation)
    options = {"unit": "request", "desc": "Generating", "postfix": BEFORE_TOKENS, "leave": False}
    with progress_bar(total=len(requests), shown=progress, **options) as bar:
        num_tokens = 0
        for delta in _run(model, groups, speculation):
            num_tokens += len(delta.token_ids)
            bar.update(delta.finish_reason is not None)
            bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
    by_prompt: dict[int, list[Request]] = {}
    for request in requests:
        by_prompt.setdefault(request.prompt_index, []).append(request)
    return [
        RequestOutput(
            prompt_token_ids=samples[0].prompt,
            completions=tuple(sample.completion() for sample in samples),
            prompt_logprobs=samples[0].prompt_logprobs(),
        )
        for _, samples in sorted(by_prompt.items())
    ]


def stream(
    model: Model,
    prompts: Prompt | Iterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams] | None = None,
    *,
    max_batch_size: int = 64,
    draft: Draft | Speculation | None = None,
) -> Generator[Delta, None, None]:
    """As `generate`, but yields a `Delta` whenever a completion has new tokens. Closing the iterator stops the work.

    Arguments are checked when this is called, not when the first delta is asked for.
    """
    check_loaded(model)
    speculation = None if draft is None else as_speculation(draft)
    return _run(model, _groups(model, requests_for(model, prompts, params), max_batch_size, speculation), speculation)


def logits(
    model: Model, token_ids: Sequence[Sequence[int]] | np.ndarray | Array
) -> Float32[Array, "batch tokens vocab"]:
    """Teacher-forced float32 logits: entry [b, t] scores the token that follows `token_ids[b, :t + 1]`.

    `token_ids` is int [batch, tokens], all rows of one length. Raises ValueError for ids outside the vocabulary, rows
    of different lengths, or more tokens than the context holds.
    """
    check_loaded(model)
    try:
        tokens = np.asarray(token_ids)
    except ValueError:
        raise ValueError("token_ids has rows of different lengths; score them one length at a time") from None
    if tokens.ndim != 2 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"token_ids is {tokens.dtype}{list(tokens.shape)}; expected integers [batch, tokens], not empty"
        )
    for row, ids in enumerate(tokens):
        encode_prompt(model, ids.tolist(), row)
    batch, length = tokens.shape
    padded = np.zeros((bucket(batch), bucket(length, 64)), np.int32)
    padded[:batch, :length] = tokens
    lengths = np.where(np.arange(len(padded)) < batch, length, 0).astype(np.int32)
    result = steps.full_logits(model.params, jnp.asarray(padded), jnp.asarray(lengths), config=model.config)
    return result[:batch, :length]


def requests_for(
    model: Model, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams] | None
) -> list[Request]:
    """One request for each completion, all arguments checked."""
    listed = list_prompts(prompts)
    requests = []
    for index, (prompt, row) in enumerate(zip(listed, per_prompt(params, len(listed)), strict=True)):
        ids = encode_prompt(model, prompt, index)
        row.validate_for(model.config.num_tokens)
        seed = request_seed(row)
        requests += [Request.create(model, ids, row, index, sample, seed) for sample in range(row.n)]
    return requests


def _groups(
    model: Model, requests: Sequence[Request], max_batch_size: int, speculation: Speculation | None = None
) -> list[list[Request]]:
    """Cuts requests into batches whose caches fit. Raises ValueError for a request that does not fit alone, and for a
    draft that does not fit the model."""
    if type(max_batch_size) is not int or max_batch_size < 1:
        raise ValueError(f"max_batch_size={max_batch_size!r}; expected an integer of at least 1")
    budget = _free_bytes()
    if speculation is not None:
        speculation.draft.check(model, max((cache_tokens(request) for request in requests), default=0))
        if isinstance(model.kv_dtype, TieredKV):
            raise ValueError("speculative decoding does not work with a tiered cache: load with kv_dtype='int8', say")

    def cost(num_rows: int, longest: int) -> int:
        if isinstance(model.kv_dtype, TieredKV):
            return tiered_batch.num_bytes(model, model.kv_dtype, num_rows, longest, Limits.default())
        page_bytes = kv_cache.bytes_per_token(model.config, model.cache_dtype)
        spare_tokens = 0
        if speculation is not None:
            page_bytes += speculation.draft.bytes_per_token
            spare_tokens = speculation.draft.k
        return pool_pages(num_rows, longest, spare_tokens) * page_bytes * PAGE_SIZE

    groups: list[list[Request]] = []
    longest = 0  # of the last group
    for request in requests:
        own = cache_tokens(request)
        if cost(1, own) > budget:
            raise ValueError(
                f"prompt {request.prompt_index} with max_tokens={request.max_tokens} needs "
                f"{shown_bytes(cost(1, own))} of KV cache and {shown_bytes(budget)} are free; "
                "lower max_tokens or shorten the prompt"
            )
        joined = max(longest, own)
        if groups and len(groups[-1]) < max_batch_size and cost(len(groups[-1]) + 1, joined) <= budget:
            groups[-1].append(request)
            longest = joined
        else:
            groups.append([request])
            longest = own
    return groups


def _run(
    model: Model, groups: Sequence[Sequence[Request]], speculation: Speculation | None
) -> Generator[Delta, None, None]:
    """Runs batch after batch. No name holds a batch: its cache is gone before the next one's is allocated.

    The longest prompts have the first rows, with which attention's kernels begin.
    """
    for requests in groups:
        group = sorted(requests, key=lambda request: -len(request.prompt))
        if speculation is None:
            batch = TieredBatch if isinstance(model.kv_dtype, TieredKV) else Batch
            yield from batch(model, group, Limits.default()).run()
        else:
            yield from SpeculativeBatch(model, group, Limits.default(), speculation).run()


def _free_bytes() -> int:
    """Bytes a new cache may take: what the device's allocator has left, less a tenth for activations."""
    free = free_device_bytes()
    return free_host_bytes() // 2 if free is None else int(0.9 * free)

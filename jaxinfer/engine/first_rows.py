"""What sequences whose prompts are computed bring into the decode state: host arrays, nothing on a device."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.engine.layout import SamplerLayout
from jaxinfer.engine.rows import STOP_PLACES
from jaxinfer.engine.sequence import Sequence as Track
from jaxinfer.loop import DecodeState
from jaxinfer.request import Request
from jaxinfer.sampling_state import build_sampling_state


def first_rows(
    config: ModelConfig,
    tracks: Sequence[Track],
    requests: Mapping[Track, Request],
    *,
    rows: int,
    layout: SamplerLayout,
) -> DecodeState:
    """The state of sequences before their next token is sampled, padded to `rows`; padding is done."""
    padding = rows - len(tracks)
    mine = [requests[sequence] for sequence in tracks]
    sampling, _ = build_sampling_state(
        [request.params for request in mine],
        [request.prompt for request in mine],
        vocab_size=config.vocab_size,
        num_tokens=config.num_tokens,
        eos_token_ids=config.eos_token_ids,
        batch_size=rows,
        seeds=[request.seed for request in mine],
        sample_indices=[request.sample_index for request in mine],
        output_token_ids=[sequence.tokens[sequence.num_prompt :] for sequence in tracks],
        variant=layout.variant,
        places=layout.places,
    )

    def ints(values: Iterable[int]) -> np.ndarray:
        return np.array([*values, *[0] * padding], np.int32)

    stop_ids = np.full((rows, STOP_PLACES), -1, np.int32)
    for row, request in enumerate(mine):
        known = sorted(request.stop_ids)[:STOP_PLACES]
        stop_ids[row, : len(known)] = known
    arrays: dict[str, Any] = {
        "tokens": np.zeros(rows, np.int32),
        "positions": ints(len(sequence.tokens) for sequence in tracks),
        "num_generated": ints(sequence.num_generated for sequence in tracks),
        "max_tokens": ints(sequence.max_tokens for sequence in tracks),
        "stop_ids": stop_ids,
        "context_lengths": ints(sequence.num_prompt + max(sequence.max_tokens - 1, 0) for sequence in tracks),
        "done": np.arange(rows) >= len(tracks),
    }
    return DecodeState(sampling=sampling, **arrays)

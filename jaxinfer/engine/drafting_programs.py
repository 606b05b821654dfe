"""The compiled programs of an engine with a draft: those that decode know of it, and it has some of its own."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.engine.drafting_rows import DraftingState, catch_up_rows, draft_rows, seat_rows, speculate_rows
from jaxinfer.engine.layout import SamplerLayout
from jaxinfer.engine.programs import Programs, Size, ints, shapes_key, shapes_of, state_shapes
from jaxinfer.engine.settings import Settings
from jaxinfer.model import Model
from jaxinfer.sampling_state import SamplingState
from jaxinfer.speculative.loop import Method, steps_of
from jaxinfer.speculative.proposer import Draft, Wanted
from jaxinfer.tiers import KVCache


class DraftingPrograms(Programs):
    """`Programs` with a draft. Decoding without drafted tokens is the same program with a length of 0."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        cache: KVCache,
        drafting: DraftingState,
        method: Method,
        draft: Draft,
        draft_params: Any,
    ) -> None:
        super().__init__(model, settings, cache)
        self.method, self.draft = method, draft
        self._drafting, self._draft_params = shapes_of(drafting), shapes_of(draft_params)
        self._draft_key = (method, draft.draws, *shapes_key((self._drafting, self._draft_params)))

    def expected(self) -> Iterable[Size]:
        yield from super().expected()
        for rows in self.settings.prefill_rows:
            yield Size("seat", rows=rows)
        if self.draft.has_own_cache and self.settings.spare_tokens:
            for rows, length in self.prefill_sizes():
                for from_empty in (True, False):
                    yield Size("catch_up", rows, length, from_empty=from_empty)
        if self.draft.draws and self.settings.spare_tokens:
            for rows in self.settings.decode_rows:
                yield Size(
                    "draft", rows, width=self.settings.widths_of(rows)[0], num_drafted=self.settings.spare_tokens
                )

    def _key_of(self, size: Size) -> tuple[object, ...]:
        key = super()._key_of(size)
        return (*key, self._draft_key) if size.kind in ("seat", "catch_up", "draft", "decode") else key

    def wanted(self, num_drafted: int, layout: SamplerLayout) -> Wanted:
        """What a step wants. Rows that may draw are judged by the draft's distributions, if it has any."""
        judged = not layout.variant.greedy or self.method.acceptance.needs_logits
        return Wanted(num_drafted, layout.variant, num_drafted > 0 and self.draft.draws and judged)

    def _lower(self, size: Size) -> Any:
        settings, config, rows = self.settings, self.config, size.rows
        slots = settings.rules.max_sequences
        if size.kind == "seat":
            history = ints(rows, self._drafting.history.shape[1])
            return seat_rows.lower(self._drafting, ints(rows), history, jax.ShapeDtypeStruct((rows,), jnp.bool_))
        if size.kind == "catch_up":
            state = state_shapes(slots, vocab_size=config.vocab_size, layout=settings.layouts[0])
            return catch_up_rows.lower(
                self._draft_params,
                dataclasses.replace(state, sampling=SamplingState()),  # plays no part: one program serves all layouts
                self._drafting,
                ints(rows),
                ints(rows, settings.page_widths[-1]),
                ints(rows),
                proposer=self.method.proposer,
                chunk=size.length,
                from_empty=size.from_empty,
            )
        if size.kind == "draft":
            return draft_rows.lower(
                self._draft_params,
                self._cache,
                state_shapes(slots, vocab_size=config.vocab_size, layout=settings.layouts[0]),
                self._drafting,
                ints(rows),
                ints(rows, size.width),
                proposer=self.method.proposer,
                wanted=self.wanted(size.num_drafted, settings.layouts[0]),
            )
        if size.kind == "decode":
            assert size.layout is not None
            return speculate_rows.lower(
                self._params,
                self._draft_params,
                self._cache,
                state_shapes(slots, vocab_size=config.vocab_size, layout=size.layout),
                self._drafting,
                ints(rows),
                ints(rows, size.width),
                method=self.method,
                wanted=self.wanted(size.num_drafted, size.layout),
                num_steps=steps_of(settings.rules.decode_chunk, size.num_drafted),
            )
        return super()._lower(size)

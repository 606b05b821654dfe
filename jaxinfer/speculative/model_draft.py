"""A model that drafts: a smaller one with pages of its own, or the target itself in another form, sharing its pages."""

import dataclasses
import functools
import typing

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxinfer import decoder, kv_cache
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.model import Model
from jaxinfer.request import RequestTooLong
from jaxinfer.sampling import draw_logits, processed_logits, sample
from jaxinfer.sampling_state import SamplerVariant, SamplingState
from jaxinfer.speculative.acceptance import Proposal
from jaxinfer.speculative.compatibility import check_model, check_tokens, tell_of_shapes, warn_of_families
from jaxinfer.speculative.ngram import check_k
from jaxinfer.speculative.proposer import Rows, Wanted, at_places, fit_vocabulary, idle_safe, newest
from jaxinfer.steps import prefill_positions
from jaxinfer.tokens import Tokens
from pallas_kernels.next_token import next_token, next_token_refusal


@typing.no_type_check  # JAX rebuilds pytrees around placeholders, as in `lower`
@flax.struct.dataclass
class DraftCache:
    """A draft's own pages, numbered as the target's."""

    cache: PagedKVCache
    lengths: Int32[Array, " batch"]
    """Leading tokens of each row whose keys and values are in the pages."""


class ModelDraft:
    """A smaller model that drafts for a larger one, with a cache of its own in pages numbered as the target's.

    The models may differ in size, depth, heads, context and family. Their tokens must not: `check` compares contents,
    ids and special tokens (once for each target), raises ValueError with the first differences, and logs in what the
    shapes differ.
    """

    draws = True
    has_own_cache = True

    @typing.no_type_check  # it checks more, and its errors are the ones users must see
    def __init__(self, model: Model, k: int = 4) -> None:
        """`k` tokens at most are drafted a step. Raises ValueError for a k outside 1 to 15 and for what is no model."""
        check_model(model, "ModelDraft: the draft")
        check_k(k, "ModelDraft")
        self.model, self.k = model, k
        self._checked: Model | None = None

    def __repr__(self) -> str:
        return f"ModelDraft({self.model.name!r}, k={self.k})"

    @property
    def name(self) -> str:
        return f"model({self.model.name})"

    @property
    def params(self) -> Params:
        return self.model.params

    @property
    def bytes_per_token(self) -> int:
        return kv_cache.bytes_per_token(self.model.config, self.model.cache_dtype)

    def check(self, target: Model, longest: int) -> None:
        if self._checked is not target:
            check_tokens(target, self.model)
            tell_of_shapes(target, self.model)
            if self.model.config.model_type != target.config.model_type:
                warn_of_families(target, self.model)
            self._checked = target
        context = self.model.config.max_position_embeddings
        if longest > context:
            raise RequestTooLong(
                f"a request reaches {longest} tokens, but the context of the draft {self.model.name} is {context}; "
                "lower max_tokens, shorten the prompt or take another draft"
            )

    def proposer(self, target: Model) -> "ModelProposer":
        return ModelProposer(self.model.config, target.config.vocab_size)

    def create_state(self, target: Model, num_pages: int, page_size: int, batch: int) -> DraftCache:
        cache = kv_cache.create(self.model.config, num_pages, page_size, self.model.cache_dtype)
        return DraftCache(cache, jnp.zeros(batch, jnp.int32))


@dataclasses.dataclass(frozen=True)
class ModelProposer:
    """The compiled part: as many passes of the draft as tokens are drafted.

    With a cache of its own the first pass takes two tokens, since the last drafted token of a step that was accepted
    whole has not been through the draft; taking it in again otherwise changes nothing and costs next to nothing.

    Sharing the target's cache is sound for the target's own layers in any precision and for its lower layers alone:
    what is cached of accepted tokens came from verification, and what the draft writes at the newest token and behind
    it, verification writes again, layer by layer, before it reads there.
    """

    config: ModelConfig
    vocab_size: int
    """The target's width of logits."""

    def propose(
        self,
        params: Params,
        state: DraftCache | tuple[()],
        cache: PagedKVCache,
        rows: Rows,
        wanted: Wanted,
    ) -> tuple[Proposal, DraftCache | tuple[()], PagedKVCache]:
        if not isinstance(state, tuple) and self.chains(params, rows, wanted):
            proposal, pages = self._chained(params, state.cache, rows, wanted)
            return proposal, DraftCache(pages, self._written(state, rows, wanted)), cache
        variant = dataclasses.replace(wanted.variant, num_logprobs=None)
        sampling = dataclasses.replace(rows.sampling, keys=rows.noise_keys)
        choose = functools.partial(self._choose, variant=variant, with_logits=wanted.with_logits)
        forward = functools.partial(self._forward, params, rows=rows)
        pages = cache if isinstance(state, tuple) else state.cache
        if isinstance(state, tuple):
            logits, pages = forward(newest(rows)[:, None], pages, first=0)
        else:
            # In idle rows position -1 stays -1; a row's newest token is never its first.
            both = at_places(rows.history, rows.positions[:, None] + jnp.array([[-1, 0]], jnp.int32))
            logits, pages = forward(both, pages, first=-1)
        token, drawn, sampling = choose(logits, sampling, rows.num_generated)

        def another(carry: tuple[jax.Array, PagedKVCache, SamplingState], place: jax.Array):
            token, pages, sampling = carry
            logits, pages = forward(token[:, None], pages, first=place)
            token, drawn, sampling = choose(logits, sampling, rows.num_generated + place)
            return (token, pages, sampling), (token, drawn)

        places = jnp.arange(1, wanted.num_drafted, dtype=jnp.int32)
        # Unrolled, since a pass of a small model is so short that a loop's own kernels and copies count beside it.
        (_, pages, _), later = jax.lax.scan(another, (token, pages, sampling), places, unroll=4)
        tokens, logits = jax.tree.map(
            lambda first, rest: jnp.concatenate([first[None], rest]).swapaxes(0, 1), (token, drawn), later
        )
        proposal = Proposal(tokens, jnp.full(tokens.shape[0], wanted.num_drafted, jnp.int32), logits)
        if isinstance(state, tuple):
            return proposal, state, pages
        return proposal, DraftCache(pages, self._written(state, rows, wanted)), cache

    @staticmethod
    def _written(state: DraftCache, rows: Rows, wanted: Wanted) -> Int32[Array, " batch"]:
        return jnp.where(rows.positions >= 0, rows.positions + wanted.num_drafted, state.lengths)

    def chains(self, params: Params, rows: Rows, wanted: Wanted) -> bool:
        """Whether a kernel takes each pass's logits to what the next pass begins with: of a single greedy row."""
        config, variant, ropes = self.config, wanted.variant, {layer.rope for layer in self.config.layers}
        (rope,) = ropes if len(ropes) == 1 else (None,)
        if rows.positions.size != 1 or wanted.with_logits or rope is None or config.embedding_multiplier != 1.0:
            return False
        if not variant.greedy or variant.penalties or variant.logit_bias or variant.min_tokens:
            return False
        return next_token_refusal(config.vocab_size, params.embed_tokens, rope.rotary_dim // 2) is None

    def _chained(
        self, params: Params, pages: PagedKVCache, rows: Rows, wanted: Wanted
    ) -> tuple[Proposal, PagedKVCache]:
        """The passes of a single greedy row, where what lies between two of them is a kernel."""
        config, num_tokens = self.config, min(wanted.variant.num_tokens, self.vocab_size, self.config.vocab_size)
        (rope,) = {layer.rope for layer in config.layers}
        assert rope is not None
        both = at_places(rows.history, rows.positions[:, None] + jnp.array([[-1, 0]], jnp.int32))
        positions = idle_safe(rows.positions, 2)
        positions = jnp.where(positions >= 0, positions - 1, jnp.int32(-1))
        # Angles of all passes at once.
        places = rows.positions[:, None] + jnp.arange(-1, wanted.num_drafted, dtype=jnp.int32)[None, :]
        cos, sin = decoder.tables_of(places, rows.context_lengths, config)[rope]
        start = jax.lax.optimization_barrier(positions[0])
        tokens = Tokens(positions, rows.page_table, {rope: (cos, sin)}, "decode", first=start)
        x = decoder.embedded(params, both, tokens, config)
        x, first_pages = decoder.stream_of(params, x, pages, tokens, config=config)
        assert first_pages is not None
        chosen = functools.partial(
            next_token, table=params.embed_tokens, start=start, cos=cos, sin=sin, num_tokens=num_tokens
        )

        def logits_of(x: jax.Array) -> jax.Array:
            return decoder.norm_logits(params, x[:, -1], config)[0]

        def another(carry: tuple[jax.Array, jax.Array, PagedKVCache], _: None):
            logits, places, pages = carry
            begun = chosen(logits, places=places)
            angles = {rope: (begun.cos, begun.sin)}
            tokens = Tokens(begun.places[None, :1], rows.page_table, angles, "decode", first=begun.places)
            x, new_pages = decoder.stream_of(params, begun.x, pages, tokens, config=config)
            assert new_pages is not None
            return (logits_of(x), begun.places, new_pages), begun.token

        carry = (logits_of(x), start, first_pages)
        # Unrolled, since a pass of a small model is so short that a loop's own kernels and copies count beside it.
        (logits, places, pages), drafted = jax.lax.scan(another, carry, length=wanted.num_drafted - 1, unroll=4)
        last = chosen(logits, places=places).token
        drafted = jnp.concatenate([drafted, last[None]]).swapaxes(0, 1)
        return Proposal(drafted, jnp.full(1, wanted.num_drafted, jnp.int32)), pages

    def _forward(
        self, params: Params, tokens: jax.Array, pages: PagedKVCache, *, rows: Rows, first: int | jax.Array
    ) -> tuple[jax.Array, PagedKVCache]:
        """Logits after the last of some tokens, the first of which lies `first` places after the newest."""
        positions = idle_safe(rows.positions, tokens.shape[1])
        positions = jnp.where(positions >= 0, positions + first, jnp.int32(-1))
        hidden, new_pages = decoder.forward(
            params,
            tokens,
            positions,
            pages,
            rows.page_table,
            config=self.config,
            stage="decode",
            context_lengths=rows.context_lengths,
        )
        assert new_pages is not None
        return fit_vocabulary(decoder.logits(params, hidden[:, -1], self.config), self.vocab_size), new_pages

    def _choose(
        self,
        logits: jax.Array,
        sampling: SamplingState,
        step: jax.Array,
        *,
        variant: SamplerVariant,
        with_logits: bool,
    ) -> tuple[jax.Array, jax.Array | None, SamplingState]:
        """A token a row under the row's own sampling options, and the logits it was drawn from if they are wanted."""
        output, counted = sample(logits, sampling, variant, step)
        if not with_logits:
            return output.tokens, None, counted
        processed = processed_logits(logits, sampling, variant, step)
        drawn = processed if variant.greedy else draw_logits(processed, sampling, variant)
        return output.tokens, drawn, counted

    def settle(self, state: DraftCache | tuple[()], positions: Int32[Array, " batch"]) -> DraftCache | tuple[()]:
        if isinstance(state, tuple):
            return state
        return dataclasses.replace(state, lengths=jnp.minimum(state.lengths, positions))

    def catch_up(
        self,
        params: Params,
        state: DraftCache | tuple[()],
        rows: Rows,
        known: Int32[Array, " batch"],
        chunk: int,
        from_empty: bool,
    ) -> DraftCache | tuple[()]:
        if isinstance(state, tuple):
            return state
        seen = jnp.maximum(state.lengths, known)
        lengths = jnp.clip(rows.positions - seen, 0, chunk)  # idle rows are at -1
        starts = jnp.where(lengths > 0, seen, 0)
        tokens = at_places(rows.history, starts[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None, :])
        _, pages = decoder.forward(
            params,
            tokens,
            prefill_positions(lengths, starts, chunk),
            state.cache,
            rows.page_table,
            config=self.config,
            stage="first" if from_empty else "prefill",
            context_lengths=rows.context_lengths,
        )
        assert pages is not None
        return DraftCache(pages, jnp.where(rows.positions >= 0, seen + lengths, state.lengths))

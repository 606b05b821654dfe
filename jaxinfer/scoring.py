"""Log-likelihoods of given text: `score` for continuations of prompts, `perplexity` for a long text."""

import dataclasses
import functools
import logging
import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from tqdm.auto import tqdm

from checkpoints.progress import progress_bar
from jaxinfer.batch import Limits
from jaxinfer.model import Model, check_loaded
from jaxinfer.request import Prompt, list_prompts
from jaxinfer.scoring_plan import TokenPair
from jaxinfer.scoring_run import Scored, run_pairs

log = logging.getLogger("jaxinfer")

PAIRS_AT_ONCE = 16384
"""Pairs that are planned together; more would cost the host memory and hold back the first results."""
LONGEST_WINDOW = 4096
"""Default bound on a window of `perplexity`: a longer context costs more than it tells."""


@dataclasses.dataclass(frozen=True)
class Score:
    """How likely a continuation is after its prompt.

    `logprob` is the natural log of its probability, the sum of `token_logprobs`; NaN if the model's logits are not
    finite there. `is_greedy`: every token is the most probable one, so greedy generation would give this continuation.
    """

    logprob: float
    num_tokens: int
    is_greedy: bool
    token_logprobs: tuple[float, ...] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """exp(-logprob / num_tokens), the natural log-likelihood of all scored tokens, and how many these are."""

    perplexity: float
    logprob: float
    num_tokens: int


def score(
    model: Model,
    prompts: Prompt | Iterable[Prompt],
    continuations: Prompt | Iterable[Prompt],
    *,
    progress: bool = False,
) -> list[Score]:
    """Scores `continuations[i]` after `prompts[i]`, in order; a single prompt is that of all continuations.

    Both are text or token ids. A prompt and its continuation in text are encoded together, as lm-evaluation-harness
    does it: white space that ends the prompt belongs to the continuation, and the tokens of the two joined are cut
    where the prompt alone would end. An empty prompt is the model's BOS, or its EOS if it has no BOS. A continuation
    in text after token ids is encoded alone.

    Tokens that prompts have in common are computed once. The order and the number of pairs do not change results beyond
    rounding. Everything is checked before anything runs: ValueError names the first pair that is empty, holds unknown
    ids or does not fit the context, whose last token needs no place. Scores of NaN are logged.
    """
    check_loaded(model)
    pairs = encode_pairs(model, prompts, continuations)
    scores = dict(scored_pairs(model, pairs, progress=progress))
    return [scores[index] for index in range(len(pairs))]


def perplexity(
    model: Model, text: Prompt, *, window: int | None = None, stride: int | None = None, progress: bool = False
) -> Perplexity:
    """Perplexity of a text of any length, which windows of `window` tokens cross by `stride` tokens at a time.

    Every token but the first is scored once; after the first window each has at least `window - stride` tokens before
    it. A smaller stride costs more and shows the model more. `window` is the model's context unless given, at most
    4096; `stride` is half of it. Text is opened with BOS if the model's own rule says so. Raises ValueError for a text
    of fewer than two tokens and for sizes that do not fit.
    """
    check_loaded(model)
    context = model.config.max_position_embeddings
    window = min(context, LONGEST_WINDOW) if window is None else window
    if type(window) is not int or not 2 <= window <= context:
        raise ValueError(f"window={window!r}; expected an integer from 2 to the context of {model.name}, {context}")
    stride = window // 2 if stride is None else stride
    if type(stride) is not int or not 1 <= stride < window:
        raise ValueError(
            f"stride={stride!r}; expected an integer from 1 to {window - 1}, so that windows of {window} overlap"
        )
    tokens = token_ids(model, text, "the text")
    if len(tokens) < 2:
        raise ValueError(
            f"the text has {len(tokens)} token(s); perplexity needs at least 2, as the first is not scored"
        )
    pairs, done = [], 1
    while done < len(tokens):
        end = min(len(tokens), window if done == 1 else done + stride)
        begin = 0 if done == 1 else done - (window - stride)
        pairs.append(TokenPair(tokens[begin:done], tokens[done:end]))
        done = end
    scores = [score for _, score in scored_pairs(model, pairs, progress=progress)]
    total, count = math.fsum(score.logprob for score in scores), len(tokens) - 1
    try:
        result = math.exp(-total / count)
    except OverflowError:
        result = math.inf
    return Perplexity(perplexity=result, logprob=total, num_tokens=count)


def scored_pairs(
    model: Model,
    pairs: Sequence[TokenPair],
    *,
    progress: bool = False,
    run: Callable[[Sequence[TokenPair]], Iterator[Scored]] | None = None,
) -> Iterator[tuple[int, Score]]:
    """Yields (index, score) of each pair as soon as it is known: long pairs first, those that share tokens together.

    The pairs' ids are taken as they are; a ValueError names a pair that does not fit the context. `run` computes some
    pairs, as `scoring_run.run_pairs` does, which it is by default.
    """
    if run is None:
        run = functools.partial(run_pairs, model, limits=Limits.default())
    longest = model.config.max_position_embeddings
    for index, pair in enumerate(pairs):
        if pair.num_inputs > longest:
            raise ValueError(
                f"pair {index} has {pair.num_inputs + 1} tokens, of which the context of {model.name} holds "
                f"{longest} and one more; shorten the prompt"
            )
    not_finite = []
    # In tokens, which come call by call: a long text may be one pair, and shows the time that is left all the same.
    total = sum(len(pair.continuation) for pair in pairs)
    with progress_bar(total=total, unit="token", desc="Scoring", shown=progress, leave=False) as bar:
        for first in range(0, len(pairs), PAIRS_AT_ONCE):
            for index, result in _score_some(run, pairs[first : first + PAIRS_AT_ONCE], bar):
                if math.isnan(result.logprob):
                    not_finite.append(first + index)
                yield first + index, result
    if not_finite:
        listed = reprlib.repr(not_finite)
        log.warning("logits are not finite (NaN or infinity) for %d pairs: %s", len(not_finite), listed)


def encode_pairs(
    model: Model, prompts: Prompt | Iterable[Prompt], continuations: Prompt | Iterable[Prompt]
) -> list[TokenPair]:
    """The pairs that `score` is given, checked but for their length; it says by which rules. Raises ValueError."""
    listed, following = list_prompts(prompts), list_prompts(continuations)
    if len(listed) == 1:
        listed *= len(following)
    if len(listed) != len(following):
        raise ValueError(f"{len(listed)} prompts for {len(following)} continuations; give one each, or a single prompt")
    return [
        encode_pair(model, prompt, continuation, index)
        for index, (prompt, continuation) in enumerate(zip(listed, following, strict=True))
    ]


def encode_pair(model: Model, prompt: object, continuation: object, index: int = 0) -> TokenPair:
    """Token ids of a prompt and its continuation, checked; `score` says by which rules. Raises ValueError."""
    if isinstance(prompt, str) and isinstance(continuation, str) and model.tokenizer is not None:
        kept = prompt.rstrip()
        continuation = prompt[len(kept) :] + continuation
        if kept:
            context = token_ids(model, kept, f"prompt {index}")
            following = token_ids(model, kept + continuation, f"pair {index}")[len(context) :]
        else:
            context = (opening_id(model),)
            following = token_ids(model, continuation, f"continuation {index}", add_special_tokens=False)
            following = following[following[:1] == context :]
    else:
        is_empty_text = isinstance(prompt, str) and not prompt
        context = (opening_id(model),) if is_empty_text else token_ids(model, prompt, f"prompt {index}")
        following = token_ids(model, continuation, f"continuation {index}", add_special_tokens=False)
        if not context:
            raise ValueError(f"prompt {index} is an empty list of token ids; give at least one")
    if not following:
        raise ValueError(
            f"continuation {index}, {reprlib.repr(continuation)}, adds no token to its prompt; "
            "give at least one token to score"
            + (" (the text of both may be one token: begin it with a space?)" if continuation else "")
        )
    return TokenPair(context, following)


def token_ids(model: Model, given: object, where: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Token ids of a text or of a sequence of ids, of any length. Raises ValueError that begins with `where`."""
    if isinstance(given, str):
        if model.tokenizer is None:
            raise ValueError(f"{where} is text, but {model.name} has no tokenizer; give token ids instead")
        try:
            ids = model.tokenizer.encode(given, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    elif hasattr(given, "__array__") and np.ndim(np.asarray(given)):
        ids = np.asarray(given).tolist()
    elif isinstance(given, list | tuple):
        ids = given
    else:
        raise ValueError(f"{where} is {reprlib.repr(given)}; expected text or a list of int token ids")
    known = model.config.num_tokens
    if ids and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < known:
        return tuple(ids)  # one by one, as below, takes ten times as long
    for token in ids:
        if not isinstance(token, numbers.Integral) or isinstance(token, bool) or not 0 <= int(token) < known:
            raise ValueError(f"{where} holds {reprlib.repr(token)}; token ids of this model are 0 to {known - 1}")
    return tuple(int(token) for token in ids)


def opening_id(model: Model) -> int:
    """The token that stands before a text with no prompt: BOS, or the main EOS of a model that has no BOS."""
    tokenizer = model.tokenizer
    if tokenizer is not None and tokenizer.bos_token_id is not None:
        return int(tokenizer.bos_token_id)
    ends = model.config.eos_token_ids if tokenizer is None else tokenizer.eos_token_ids
    if not ends:
        raise ValueError(f"an empty prompt needs a token to start from, and {model.name} has neither BOS nor EOS")
    return int(ends[0])


def _score_some(
    run: Callable[[Sequence[TokenPair]], Iterator[Scored]], pairs: Sequence[TokenPair], bar: tqdm
) -> Iterator[tuple[int, Score]]:
    counts = np.array([len(pair.continuation) for pair in pairs])
    ends = np.cumsum(counts)
    logprobs, best = np.zeros(counts.sum(), np.float32), np.zeros(counts.sum(), np.bool)
    owners = np.repeat(np.arange(len(pairs)), counts)
    missing = counts.copy()
    computed = 0
    if not pairs:
        return
    known = np.zeros(counts.sum(), np.bool)
    for scored in run(pairs):
        logprobs[scored.slots], best[scored.slots] = scored.logprobs, scored.best
        computed += scored.num_computed
        new = scored.slots[~known[scored.slots]]  # an engine's interrupted round may bring some twice
        known[new] = True
        bar.set_postfix_str(f"{computed} computed", refresh=False)
        bar.update(len(new))
        touched, arrived = np.unique(owners[new], return_counts=True)
        missing[touched] -= arrived
        for index in touched[missing[touched] == 0].tolist():
            own = slice(ends[index] - counts[index], ends[index])
            tokens = tuple(logprobs[own].tolist())
            yield index, Score(math.fsum(tokens), len(tokens), bool(best[own].all()), tokens)

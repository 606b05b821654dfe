"""SamplingParams: how one request's tokens are chosen, under vLLM's field names, defaults and ranges."""

import dataclasses
import math
import numbers
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxinfer.fields import refuse_unknown
from jaxinfer.surrogates import not_unicode

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

_INT32_MAX = 2**31 - 1


@typing.no_type_check  # __post_init__ checks more, and its errors are the ones users must see
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one request; frozen, hashable, checked and normalised on construction.

    Names, defaults, ranges and meanings are vLLM's except where a field says otherwise. The order of
    operations is in `jaxinfer.sampling`. None for `stop`, `stop_token_ids` or `logit_bias` means empty.

    Raises:
        ValueError: a field has the wrong type or is out of range, or two fields contradict each other.
    """

    n: int = 1
    """Completions per prompt, 1 to 16384. Those of one seeded request draw from different random streams."""
    max_tokens: int | None = 16
    """Most tokens to generate, at least 1. None: until the context is full."""
    min_tokens: int = 0
    """End-of-text and stop token ids cannot be drawn before this many tokens exist."""
    temperature: float = 1.0
    """From 0 to 1e6; below 1e-5 is greedy. Unlike in vLLM, values below 0.01 are not raised to 0.01."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1 keeps all. Of equals the lower ids stay (vLLM keeps all)."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens whose mass reaches this, in (0, 1]; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than this fraction of the most probable one, in [0, 1]; 0 drops none."""
    seed: int | None = None
    """64-bit seed. Equal seeds give equal tokens whatever shares the batch. None or -1: fresh entropy."""
    stop: str | Sequence[str] = ()
    """Strings that end the text. Always a tuple of non-empty strings after construction."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end generation besides the model's own. A tuple without repeats after construction."""
    ignore_eos: bool = False
    """Go on after the model's end-of-text ids. `min_tokens` still forbids them until it is reached."""
    include_stop_str_in_output: bool = False
    """Keep the matched stop string at the end of the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Number of most probable tokens to report beside each generated token; 0 reports that token alone, None
    nothing. At most the vocabulary's size (`validate_for`); vLLM's -1 for "all of them" is not offered."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token generated so far, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was generated so far, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or generated so far, in
    [1e-4, 1e4] (vLLM: any positive number; float32 logits overflow beyond these)."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    """Token id to a number in [-100, 100] added to its logit on every step. A tuple of (id, bias) pairs
    sorted by id after construction."""

    def __new__(cls, *_: Any, **fields: Any) -> "SamplingParams":
        refuse_unknown(cls, fields, "sampling field")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("n", _integer("n", self.n, 1, 16384))
        put("max_tokens", _optional_integer("max_tokens", self.max_tokens, 1))
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        put("temperature", _number("temperature", self.temperature, 0.0, 1e6))
        put("top_k", max(0, _integer("top_k", self.top_k, -1)))
        put("top_p", _number("top_p", self.top_p, 0.0, 1.0, low_open=True))
        put("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        seed = None if self.seed is None else _integer("seed", self.seed, -(2**63), 2**64 - 1)
        put("seed", None if seed == -1 else seed)
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "True or False")
        put("logprobs", _optional_integer("logprobs", self.logprobs, 0))
        put("prompt_logprobs", _optional_integer("prompt_logprobs", self.prompt_logprobs, 0))
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 1e-4, 1e4))
        put("logit_bias", _logit_bias(self.logit_bias))

        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}; "
                "lower min_tokens or raise max_tokens"
            )
        if self.greedy and self.n > 1:
            raise ValueError(
                f"n is {self.n} with greedy temperature {self.temperature}, so all completions would be "
                "equal; use n=1 or a temperature above 0"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken every time."""
        return self.temperature < GREEDY_BELOW

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Builds from parsed JSON or command-line options, where `logit_bias` keys may be decimal strings.

        Raises:
            ValueError: also for a name that is no field, with the fields it may have meant.
        """
        refuse_unknown(cls, values, "sampling field")
        arguments = dict(values)
        bias = arguments.get("logit_bias")
        if isinstance(bias, Mapping):
            arguments["logit_bias"] = tuple((_parsed_id(token), value) for token, value in bias.items())
        return cls(**arguments)

    def validate_for(self, num_tokens: int) -> None:
        """Checks everything that depends on the vocabulary; `num_tokens` is `ModelConfig.num_tokens`.

        Raises:
            ValueError: a token id of `logit_bias` or `stop_token_ids` is outside the vocabulary, or more
                logprobs are asked for than it has tokens.
        """
        for name, ids in (
            ("logit_bias", list(dict(self.logit_bias))),
            ("stop_token_ids", list(self.stop_token_ids)),
        ):
            outside = [token for token in ids if token >= num_tokens]
            if outside:
                raise ValueError(
                    f"{name} has token id {outside[0]}, which this model's vocabulary lacks; "
                    f"expected 0 to {num_tokens - 1}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > num_tokens:
                raise _error(name, count, f"at most the vocabulary's {num_tokens} tokens")


def _error(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{name} is {value!r}; expected {expected}")


def _integer(name: str, value: object, low: int, high: int = _INT32_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        says_high = high != _INT32_MAX or (isinstance(value, numbers.Integral) and int(value) > high)
        raise _error(name, value, f"an integer from {low} to {high}" if says_high else f"an integer of at least {low}")
    return int(value)


def _optional_integer(name: str, value: object, low: int) -> int | None:
    return None if value is None else _integer(name, value, low)


def _number(name: str, value: object, low: float, high: float, low_open: bool = False) -> float:
    expected = f"a number in {'(' if low_open else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _error(name, value, expected)
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction beyond 1e308
        number = math.inf
    if math.isnan(number) or not low <= number <= high or (low_open and number == low):
        raise _error(name, value, expected)
    return number


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else _listed(stop)
    if strings is None:
        raise _error("stop", stop, "a string or a sequence of strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise _error("stop", stop, "non-empty strings only; an empty one would stop at the first token")
        problem = not_unicode(string)
        if problem is not None:
            raise ValueError(f"stop: {string!r} {problem}")
    return tuple(dict.fromkeys(strings))


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    tokens = None if isinstance(ids, str | bytes) else _listed(ids)
    if tokens is None:
        raise _error(name, ids, "a sequence of token ids")
    return tuple(dict.fromkeys(_integer(f"a token id in {name}", token, 0) for token in tokens))


def _listed(values: object) -> tuple[Any, ...] | None:
    """What `values` holds; None for mappings, and for arrays of no dimension, which look iterable."""
    if not isinstance(values, Iterable) or isinstance(values, Mapping) or getattr(values, "ndim", 1) == 0:
        return None
    return tuple(values)


def _pairs(bias: object) -> tuple[tuple[Any, Any], ...]:
    """Pairs of a mapping or of a sequence of pairs."""
    if bias is None:
        return ()
    if isinstance(bias, Mapping):
        return tuple(bias.items())
    if isinstance(bias, Sequence) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in bias):
        return tuple((pair[0], pair[1]) for pair in bias)
    raise _error("logit_bias", bias, "a dict of token id to bias")


def _logit_bias(bias: object) -> tuple[tuple[int, float], ...]:
    checked = {}
    for token, value in _pairs(bias):
        token = _integer("a token id in logit_bias", token, 0)
        if token in checked:
            raise _error("logit_bias", bias, "each token id once")
        checked[token] = _number(f"logit_bias[{token}]", value, -100.0, 100.0)
    return tuple(sorted(checked.items()))


def _parsed_id(token: object) -> object:
    return int(token) if isinstance(token, str) and token.isascii() and token.isdecimal() else token

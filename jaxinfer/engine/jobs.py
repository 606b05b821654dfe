"""One request in the engine: its completions, and where its news goes."""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxinfer.engine.errors import RequestTooLong
from jaxinfer.engine.layout import SamplerLayout
from jaxinfer.engine.metrics import Clock
from jaxinfer.engine.sequence import Sequence as Track
from jaxinfer.engine.settings import Settings
from jaxinfer.outputs import Delta, RequestOutput
from jaxinfer.request import Request
from jaxinfer.surrogates import not_unicode

type Callback = Callable[[Delta], object]


@dataclasses.dataclass(eq=False)
class Job:
    """One request. News goes into its mailbox, for whoever submitted it and reads it here; without one to `step`."""

    request_id: str
    requests: list[Request]
    layout: SamplerLayout
    clocks: list[Clock]
    interactive: bool
    callback: Callback | None = None
    mailbox: collections.deque[Delta] | None = None
    tracks: list[Track] = dataclasses.field(default_factory=list)
    is_heard: bool = dataclasses.field(init=False)
    """Whether anybody learns of news before the end."""
    num_unfinished: int = dataclasses.field(init=False)
    """Completions whose last news is still to come."""

    def __post_init__(self) -> None:
        self.is_heard = self.mailbox is None or self.mailbox.maxlen != 0 or self.callback is not None
        self.num_unfinished = len(self.requests)

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    def output(self) -> RequestOutput:
        return RequestOutput(
            prompt_token_ids=self.requests[0].prompt,
            completions=tuple(request.completion() for request in self.requests),
            prompt_logprobs=self.requests[0].prompt_logprobs(),
        )


def check_submission(request_id: object, callback: object, arrived: object) -> None:
    """Raises ValueError for arguments of `Engine.submit` that would do harm only later."""
    if request_id is not None and not isinstance(request_id, str):
        raise ValueError(f"request_id={request_id!r}; expected a string")
    problem = None if request_id is None else not_unicode(request_id)
    if problem is not None:
        raise ValueError(f"request_id={request_id!r} {problem}; give another")
    if callback is not None and not callable(callback):
        raise ValueError(f"callback={callback!r}; expected a function of one argument, a Delta")
    if arrived is not None and not (isinstance(arrived, int | float) and math.isfinite(arrived)):
        raise ValueError(f"arrived={arrived!r}; expected seconds as time.perf_counter() gives them")


def check_room(requests: Sequence[Request], settings: Settings, context: int) -> None:
    """Raises RequestTooLong for the first request that could never run. One that asks for all there is gets what fits.

    `context` is the longest prompt and output in tokens, without the last, that the pool may be too small for.
    """
    spare = settings.spare_tokens
    pool_tokens, name = settings.pool_tokens, "num_pages" if settings.tiers is None else "tier_pages"
    pool_name = f"the pool's {pool_tokens} tokens" + (f" beside the {spare} that are drafted" if spare else "")
    for request in requests:
        length, where = len(request.prompt), f"prompt {request.prompt_index}"
        if length > min(context, pool_tokens):
            limit, raised = (f"max_context={context}", "that") if context <= pool_tokens else (pool_name, name)
            raise RequestTooLong(f"{where} has {length} tokens, more than {limit}; shorten it or raise {raised}")
        request.max_tokens = min(request.max_tokens, context - length + 1)
        if length + request.max_tokens - 1 > pool_tokens:
            if request.params.max_tokens is not None:
                raise RequestTooLong(
                    f"{where} has {length} tokens, and max_tokens={request.params.max_tokens} more need more than "
                    f"{pool_name}; lower max_tokens or raise {name}"
                )
            request.max_tokens = pool_tokens - length + 1

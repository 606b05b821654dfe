"""Answers to the harness' requests in order: those of an earlier run, and those computed now, kept as they come."""

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from tqdm.auto import tqdm

from jaxinfer.evaluation.sample_log import SampleLog, key_of


def collect(
    kind: str,
    requests: Sequence[Instance],
    run: Callable[[Sequence[int]], Iterable[tuple[int, Any]]],
    *,
    samples: SampleLog | None,
    identity: tuple[Any, ...],
    remember: Callable[[str, Any, Any], None],
    disable_tqdm: bool,
) -> list[Any]:
    """Answers in order: those that `samples` has, then what `run` yields for the positions of the others.

    `identity` is all that answers depend on beside the requests, which are of one `kind`. Each new answer is kept in
    `samples` and given to `remember` at once, with the kind and the request's arguments. Raises ValueError, when all
    other answers are kept, if the model's logits are not finite for some requests.
    """
    answers: dict[int, Any] = {}
    keys = [""] * len(requests) if samples is None else _keys(kind, requests, identity)
    known = {} if samples is None else samples.responses
    answers |= {position: known[key] for position, key in enumerate(keys) if key in known}
    positions = [position for position in range(len(requests)) if position not in answers]
    failed = []
    bar = tqdm(total=len(requests), initial=len(answers), desc=f"Running {kind} requests", disable=disable_tqdm)
    with bar:
        for position, answer in run(positions):
            bar.update()
            request = requests[position]
            if _is_nan(answer):
                failed.append(request)
                continue
            answers[position] = answer
            if samples is not None:
                described = {"type": kind, "task": request.task_name, "doc_id": request.doc_id, "idx": request.idx}
                samples.append(keys[position], described | {"arguments": request.args}, answer)
            remember(kind, request.args, answer)
    if failed:
        where = f"document {failed[0].doc_id} of {failed[0].task_name}"
        raise ValueError(f"the model's logits are not finite for {len(failed)} requests, the first in {where}")
    return [answers[position] for position in range(len(requests))]


def _keys(kind: str, requests: Sequence[Instance], identity: tuple[Any, ...]) -> list[str]:
    """A key for each request; the same request asked again, as by a task that repeats it, has another one."""
    asked: collections.Counter[tuple[Any, ...]] = collections.Counter()
    keys = []
    for request in requests:
        sample = (request.task_name, request.doc_id, request.idx)
        keys.append(key_of(kind, *identity, sample, asked[sample], request.args))
        asked[sample] += 1
    return keys


def _is_nan(answer: Any) -> bool:
    number = answer[0] if isinstance(answer, tuple) else answer
    return isinstance(number, float) and math.isnan(number)

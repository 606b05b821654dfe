"""The same prompts without a draft, with one, and through verification alone: what a draft gains and costs."""

import concurrent.futures
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from jaxinfer.generation import generate, stream
from jaxinfer.model import Model
from jaxinfer.request import Prompt
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scoring import score
from jaxinfer.speculative.null_draft import NullDraft
from jaxinfer.speculative.policy import FixedLength
from jaxinfer.speculative.report import SpeculationReport, bars
from jaxinfer.speculative.speculation import Speculation


@dataclasses.dataclass(frozen=True)
class Run:
    """One way of generating: seconds and tokens after each completion's first token, and the tokens themselves."""

    seconds: float
    num_tokens: int
    token_ids: dict[tuple[int, int], tuple[int, ...]]

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` measured. Steps are of the batch, in seconds."""

    draft: str
    k: int
    plain: Run
    speculative: Run
    report: SpeculationReport
    plain_step: float
    verify_step: float
    step: float

    @property
    def speedup(self) -> float:
        """Tokens a second with the draft over those without."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    @property
    def running_speedup(self) -> float:
        """Speed-up of rows that run: rows that have ended while others go on, as in this batch, are not in it."""
        return self.report.tokens_per_step * self.plain_step / self.step

    @property
    def draft_seconds(self) -> float:
        """Of a step: what it takes longer than verification alone."""
        return max(0.0, self.step - self.verify_step)

    def _step_line(self) -> str:
        verify, plain = f"verify {1e3 * self.verify_step:.2f}", f"plain step {1e3 * self.plain_step:.2f} ms"
        if self.verify_step > self.step:  # measured by itself; the machine had other work at the time
            return f"  step {1e3 * self.step:.2f} ms; {verify} by itself, so these times are noise; {plain}"
        return f"  step {1e3 * self.step:.2f} ms = draft {1e3 * self.draft_seconds:.2f} + {verify}; {plain}"

    @property
    def same_tokens(self) -> int:
        """Completions that are token for token those of plain decoding."""
        return sum(self.speculative.token_ids[key] == tokens for key, tokens in self.plain.token_ids.items())

    def __str__(self) -> str:
        report = self.report
        places = "  ".join(f"{share:.0%}" for share in report.acceptance_by_position)
        lines = [
            f"{self.draft}, k = {self.k}",
            f"  {self.speculative.tokens_per_second:.1f} tokens/s, plain {self.plain.tokens_per_second:.1f} tokens/s: "
            f"speed-up {self.speedup:.2f}",
            self._step_line(),
            f"  acceptance {report.acceptance_rate:.0%}, by position {places}",
            f"  mean accepted length {report.mean_accepted_length:.2f}, {report.tokens_per_step:.2f} tokens a step",
            *(f"  {line}" for line in bars(report.histogram)),
            f"  {self.same_tokens} of {len(self.plain.token_ids)} completions are those of plain decoding",
        ]
        return "\n".join(lines)


def compare(
    model: Model,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    speculation: Speculation,
    *,
    plain: tuple[Run, float] | None = None,
    repeats: int = 3,
    after_run: Callable[[], object] = lambda: None,
) -> Comparison:
    """Runs prompts as one batch: once to compile, then `repeats` times, of which the fastest counts.

    `plain` is what `measure_plain` gave for the same prompts; it is measured here otherwise. `speculation` should have
    a fixed length, or its steps are of different kinds. `after_run` is called after each of the `num_runs`.
    """
    if plain is None:
        plain = measure_plain(model, prompts, params, repeats=repeats, after_run=after_run)
    plain_run, plain_step = plain
    k = speculation.draft.k
    _, _, verify_step = _measure(model, prompts, params, _verification(k), repeats, after_run)
    run, report, step = _measure(model, prompts, params, speculation, repeats, after_run)
    return Comparison(speculation.draft.name, k, plain_run, run, report, plain_step, verify_step, step)


def num_runs(num_speculations: int, repeats: int) -> int:
    """Runs of `measure_plain` and of `compare` for each speculation after it."""
    return (1 + repeats) * (1 + 2 * num_speculations)


def compile_ahead(
    model: Model,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    speculations: Iterable[Speculation],
) -> None:
    """Compiles what `compare` runs for these speculations, all of it side by side: each runs once in a thread."""
    speculations = list(speculations)
    verifying = [_verification(k) for k in dict.fromkeys(speculation.draft.k for speculation in speculations)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda kind: timed_run(model, prompts, params, kind), [None, *verifying, *speculations]))


def _verification(k: int) -> Speculation:
    """Steps that verify and draft nothing."""
    return Speculation(NullDraft(k), policy=FixedLength())


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a completion first departs from plain decoding's. `gap` is how much more probable, in nats, the target
    finds plain decoding's token there: nearly 0 (of either sign) is a tie that two programs round differently."""

    prompt_index: int
    place: int
    gap: float


def first_differences(model: Model, prompts: Sequence[Sequence[int]], plain_run: Run, run: Run) -> list[Difference]:
    """Of greedy completions, one for each that differs, the tokens scored after their common beginning."""
    differences = []
    for (prompt, sample), plain in sorted(plain_run.token_ids.items()):
        other = run.token_ids[prompt, sample]
        place = next((index for index, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), None)
        if place is not None:
            common = [*prompts[prompt], *plain[:place]]
            own, drafted = score(model, [common, common], [[plain[place]], [other[place]]])
            differences.append(Difference(prompt, place, own.logprob - drafted.logprob))
    return differences


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the target thinks of generated tokens, each after all before it. Plain greedy decoding has 1 and 0.

    A mean log-probability would not do: a lossy draft that repeats itself is more probable than good text.
    """

    first: float
    """Share that is the target's most probable token."""
    gap: float
    """How much more probable the most probable token is, in nats, on average."""

    @classmethod
    def of(cls, model: Model, prompts: Sequence[Sequence[int]], run: Run) -> "Choices":
        """Of all that a run generated after the prompts."""
        keys = sorted(run.token_ids)
        texts = [[*prompts[prompt], *run.token_ids[prompt, sample]] for prompt, sample in keys]
        firsts, gaps = [], []
        for (prompt, _), output in zip(keys, generate(model, texts, _SCORED, progress=False), strict=True):
            tables = (output.prompt_logprobs or ())[len(prompts[prompt]) :]
            for token, table in zip(output.prompt_token_ids[len(prompts[prompt]) :], tables, strict=True):
                assert table is not None
                firsts.append(table[token].rank == 1)
                gaps.append(max(one.logprob for one in table.values()) - table[token].logprob)
        return cls(statistics.fmean(firsts), statistics.fmean(gaps))


_SCORED = SamplingParams(max_tokens=1, prompt_logprobs=1)


def measure_plain(
    model: Model,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    repeats: int = 3,
    after_run: Callable[[], object] = lambda: None,
) -> tuple[Run, float]:
    """Generation without a draft, and the seconds of one of its steps. `after_run` is called after each run."""
    timed_run(model, prompts, params, None)
    after_run()
    best = None
    for _ in range(repeats):
        run = timed_run(model, prompts, params, None)
        after_run()
        best = run if best is None or run.seconds < best.seconds else best
    assert best is not None
    longest = max(len(tokens) for tokens in best.token_ids.values())
    return best, best.seconds / max(1, longest - 1)


def _measure(
    model: Model,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    speculation: Speculation,
    repeats: int,
    after_run: Callable[[], object],
) -> tuple[Run, SpeculationReport, float]:
    """The fastest run, its report, and the median seconds of a step."""
    timed_run(model, prompts, params, speculation)
    after_run()
    best, steps = None, []
    for _ in range(repeats):
        speculation.reset()
        run = timed_run(model, prompts, params, speculation)
        after_run()
        report = speculation.report
        best = (run, report) if best is None or run.seconds < best[0].seconds else best
        timed = sum(report.timed_steps.values())
        steps += [sum(report.seconds.values()) / timed] if timed else []
    assert best is not None
    if not steps:
        raise ValueError("something was compiled during every step, so none was timed; raise repeats or max_tokens")
    return *best, statistics.median(steps)


def timed_run(
    model: Model,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    speculation: Speculation | None,
) -> Run:
    """Generates everything in one batch and times it from the first tokens on.

    Raises ValueError if every completion ends with its first token: there is no decode step to time.
    """
    tokens: dict[tuple[int, int], tuple[int, ...]] = {}
    first = None
    # All first tokens come at once, and the clock starts when the first of them is here.
    for delta in stream(model, prompts, params, max_batch_size=1 << 20, draft=speculation):
        first = first or time.perf_counter()
        key = (delta.prompt_index, delta.sample_index)
        tokens[key] = tokens.get(key, ()) + delta.token_ids
    assert first is not None
    seconds = time.perf_counter() - first
    if all(len(ids) < 2 for ids in tokens.values()):
        raise ValueError(
            "every completion ended with its first token, so there is no decode step to measure; "
            "set max_tokens to 2 or more, or take prompts that have longer answers"
        )
    return Run(max(seconds, 1e-9), sum(map(len, tokens.values())) - len(tokens), tokens)

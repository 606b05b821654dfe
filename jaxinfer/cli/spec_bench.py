"""`jaxinfer spec-bench MODEL`: what a draft gains on some prompts, with acceptance by position and a histogram."""

import argparse
import dataclasses
import sys

from checkpoints.progress import progress_bar
from jaxinfer.cli.options import json_line, loading, read_text, sampling_values
from jaxinfer.model import Model, load
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.acceptance import Acceptance, Exact
from jaxinfer.speculative.comparison import (
    Choices,
    Comparison,
    compare,
    first_differences,
    measure_plain,
    num_runs,
)
from jaxinfer.speculative.compatibility import shape_differences
from jaxinfer.speculative.drafts import Draft, ModelDraft, NgramDraft, SelfDraft
from jaxinfer.speculative.lossy import LossyKL, LossyTopK, LossyTypical
from jaxinfer.speculative.ngram import check_k
from jaxinfer.speculative.policy import FixedLength
from jaxinfer.speculative.speculation import Speculation

PROMPTS = (
    "Write one sentence about each of these cities: Paris, Rome, Berlin, Madrid.",
    "Repeat this text word for word: The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Explain why the sky is blue.",
)
LOSSY: dict[str, type[LossyTopK] | type[LossyTypical] | type[LossyKL]] = {
    "top-k": LossyTopK,
    "typical": LossyTypical,
    "kl": LossyKL,
}


def run(options: argparse.Namespace) -> int:
    """Measures every k that was asked for, and prints a report for each."""
    params = SamplingParams.from_dict(sampling_values(options))
    acceptance = Exact() if options.lossy is None else LOSSY[options.lossy]()
    for k in options.k:
        check_k(k, "spec-bench")
    if options.repeats < 1:
        raise ValueError(f"--repeats {options.repeats}; expected at least 1")
    texts = _texts(options)
    shown = not options.quiet
    model = load(options.model, **loading(options), progress=shown)
    prompts = [_prompt(model, text) for text in texts]
    drafts = [make_draft(model, options.draft, k) for k in options.k]
    if isinstance(drafts[0], ModelDraft) and not options.json:
        drafts[0].check(model, 0)  # tokens that differ are an error; other differences are worth knowing
        print(shape_differences(model, drafts[0].model))
    total, repeats = num_runs(len(drafts), options.repeats), options.repeats
    with progress_bar(total=total, unit="run", desc="Measuring", shown=shown, leave=False) as bar:
        plain = measure_plain(model, prompts, params, repeats=repeats, after_run=bar.update)
        for draft in drafts:
            speculation = Speculation(draft, acceptance=acceptance, policy=FixedLength())
            found = compare(model, prompts, params, speculation, plain=plain, repeats=repeats, after_run=bar.update)
            bar.clear()
            _print(model, prompts, found, acceptance, as_json=options.json, greedy=params.greedy)
    return 0


def _print(
    model: Model, prompts: list[list[int]], found: Comparison, acceptance: Acceptance, *, as_json: bool, greedy: bool
) -> None:
    """A report, and what only a second look at the outputs tells."""
    quality = None if acceptance.lossless else _quality(model, prompts, found)
    print(json_line(_record(found, acceptance, quality)) if as_json else found)
    if acceptance.lossless and greedy and not as_json:
        for difference in first_differences(model, prompts, found.plain, found.speculative):
            print(
                f"  prompt {difference.prompt_index} differs from token {difference.place} on, "
                f"a tie within {abs(difference.gap):.2g} nats"
            )
    if quality is not None and not as_json:
        print(f"  {acceptance!r} is lossy: {_shown(quality[1])};")
        print(f"  of plain decoding {_shown(quality[0])}")
    sys.stdout.flush()


def make_draft(model: Model, name: str, k: int) -> Draft:
    """`ngram`, `self` (4-bit layers), `self:N` (the lower N layers in 4 bits), or a model to load."""
    if name == "ngram":
        return NgramDraft(k)
    if name == "self":
        return SelfDraft(model, k)
    if name.startswith("self:"):
        layers = name.removeprefix("self:")
        if not layers.isdecimal():
            raise ValueError(f"--draft {name}: expected self:N with a number of layers, such as self:8")
        return SelfDraft(model, k, num_layers=int(layers))
    return ModelDraft(load(name, dtype=model.dtype), k)


def _texts(options: argparse.Namespace) -> list[str]:
    if options.prompt is not None:
        return options.prompt
    if options.prompts_file is None:
        return list(PROMPTS)
    lines = [line for line in read_text(options.prompts_file).splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{options.prompts_file} holds no prompts; give one a line")
    return lines


def _prompt(model: Model, text: str) -> list[int]:
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer, which the prompts need; take a model that has one")
    if model.tokenizer.chat_template is None:
        return model.tokenizer.encode(text)
    return model.tokenizer.apply_chat_template([{"role": "user", "content": text}])


def _quality(model: Model, prompts: list[list[int]], found: Comparison) -> tuple[Choices, Choices]:
    """Of plain decoding, and with the draft."""
    return Choices.of(model, prompts, found.plain), Choices.of(model, prompts, found.speculative)


def _shown(choices: Choices) -> str:
    return f"{choices.first:.1%} of tokens are the target's first choice, {choices.gap:.3f} nats from it on average"


def _record(found: Comparison, acceptance: Acceptance, quality: tuple[Choices, Choices] | None) -> dict[str, object]:
    report = found.report
    return {
        "draft": found.draft,
        "k": found.k,
        "acceptance": repr(acceptance),
        "speedup": found.speedup,
        "tokens_per_second": found.speculative.tokens_per_second,
        "plain_tokens_per_second": found.plain.tokens_per_second,
        "acceptance_rate": report.acceptance_rate,
        "acceptance_by_position": list(report.acceptance_by_position),
        "mean_accepted_length": report.mean_accepted_length,
        "tokens_per_step": report.tokens_per_step,
        "histogram": report.histogram,
        "step_ms": 1e3 * found.step,
        "draft_ms": 1e3 * found.draft_seconds,
        "verify_ms": 1e3 * found.verify_step,
        "plain_step_ms": 1e3 * found.plain_step,
        "same_completions": found.same_tokens,
        "completions": len(found.plain.token_ids),
        "choices": None
        if quality is None
        else {"plain": dataclasses.asdict(quality[0]), "draft": dataclasses.asdict(quality[1])},
    }

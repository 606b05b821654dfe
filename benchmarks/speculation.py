"""What speculation gains: the machinery under a synthetic acceptance, self-drafts, and real text.

    python -m benchmarks.speculation machinery --target qwen3-8b --draft qwen3-0.6b --int4 --k 4 --batch 1 16
    python -m benchmarks.speculation machinery --target qwen3-8b --int4 --draft qwen3-0.6b --draft-plan bfloat16
    python -m benchmarks.speculation machinery --target llama-3-8b --self --acceptance 0.93 --batch 1
    python -m benchmarks.speculation text --model smollm2-135m-instruct
    python -m benchmarks.speculation greedy --model smollm2-135m-instruct --dtype float32
    python -m benchmarks.speculation lossy --model smollm2-135m-instruct

`machinery` takes random weights in shapes of `benchmarks/shapes` and accepts drafted tokens with a given probability,
whatever the models say: its records have mode "synthetic". Chance is the same in every run, so that times can be
compared; `acceptance_4` and the like are shares of `judged_4` tokens, and differ from the probability by as much as
shares of so few do (256 tokens judge about 40 fourth ones). `overhead` is the share of a step that is no pass of a
model: the passes are timed by themselves. `text` is a real model on prompts written for the purpose. `greedy` says how
many of a long output's tokens come before the first that differs from plain decoding's, and how near a tie that is
(`largest_tie_gap`); it times nothing. `lossy` is text under each rule of acceptance that changes the output, with what
that does to it: `first_choice_share` of the tokens are those that the target finds most probable, which are
`gap_to_first_choice` more probable on average (exact: 1 and 0).

`speedup` is less than `running_speedup` by what a short output pays whatever the steps take: the draft reads the prompt
after the first token, and the last chunk of steps runs to its end.
"""

import argparse
import concurrent.futures
import copy
import pathlib
import time

import jax

import jaxinfer as ji
from benchmarks.decode import HEADS, load, prompts, weights_of
from benchmarks.harness import Recorder
from benchmarks.passes import StepPasses
from jaxinfer.speculative.acceptance import Exact
from jaxinfer.speculative.comparison import (
    Choices,
    Comparison,
    compare,
    compile_ahead,
    first_differences,
    measure_plain,
    timed_run,
)
from jaxinfer.speculative.lossy import LossyKL, LossyTopK, LossyTypical, SyntheticAcceptance
from jaxinfer.speculative.policy import FixedLength
from jaxinfer.speculative.proposer import Draft
from jaxinfer.speculative.speculation import quantisation

SUMMARISE = (
    """Summarise this report in its own words, sentence by sentence.

The harbour bridge was closed for nine days in March after inspectors found cracks in two of the northern bearings.
Engineers replaced both bearings and fitted sensors that report strain every ten minutes. The closure cost the city
about four million in lost tolls. The council has asked for a second inspection in September, and for a plan to replace
the southern bearings before the winter. The port authority expects no further closures this year.""",
    """Repeat the minutes below and put the decisions at the end.

Present: the treasurer, the secretary and four members. The treasurer reported that the roof fund stands at 8,200. The
secretary read a letter from the neighbours about the hedge. It was decided to cut the hedge in October. It was decided
to ask three firms for offers to repair the roof. The next meeting is on the second Tuesday of October.""",
)
EDIT = (
    """Rename the variable `total` to `balance` in this function and return the whole function.

def settle(entries, start):
    total = start
    for entry in entries:
        if entry.kind == 'credit':
            total = total + entry.amount
        elif entry.kind == 'debit':
            total = total - entry.amount
        else:
            raise ValueError(f'unknown kind {entry.kind}')
    return total
""",
    """Add a docstring to this class and return all of it.

class Queue:
    def __init__(self, limit):
        self.items = []
        self.limit = limit

    def push(self, item):
        if len(self.items) >= self.limit:
            raise OverflowError('queue is full')
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise LookupError('queue is empty')
        return self.items.pop(0)
""",
)
OPEN = (
    "Tell a short story about a lighthouse keeper who finds a letter.",
    "Explain to a child why the moon changes its shape.",
)
TASKS = {"summarise": SUMMARISE, "edit": EDIT, "open": OPEN}


def metrics_of(found: Comparison) -> dict[str, tuple[float, str]]:
    """Values and units of a comparison, as records have them."""
    report = found.report
    metrics = {
        "speedup": (found.speedup, ""),
        "running_speedup": (found.running_speedup, ""),
        "tokens_per_s": (found.speculative.tokens_per_second, "tok/s"),
        "plain_tokens_per_s": (found.plain.tokens_per_second, "tok/s"),
        "acceptance": (report.acceptance_rate, ""),
        "accepted_length": (report.mean_accepted_length, ""),
        "tokens_per_step": (report.tokens_per_step, ""),
        "step_ms": (1e3 * found.step, "ms"),
        "draft_ms": (1e3 * found.draft_seconds, "ms"),
        "verify_ms": (1e3 * found.verify_step, "ms"),
        "plain_step_ms": (1e3 * found.plain_step, "ms"),
        "verify_over_plain": (found.verify_step / found.plain_step, ""),
        "same_completions": (found.same_tokens / len(found.plain.token_ids), ""),
    }
    for place, (share, judged) in enumerate(zip(report.acceptance_by_position, report.judged, strict=True), 1):
        metrics |= {f"acceptance_{place}": (share, ""), f"judged_{place}": (judged, "")}
    return metrics


def machinery(recorder: Recorder, options: argparse.Namespace) -> None:
    """Target and draft of given shapes, acceptance by chance."""
    started = time.perf_counter()
    target = load(options.target, weights_of(options.target, options), options.kv)
    drafts: list[Draft]
    if options.draft is None:
        drafts = [ji.SelfDraft(target, k, num_layers=options.layers) for k in options.k]
        draft_weights = quantisation(drafts[0].params)
    else:
        weights = weights_of(options.draft, _draft_options(options))
        small = load(options.draft, weights, options.kv)
        drafts = [*(ji.ModelDraft(small, k) for k in options.k)]
        draft_weights = weights.name
    print(f"loaded after {time.perf_counter() - started:.1f} s", flush=True)
    chance = SyntheticAcceptance(options.acceptance)
    params = ji.SamplingParams(max_tokens=options.output, temperature=0.0, ignore_eos=True)
    for batch in options.batch:
        ids = prompts(target, batch, options.prompt)
        runs = [ji.Speculation(draft, acceptance=chance, policy=FixedLength()) for draft in drafts]
        place = options.prompt + options.output // 2
        with concurrent.futures.ThreadPoolExecutor() as pool:  # beside what `compile_ahead` compiles
            made = [pool.submit(StepPasses, target, draft, batch, draft.k, place) for draft in drafts]
            compile_ahead(target, ids, params, runs)
        print(f"compiled after {time.perf_counter() - started:.1f} s", flush=True)
        plain = measure_plain(target, ids, params)
        for speculation, passes in zip(runs, (future.result() for future in made), strict=True):
            found = compare(target, ids, params, speculation, plain=plain)
            case: dict[str, object] = {
                "target": options.target,
                "weights": quantisation(target.params),
                "kv": str(target.cache_dtype),
                "draft": options.draft or found.draft,
                "draft_weights": draft_weights,
                "k": found.k,
                "batch": batch,
                "mode": "synthetic",
                "probability": options.acceptance,
                "prompt": options.prompt,
                "output": options.output,
            }
            recorder.record(case, metrics_of(found) | passes.metrics(found.step))
            if jax.default_backend() == "gpu":
                print("\n".join(passes.kernels()), flush=True)


def _draft_options(options: argparse.Namespace) -> argparse.Namespace:
    """The options of weights as they are for the draft: its own plan if there is one, else the target's."""
    own = copy.copy(options)
    own.head = options.draft_head
    if options.draft_plan is not None:
        own.int4, own.quantize = False, None if options.draft_plan == "bfloat16" else options.draft_plan
    return own


def text(recorder: Recorder, options: argparse.Namespace) -> None:
    """A real model, greedy: n-grams where outputs quote, self-drafts where they do not."""
    model = ji.load(options.model, dtype=options.dtype)
    params = ji.SamplingParams(max_tokens=options.output, temperature=0.0)
    runs = [ji.Speculation(draft, policy=FixedLength()) for draft in drafts_of(model, options.k)]
    for task, texts in ((task, TASKS[task]) for task in options.tasks):
        assert model.tokenizer is not None
        chats = [model.tokenizer.apply_chat_template([{"role": "user", "content": one}]) for one in texts]
        for ids in ([chat] for chat in chats) if options.single else [chats]:
            compile_ahead(model, ids, params, runs)
            plain = measure_plain(model, ids, params, repeats=options.repeats)
            for speculation in runs:
                found = compare(model, ids, params, speculation, plain=plain, repeats=options.repeats)
                case = case_of(model, found, ids, options, "exact", task=task)
                gaps = [
                    abs(difference.gap) for difference in first_differences(model, ids, found.plain, found.speculative)
                ]
                recorder.record(case, metrics_of(found) | ({"largest_tie_gap": (max(gaps), "nats")} if gaps else {}))


def greedy(recorder: Recorder, options: argparse.Namespace) -> None:
    """A real model to a given length: are the tokens with each draft those without?"""
    model = ji.load(options.model, dtype=options.dtype)
    assert model.tokenizer is not None
    params = ji.SamplingParams(max_tokens=options.output, temperature=0.0, ignore_eos=True)
    for task, texts in TASKS.items():
        ids = [model.tokenizer.apply_chat_template([{"role": "user", "content": texts[0]}])]
        plain = timed_run(model, ids, params, None)
        for draft in drafts_of(model, options.k):
            speculation = ji.Speculation(draft, policy=FixedLength())
            run = timed_run(model, ids, params, speculation)
            differences = first_differences(model, ids, plain, run)
            case = {
                "target": pathlib.Path(options.model).name,
                "weights": str(model.dtype),
                "draft": draft.name,
                "k": draft.k,
                "mode": "greedy",
                "task": task,
                "output": options.output,
            }
            same = differences[0].place if differences else len(plain.token_ids[0, 0])
            metrics = {
                "same_tokens": (float(same), "tokens"),
                "accepted_length": (speculation.report.mean_accepted_length, ""),
            }
            gap = {"largest_tie_gap": (abs(differences[0].gap), "nats")} if differences else {}
            recorder.record(case, metrics | gap)


def drafts_of(model: ji.Model, lengths: list[int]) -> list[Draft]:
    """N-grams, the model in 4 bits, and the lower half of its layers, for each number of tokens."""
    half = max(1, model.config.num_layers // 2)
    return [
        draft
        for k in lengths
        for draft in (ji.NgramDraft(k), ji.SelfDraft(model, k), ji.SelfDraft(model, k, num_layers=half))
    ]


def case_of(
    model: ji.Model, found: Comparison, ids: list, options: argparse.Namespace, mode: str, **more: object
) -> dict[str, object]:
    """What a record of a real model says of its run."""
    case = {
        "target": pathlib.Path(options.model).name,
        "weights": str(model.dtype),
        "draft": found.draft,
        "k": found.k,
        "batch": len(ids),
    }
    return case | {"mode": mode} | more | {"output": options.output}


def lossy(recorder: Recorder, options: argparse.Namespace) -> None:
    """A real model, greedy, on open questions: what each lossy rule gains over the exact one, and what it costs."""
    model = ji.load(options.model, dtype=options.dtype)
    assert model.tokenizer is not None
    params = ji.SamplingParams(max_tokens=options.output, temperature=0.0)
    ids = [model.tokenizer.apply_chat_template([{"role": "user", "content": one}]) for one in OPEN]
    plain = measure_plain(model, ids, params, repeats=options.repeats)
    for k in options.k:
        for draft in (ji.NgramDraft(k), ji.SelfDraft(model, k)):
            for rule in (Exact(), LossyTopK(), LossyTypical(), LossyKL()):
                speculation = ji.Speculation(draft, acceptance=rule, policy=FixedLength())
                found = compare(model, ids, params, speculation, plain=plain, repeats=options.repeats)
                case = case_of(model, found, ids, options, repr(rule))
                quality = Choices.of(model, ids, found.speculative)
                metrics = {"first_choice_share": (quality.first, ""), "gap_to_first_choice": (quality.gap, "nats")}
                recorder.record(case, metrics_of(found) | metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=None, help="folder for the JSON lines")
    commands = parser.add_subparsers(dest="command", required=True)
    synthetic = commands.add_parser("machinery")
    synthetic.add_argument("--target", required=True)
    source = synthetic.add_mutually_exclusive_group(required=True)
    source.add_argument("--draft", help="a shape with the target's vocabulary")
    source.add_argument("--self", action="store_true", help="the target in 4 bits")
    synthetic.add_argument("--layers", type=int, default=None, help="lower layers that a self-draft has")
    synthetic.add_argument("--int4", action="store_true", help="packed layers in both models")
    synthetic.add_argument("--draft-plan", help="plan of the draft, such as int4, or bfloat16; by default the target's")
    synthetic.add_argument("--draft-head", choices=HEADS, help="codes of the draft's head")
    synthetic.add_argument("--kv", help="type of the caches, such as int8")
    synthetic.add_argument("--acceptance", type=float, default=0.8)
    synthetic.add_argument("--batch", type=int, nargs="+", default=[1])
    synthetic.add_argument("--prompt", type=int, default=128)
    synthetic.set_defaults(quantize=None, head=None)
    real = commands.add_parser("text")
    real.add_argument("--single", action="store_true", help="each prompt in a batch of its own")
    real.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    rules = commands.add_parser("lossy")
    long = commands.add_parser("greedy")
    for command in (real, rules, long):
        command.add_argument("--model", default="smollm2-135m-instruct")
    for command in (real, rules):
        command.add_argument("--repeats", type=int, default=3, help="runs, of which the fastest counts")
    for command in (synthetic, real, rules, long):
        command.add_argument("--k", type=int, nargs="+", default=[4])
        command.add_argument("--output", type=int, default=512 if command is long else 257)
        command.add_argument("--dtype")
    options = parser.parse_args()
    recorder = Recorder("speculation", options.results) if options.results else Recorder("speculation")
    {"machinery": machinery, "text": text, "greedy": greedy, "lossy": lossy}[options.command](recorder, options)


if __name__ == "__main__":
    main()

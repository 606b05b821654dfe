"""Random submits, aborts, failing callbacks, interrupts and preemptions against one engine, for as long as one likes.

    python -m benchmarks.soak --minutes 20

Everything that is submitted must end, with the tokens it gets when it is alone; every page must come back; memory must
stay flat. Prints a line every ten seconds, records the end, and fails if any of this does. The model is tiny.
"""

import argparse
import collections
import dataclasses
import gc
import json
import logging
import pathlib
import random
import resource
import tempfile
import time

import jax

import jaxinfer as ji
from benchmarks.harness import RESULTS, Recorder

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
CONFIG = ji.EngineConfig(
    max_decode_batch=4,
    max_sequences=6,
    max_context=64,
    num_pages=25,
    page_size=4,
    max_prefill_tokens=32,
    prefill_lengths=(16,),
    prefill_rows=(1, 2),
    decode_rows=(4,),
    decode_chunk=3,
    sampling=(ji.SamplingParams(temperature=1.0, top_k=5, logprobs=0),),
)


@dataclasses.dataclass
class Totals:
    """What has happened so far."""

    submitted: int = 0
    rounds: int = 0
    interrupts: int = 0
    ended: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class Soak:
    """Drives one engine at random, knowing what every request must say."""

    def __init__(self, engine: ji.Engine, prompts: list[list[int]], seed: int = 0) -> None:
        self.engine, self.rng, self.totals = engine, random.Random(seed), Totals()
        self.requests = [(ids, self.params(index, len(ids))) for index, ids in enumerate(prompts)]
        self.expected = [engine.generate([ids], row, progress=False)[0] for ids, row in self.requests]
        self.open: dict[str, int] = {}
        self.said: dict[str, list[int]] = {}

    def params(self, index: int, length: int) -> ji.SamplingParams:
        most, to_the_end = self.rng.randint(1, 60 - length), index % 3 > 0
        if index % 2:
            return ji.SamplingParams(temperature=1.0, top_k=5, seed=index, max_tokens=most, ignore_eos=to_the_end)
        return ji.SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=to_the_end)

    def round(self, submitting: bool = True) -> None:
        """A few random events, and a step."""
        rng = self.rng
        for _ in range(rng.choice([0, 0, 1, 2, 6]) if submitting and len(self.open) < 40 else 0):
            self.submit()
        if self.open and rng.random() < 0.1:
            self.engine.abort(rng.choice([*self.open]))
        interrupt = submitting and rng.random() < 0.002
        try:
            deltas = self.interrupted_step() if interrupt else self.engine.step()
        except KeyboardInterrupt:
            self.totals.interrupts += 1
            deltas = []
        for delta in deltas:
            self.hear(delta)
        self.totals.rounds += 1

    def submit(self) -> None:
        index, name = self.rng.randrange(len(self.requests)), str(self.totals.submitted)

        def fails(_: ji.Delta) -> None:
            raise RuntimeError("a callback that fails")

        callback = fails if self.rng.random() < 0.03 else None
        self.engine.submit(*self.requests[index], request_id=name, callback=callback)
        self.open[name], self.said[name] = index, []
        self.totals.submitted += 1

    def interrupted_step(self) -> list[ji.Delta]:
        """As if Ctrl-C came when a program has taken the cache and returned nothing."""
        runner = self.engine._runner
        assert runner is not None
        whole = runner.dispatch

        def interrupted(*arguments: object) -> list:
            whole(*arguments)  # type: ignore[arg-type]  # passed on as they are
            runner.free()
            raise KeyboardInterrupt

        runner.dispatch = interrupted  # type: ignore[method-assign]  # for this step
        try:
            return self.engine.step()
        finally:
            runner.dispatch = whole

    def hear(self, delta: ji.Delta) -> None:
        name = str(delta.request_id)
        said, expected = self.said[name], self.expected[self.open[name]]
        said += delta.token_ids
        if tuple(said) != expected.token_ids[: len(said)]:
            raise AssertionError(f"request {name} said {said}, and {expected.token_ids} when alone")
        if delta.finish_reason is not None:
            self.totals.ended[delta.finish_reason] += 1
            if delta.finish_reason in ("stop", "length") and len(said) != len(expected.token_ids):
                raise AssertionError(f"request {name} ended after {len(said)} of {len(expected.token_ids)} tokens")
            del self.open[name], self.said[name]

    def drain(self) -> None:
        """Lets everything end and checks that nothing is left."""
        for _ in range(10_000):
            if not self.engine.has_work:
                break
            self.round(submitting=False)
        if self.open:
            raise AssertionError(f"lost requests: {sorted(self.open)}")
        if self.totals.ended.total() != self.totals.submitted:
            raise AssertionError(f"{self.totals.submitted} requests, {self.totals.ended.total()} ends")
        metrics = self.engine.metrics()
        if metrics.pages_owned or metrics.waiting or metrics.decoding:
            raise AssertionError(f"left behind: {metrics}")


def resident_bytes() -> int:
    """Memory of this process; where the system does not tell, its peak."""
    status = pathlib.Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    arguments = parser.parse_args()
    logging.getLogger("jaxinfer").setLevel(logging.ERROR)  # of failing callbacks there are many
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ji.load(folder, random_weights=0, dtype="float32")
    rng = random.Random(arguments.seed)
    prompts = [[rng.randrange(96) for _ in range(rng.randint(1, 50))] for _ in range(24)]
    with ji.Engine(model, CONFIG) as engine:
        engine.warmup()
        soak = Soak(engine, prompts, arguments.seed)
        start = shown = time.monotonic()
        settled = None
        while (now := time.monotonic()) - start < 60 * arguments.minutes:
            soak.round()
            if now - shown >= 10:
                shown = now
                gc.collect()
                memory, arrays = resident_bytes(), sum(array.nbytes for array in jax.live_arrays())
                settled = settled or memory  # of the first ten seconds: allocators have what they need by then
                print(
                    f"{now - start:6.0f} s  {soak.totals.submitted} submitted, {dict(soak.totals.ended)}, "
                    f"{engine.metrics().preemptions} preemptions, {soak.totals.interrupts} interrupts, "
                    f"{memory / 2**20:.0f} MiB resident, {arrays / 2**20:.2f} MiB of arrays",
                    flush=True,
                )
        soak.drain()
        grown = 0 if settled is None else resident_bytes() - settled
        metrics = engine.metrics()
    totals, compiled = soak.totals, metrics.compilations_after_warmup
    print(f"no lost request, no leaked page; memory grew by {grown / 2**20:.1f} MiB; {compiled} programs compiled late")
    Recorder("soak", arguments.results).record(
        {"minutes": arguments.minutes, "seed": arguments.seed},
        {
            "requests": (totals.submitted, ""),
            "lost_requests": (totals.submitted - totals.ended.total(), ""),
            "aborted": (totals.ended["abort"], ""),
            "failed_callbacks": (totals.ended["error"], ""),
            "preemptions": (metrics.preemptions, ""),
            "interrupts": (totals.interrupts, ""),
            "leaked_pages": (metrics.pages_owned, ""),
            "memory_growth_mib": (grown / 2**20, "MiB"),
            "compilations_after_warmup": (compiled, ""),
        },
    )
    if grown > 64 * 2**20 or compiled:
        raise SystemExit("memory is not flat, or programs were compiled while serving")


if __name__ == "__main__":
    main()

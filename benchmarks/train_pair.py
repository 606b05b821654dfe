"""Trains a deep target and two drafts of one layer, and reports what each draft gains.

    python -m benchmarks.train_pair OUT                                            # about two minutes on a GPU
    python -m benchmarks.train_pair OUT --steps 20 --batch 4 --samples 8 --output 32   # a first try on a CPU

The text is public domain (`jaxinfer/quantization/texts`), the end of each text held out: its even windows choose which
state of a training run is kept, its odd ones judge. One draft learns from the text. The other learns the target's
distributions, over the text and over what the target says itself (distillation, https://arxiv.org/abs/2310.08461).
Each model becomes a Hugging Face folder in OUT: `target`, `draft`, `draft-distilled`; `pair.tar` has target and
distilled draft once more with projections in 8 bits, small enough to be a test's.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import tarfile
import tempfile
import time

import jax.numpy as jnp
import numpy as np
import tokenizers

import jaxinfer as ji
from benchmarks.harness import RESULTS, Recorder
from benchmarks.pair_models import SHAPES, WINDOW, hugging_face_config, read_texts, save, train_tokenizer
from benchmarks.pair_training import Lesson, Trainer, unstacked, windows
from benchmarks.speculation import metrics_of
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.decoder import Params
from jaxinfer.speculative.comparison import compare, compile_ahead, measure_plain
from jaxinfer.speculative.policy import FixedLength

PROMPT = 64
"""Tokens that the target continues, when it is sampled and when drafts are measured."""
SHAPE_OF = {"target": "target", "draft": "draft", "draft-distilled": "draft"}


class Pair:
    """Text, tokens and folders of the models."""

    def __init__(self, out: pathlib.Path) -> None:
        self.out = out
        train, held_out = read_texts()
        self.tokenizer: tokenizers.Tokenizer = train_tokenizer(train)
        self.ids = np.array(self.tokenizer.encode(train).ids, np.int32)
        self.unseen = np.array(self.tokenizer.encode(held_out).ids, np.int32)
        cut = np.stack([self.unseen[i : i + WINDOW + 1] for i in range(0, len(self.unseen) - WINDOW, WINDOW)])
        self.chosen_by, self.judged = jnp.asarray(cut[0::2][: len(cut) // 2]), jnp.asarray(cut[1::2])
        self.models: dict[str, ji.Model] = {}
        print(f"{len(self.ids):,} tokens to train on, {len(self.unseen):,} held out", flush=True)

    def keep(self, name: str, params: Params) -> None:
        """Writes a model's folder and loads it as everybody would."""
        shape = SHAPES[SHAPE_OF[name]]
        save(self.out / name, hugging_face_config(shape), unstacked(params, shape["num_hidden_layers"]), self.tokenizer)
        self.models[name] = ji.load(self.out / name)

    def samples(self, count: int) -> np.ndarray:
        """What the target says after pieces of the text, in one row."""
        starts = np.random.default_rng(1).integers(0, len(self.ids) - PROMPT, count)
        prompts = [self.ids[start : start + PROMPT].tolist() for start in starts]
        length = WINDOW + 1 - PROMPT
        params = [
            ji.SamplingParams(max_tokens=length, temperature=(0.0, 0.8, 1.0)[index % 3], seed=index, ignore_eos=True)
            for index in range(count)
        ]
        outputs = ji.generate(self.models["target"], prompts, params, max_batch_size=512)
        return np.array([[*output.prompt_token_ids, *output.token_ids] for output in outputs], np.int32).reshape(-1)

    def prompts(self, count: int) -> list[list[int]]:
        """Pieces of the text that is held out."""
        starts = np.linspace(0, len(self.unseen) - PROMPT, count + 2).astype(int)[1:-1]
        return [self.unseen[start : start + PROMPT].tolist() for start in starts]

    def write_small(self, trained: dict[str, Params]) -> None:
        """`pair.tar`, whose folders are `target` and `draft`."""
        with tempfile.TemporaryDirectory() as scratch, tarfile.open(self.out / "pair.tar", "w") as archive:
            for name, source in (("target", "target"), ("draft", "draft-distilled")):
                folder, shape = pathlib.Path(scratch) / name, SHAPES[SHAPE_OF[source]]
                params = unstacked(trained[source], shape["num_hidden_layers"])
                save(folder, hugging_face_config(shape), params, self.tokenizer, int8=True)
                archive.add(folder, arcname=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, help="folder for the models; made here")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=64, help="windows of 256 tokens a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="largest learning rate")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.15, 0.3], help="the best target is kept")
    parser.add_argument("--samples", type=int, default=2048, help="continuations that the distilled draft learns from")
    parser.add_argument("--k", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--output", type=int, default=257, help="tokens of each continuation that is measured")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    recorder = Recorder("train_pair", arguments.results)
    pair = Pair(arguments.out)
    trained = train_all(pair, recorder, arguments)
    pair.write_small(trained)
    for batch, temperature in ((1, 0.0), (1, 0.8), (8, 0.0)):
        params = ji.SamplingParams(max_tokens=arguments.output, temperature=temperature, ignore_eos=True, seed=0)
        measure(recorder, pair.models, pair.prompts(batch), params, arguments.k)


def train_all(pair: Pair, recorder: Recorder, arguments: argparse.Namespace) -> dict[str, Params]:
    """Trains, keeps and judges the three models. All training programs are compiled side by side."""
    target, draft = (from_hugging_face(hugging_face_config(SHAPES[name])) for name in ("target", "draft"))
    lessons = {"target": Lesson(target), "draft": Lesson(draft), "draft-distilled": Lesson(draft, teacher=target)}
    new_trainer = functools.partial(
        Trainer, batch=arguments.batch, judged=len(pair.chosen_by), num_steps=arguments.steps, rate=arguments.rate
    )
    with concurrent.futures.ThreadPoolExecutor() as pool:
        trainers = {name: pool.submit(new_trainer, lesson) for name, lesson in lessons.items()}
    trained: dict[str, Params] = {}
    for name in lessons:
        started = time.perf_counter()
        trainer, teacher = trainers[name].result(), None
        text = pair.ids
        if name == "draft-distilled":
            teacher = trained["target"]
            text = np.concatenate([text, pair.samples(arguments.samples)])
        runs = [
            trainer.train(
                name, windows(text, arguments.batch, seed=1), pair.chosen_by, dropout=dropout, teacher=teacher
            )
            for dropout in (arguments.dropout if name == "target" else [0.0])
        ]
        trained[name], _ = min(runs, key=lambda run: run[1])
        pair.keep(name, trained[name])
        seconds = time.perf_counter() - started
        text_trainer = trainers[SHAPE_OF[name]].result()
        metrics = {
            "held_out_loss": (text_trainer.loss(trained[name], pair.judged[: len(pair.chosen_by)]), "nats"),
            "train_s": (seconds, "s"),
            "parameters": (pair.models[name].num_parameters / 1e6, "million"),
        }
        if name != "target":
            overlap = ji.expected_acceptance(pair.models["target"], pair.models[name], pair.unseen[: 4 * WINDOW])
            metrics["expected_acceptance"] = (overlap, "")
        recorder.record({"model": name, "steps": arguments.steps, "batch": arguments.batch}, metrics)
    return trained


def measure(
    recorder: Recorder,
    models: dict[str, ji.Model],
    prompts: list[list[int]],
    params: ji.SamplingParams,
    lengths: list[int],
) -> None:
    """The distilled draft at every length, the other at the last, against plain decoding of the same prompts."""
    target = models["target"]
    runs = {
        (name, k): ji.Speculation(ji.ModelDraft(models[name], k), policy=FixedLength())
        for name in ("draft", "draft-distilled")
        for k in (lengths if name == "draft-distilled" else lengths[-1:])
    }
    compile_ahead(target, prompts, params, runs.values())
    plain = measure_plain(target, prompts, params)
    for (name, k), speculation in runs.items():
        found = compare(target, prompts, params, speculation, plain=plain)
        case = {"draft": name, "k": k, "batch": len(prompts), "temperature": params.temperature}
        recorder.record(case, metrics_of(found))


if __name__ == "__main__":
    main()

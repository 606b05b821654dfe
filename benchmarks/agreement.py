"""Does a device generate what the CPU generates in float32? Greedy tokens of a real model, and how near the ties were.

    python -m benchmarks.agreement --write            # on a CPU: the reference, benchmarks/results/agreement.json
    python -m benchmarks.agreement                    # on the device: compares with it

Two devices may part where the reference's best and second-best token are nearly tied. For each prompt the first
different token is reported with its gap: how much less probable, in nats, the reference held the device's choice.
"""

import argparse
import json
import pathlib

import jaxinfer as ji
from benchmarks.harness import RESULTS, Recorder

REFERENCE = RESULTS / "agreement.json"
MODEL = "smollm2-135m-instruct"
QUESTIONS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a river in spring.",
    "What is the difference between a list and a tuple in Python?",
    "Give me three ideas for a birthday present for a gardener.",
    "Summarise the story of Romeo and Juliet.",
    "How do vaccines work?",
    "Translate to French: The library opens at nine in the morning.",
    "List the planets of the solar system in order from the sun.",
)
TOP = 5
"""Alternatives kept for each token of the reference: a device's choice beyond them is no near-tie."""


def outputs(model: ji.Model, max_tokens: int) -> list[ji.RequestOutput]:
    assert model.tokenizer is not None
    chats = [model.tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    return ji.generate(model, chats, ji.SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=TOP))


def first_difference(tokens: list[int], tables: list[dict[str, float]], other: list[int]) -> tuple[int, float] | None:
    """Place of the first different token and the reference's gap there (infinite beyond its alternatives)."""
    for place, (mine, theirs) in enumerate(zip(tokens, other, strict=False)):
        if mine != theirs:
            table = tables[place]
            return place, table[str(mine)] - table.get(str(theirs), float("-inf"))
    return None if len(tokens) == len(other) else (min(len(tokens), len(other)), float("inf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="name or path of SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--packed", action="store_true", help="keep 4-bit weights packed")
    parser.add_argument("--write", action="store_true", help="write the reference instead of comparing with it")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    model = ji.load(arguments.model, packed=arguments.packed)
    results = outputs(model, arguments.tokens)
    if arguments.write:
        reference = [
            {
                "tokens": list(output.token_ids),
                "logprobs": [
                    {str(token): round(entry.logprob, 5) for token, entry in table.items()}
                    for table in output.logprobs or ()
                ],
            }
            for output in results
        ]
        REFERENCE.write_text(json.dumps(reference) + "\n")
        print(f"wrote {REFERENCE}")
        return
    equal, gaps = 0, [0.0]
    for question, expected, output in zip(QUESTIONS, json.loads(REFERENCE.read_text()), results, strict=True):
        found = first_difference(expected["tokens"], expected["logprobs"], list(output.token_ids))
        if found is None:
            equal += 1
            print(f"equal, {len(output.token_ids)} tokens: {question}")
        else:
            gaps.append(found[1])
            print(f"parts at token {found[0]}, gap {found[1]:.4f} nats: {question}")
    weights = "packed" if arguments.packed else "decoded"
    case: dict[str, object] = {
        "model": MODEL,
        "weights": weights,
        "dtype": str(model.dtype),
        "tokens": arguments.tokens,
    }
    metrics = {"prompts_equal": (float(equal), f"of {len(QUESTIONS)}"), "largest_gap": (max(gaps), "nats")}
    Recorder("agreement", arguments.results).record(case, metrics)


if __name__ == "__main__":
    main()

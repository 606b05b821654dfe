"""Writes the short table of README.md: an 8B model on one GPU, other engines' figures beside ours.

python -m benchmarks.headline
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.harness import RESULTS, ROOT
from benchmarks.quality_report import markdown
from benchmarks.report import Record, best_match, newest, number, peers_for, read_records

README = ROOT.parent / "README.md"
BEGIN, END = "<!-- written by make performance -->\n", "<!-- until here -->\n"
DEVICE = "NVIDIA H200"
MODEL = "llama-3-8b"

DECODE = ("decode", "tokens_per_s", "decode")
FIRST = ("decode", "ttft_ms", "first_token_ms")
READY = ("decode", "ready_cold_s", "ready_s")
MANY = ("throughput", "output_tokens_per_s", "throughput")
OWN_ORDER = {"kv": None, "decode_order": "shortest"}
"""The engine's own order: it is not told how long answers become, as its peers are not."""
ROWS: list[tuple[str, tuple[str, str, str], dict[str, Any]]] = [
    *(
        (f"decode, {weights}, {batch} at once, tok/s", DECODE, {"weights": weights, "batch": batch, "prompt": 128})
        for weights in ("bfloat16", "int4")
        for batch in (1, 16, 64)
    ),
    ("first token, bfloat16, prompt of 2048 tokens, ms", FIRST, {"weights": "bfloat16", "batch": 1, "prompt": 2048}),
    *(
        (f"256 requests of 100 to 1024 tokens, {weights}, output tok/s", MANY, {"weights": weights, **OWN_ORDER})
        for weights in ("bfloat16", "int4")
    ),
    ("start to first answer, nothing compiled before, s", READY, {"weights": "bfloat16"}),
]
"""Words, (benchmark, metric, section of the peers' figures), and what a case must have; None for what it must not."""


def table(records: Iterable[Record], peers: Mapping[str, list[dict]]) -> str:
    """The best of the newest records of each row's cases, as in the table of targets."""
    cases, rows = newest(records), []
    for words, (benchmark, metric, section), wanted in ROWS:
        bound = "at_most" if metric in ("ttft_ms", "ready_cold_s") else "at_least"
        wanted = {"model": MODEL, **wanted}
        target = {"benchmark": benchmark, "metric": metric, "device": DEVICE, "case": wanted, bound: 0}
        record = best_match(target, cases)
        case = {} if record is None else record["case"]
        rows.append([words, number(record), peers_for(peers, section, metric, case)])
    return markdown(["Llama-3-8B's shape, random weights, one H200", "jaxinfer", "others"], rows)


def main() -> None:
    peers = json.loads((ROOT / "peers.json").read_text())
    before, rest = README.read_text().split(BEGIN)
    _, after = rest.split(END)
    README.write_text(before + BEGIN + table(read_records(RESULTS), peers) + "\n" + END + after)
    print(f"wrote the table of {README}")


if __name__ == "__main__":
    main()

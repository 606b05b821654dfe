"""The measured table of docs/quantization.md: what each plan keeps of the original, on one text and one device."""

import math
from collections.abc import Iterable, Mapping

from benchmarks.harness import ROOT

DOCUMENT = ROOT.parent / "docs" / "quantization.md"
BEGIN, END = "<!-- written by `make performance` -->", "<!-- end of what is written -->"
BASELINE = "int4"
LEAST_TOKENS = 100_000
"""Of a text that plans are compared on; records of shorter ones were first tries."""

HEADER = ("weights", "MB", "perplexity", "KL mean", "KL 99 %", "same best", "gap closed", "seconds")


def gap_closed(perplexity: float, original: float, baseline: float) -> float:
    """Share of the baseline's loss of log-likelihood that is not lost."""
    return 1.0 - math.log(perplexity / original) / math.log(baseline / original)


def table(plans: Mapping[str, Mapping[str, float]], original_size: float | None = None) -> str:
    """A row for each plan's metrics, as `benchmarks.quality` records them. Sizes are in MB."""
    original = next(iter(plans.values()))["original_perplexity"]
    baseline = plans[BASELINE]["perplexity"] if BASELINE in plans else None
    size = "" if original_size is None else f"{original_size:.1f}"
    rows = [("bf16", size, f"{original:.2f}", "0", "0", "100 %", "", "")]
    for name, found in sorted(plans.items(), key=lambda item: item[1]["perplexity"]):
        closed = ""
        if baseline is not None and name != BASELINE:
            closed = f"{100 * gap_closed(found['perplexity'], original, baseline):.0f} %"
        row = (f"{found['size']:.1f}", f"{found['perplexity']:.2f}", f"{found['kl_mean']:.4f}")
        rest = (f"{found['kl_p99']:.3f}", f"{100 * found['agreement']:.1f} %", closed, f"{found['seconds']:.0f}")
        rows.append((name, *row, *rest))
    lines = ["| " + " | ".join(row) + " |" for row in (HEADER, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(HEADER), *lines[1:]])


def section(records: Iterable[Mapping]) -> str:
    """The table of the newest record of each plan, of the device and model that have most of them.

    Raises ValueError if there is none on a long text.
    """
    groups: dict[tuple[str, str, int], dict[str, dict[str, float]]] = {}
    commits: dict[tuple[str, str, int], dict[str, str]] = {}
    for record in records:
        if record["benchmark"] == "quality" and record["case"]["tokens"] >= LEAST_TOKENS:
            case = record["case"]
            key = record["device"], case["model"], case["tokens"]
            groups.setdefault(key, {}).setdefault(case["plan"], {})[record["metric"]] = record["value"]
            commits.setdefault(key, {})[case["plan"]] = record["commit"]
    if not groups:
        raise ValueError(f"no record of benchmarks.quality on {LEAST_TOKENS} tokens; run it first")
    device, model, tokens = key = max(groups, key=lambda key: len(groups[key]))
    used = ", ".join(dict.fromkeys(commits[key].values()))
    return f"{model} on {tokens:,} tokens, {device}, commit {used}:\n\n{table(groups[key])}"


def replaced(document: str, written: str) -> str:
    """The document with what stands between its marks written anew. Raises ValueError for one without marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/quantization.md has no {BEGIN} followed by {END}")
    return f"{before}{BEGIN}\n\n{written}\n\n{END}{after}"


def write(records: Iterable[Mapping]) -> None:
    """Brings docs/quantization.md up to date."""
    DOCUMENT.write_text(replaced(DOCUMENT.read_text(encoding="utf-8"), section(records)), encoding="utf-8")
    print(f"wrote {DOCUMENT}")

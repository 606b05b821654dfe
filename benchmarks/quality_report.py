"""The measured tables of docs/quantization.md: what each plan keeps of the original, on one text and one device; by
which error rounding clips; what a decode step takes by each plan; and how long a packed model takes to load."""

import math
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.harness import ROOT

DOCUMENT = ROOT.parent / "docs" / "quantization.md"
BEGIN, END = "<!-- written by `make performance`: {name} -->", "<!-- end of what is written -->"
BASELINE = "int4"
LEAST_TOKENS = 100_000
"""Of a text that plans are compared on; records of shorter ones were first tries."""

HEADER = ("weights", "MB", "perplexity", "KL mean", "KL 99 %", "same best", "gap closed", "seconds")


DECODED = {"model": "llama-3-8b", "kv": "bfloat16", "prompt": 128, "output": 257}
BATCHES = (1, 16)
FIRST = ("bfloat16", "int4", "seed-mixed")
"""The rows of the table of decoding, in order; others follow."""


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
    return markdown(HEADER, rows)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def clipping(records: Iterable[Mapping]) -> str:
    """What rounding loses by the error that clipping minimises, the newest record of each, for each number of bits and
    of tokens; of the device that has most. Empty if there is no record."""
    devices: dict[str, dict[tuple[int, int, str], dict[str, Mapping]]] = {}
    for record in records:
        if record["benchmark"] == "clipping":
            case = record["case"]
            key = case["bits"], case["tokens"], case["exponent"]
            devices.setdefault(record["device"], {}).setdefault(key, {})[record["metric"]] = record
    if not devices:
        return ""
    device, cases = max(devices.items(), key=lambda item: len(item[1]))
    rows, commits = [], {}
    for (bits, tokens, exponent), found in sorted(cases.items(), key=lambda item: (-item[0][0], item[0][1:])):
        error = "nothing is clipped" if exponent == "none" else f"sum of \\|error\\|^{exponent}"
        figures = (f"{found[name]['value']:.{digits}f}" for name, digits in (("perplexity", 2), ("kl_mean", 4)))
        original = f"{found['original_perplexity']['value']:.2f}"
        rows.append((str(bits), f"{tokens:,}", error, *figures, f"{found['kl_p99']['value']:.3f}", original))
        commits |= dict.fromkeys(record["commit"] for record in found.values())
    header = ("bits", "tokens", "clipped for the least", "perplexity", "KL mean", "KL 99 %", "perplexity of bf16")
    return f"{device}, commit {', '.join(commits)}:\n\n{markdown(header, rows)}"


def decoding(records: Iterable[Mapping]) -> str:
    """Steps of the 8B shape with each kind of weights that was measured at all `BATCHES`, the newest record of each, of
    the device that has most. Raises ValueError if there is none."""
    devices: dict[str, dict[tuple[str, int], dict[str, Mapping]]] = {}
    for record in records:
        case = record["case"]
        if record["benchmark"] == "decode" and DECODED.items() <= case.items() and case.get("batch") in BATCHES:
            cases = devices.setdefault(record["device"], {})
            cases.setdefault((case["weights"], case["batch"]), {})[record["metric"]] = record
    if not devices:
        raise ValueError("no record of benchmarks.decode --model llama-3-8b; run it first")
    device, cases = max(devices.items(), key=lambda item: len(item[1]))
    kinds = dict.fromkeys([*FIRST, *(weights for weights, _ in cases)])
    rows, commits = [], {}
    for weights in kinds:
        found = [cases.get((weights, batch), {}) for batch in BATCHES]
        if all("tokens_per_s" in metrics for metrics in found):
            values = [(f"{m['tokens_per_s']['value']:,.0f}", f"{m['ms_per_step']['value']:.2f}") for m in found]
            rows.append((weights, *(value for pair in values for value in pair)))
            commits |= dict.fromkeys(metrics["tokens_per_s"]["commit"] for metrics in found)
    header = ("weights", *(f"{what}, batch {batch}" for batch in BATCHES for what in ("tokens/s", "ms a step")))
    return f"{DECODED['model']}, random weights, {device}, commit {', '.join(commits)}:\n\n{markdown(header, rows)}"


def loading(records: Iterable[Mapping]) -> str:
    """How long the largest packed model took to load, from safetensors and from its store, the newest record of each.

    Empty if there is no record.
    """
    groups: dict[tuple[str, str, float], dict[tuple[str, str], dict[str, float]]] = {}
    commits: dict[tuple[str, str, float], dict[str, None]] = {}
    for record in records:
        if record["benchmark"] == "store":
            case = record["case"]
            key = record["device"], case["shape"], case["gb"]
            of = case.get("from", "store, again"), case.get("files", "")
            groups.setdefault(key, {}).setdefault(of, {})[record["metric"]] = record["value"]
            commits.setdefault(key, {})[record["commit"]] = None
    if not groups:
        return ""
    device, shape, size = key = max(groups, key=lambda key: key[2])
    rows = []
    for (source, files), found in groups[key].items():
        if "load_s" in found:
            peaks = (f"{found[name]:.2f}" if name in found else "" for name in ("peak_host_gb", "peak_device_gb"))
            rows.append((source, files, f"{found['load_s']:.1f}", f"{found['model_gb']:.2f}", *peaks))
    shares = [
        f"{found['share_of_plain_read']:.0%} of the rate of a plain read of its arrays where they are {files}"
        for (_, files), found in groups[key].items()
        if "share_of_plain_read" in found
    ]
    header = ("from", "files", "seconds", "model, GB", "peak on the host, GB", "peak on the device, GB")
    about = f"{shape}, int4 in groups of 128, {size:.1f} GB, {device}, commit {', '.join(commits[key])}:"
    loaded = (
        f"\n\nLoaded again by a process that has compiled, the store comes at {' and '.join(shares)}." if shares else ""
    )
    return f"{about}\n\n{markdown(header, rows)}{loaded}"


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


def replaced(document: str, name: str, written: str) -> str:
    """The document with what stands between its marks of that name written anew. Raises ValueError for one without."""
    mark = BEGIN.format(name=name)
    before, begin, rest = document.partition(mark)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/quantization.md has no {mark} followed by {END}")
    return f"{before}{mark}\n\n{written}\n\n{END}{after}"


def write(records: Iterable[Mapping]) -> None:
    """Brings docs/quantization.md up to date."""
    document, listed = DOCUMENT.read_text(encoding="utf-8"), list(records)
    sections = {"quality": section, "clipping": clipping, "decoding": decoding, "loading": loading}
    for name, section_of in sections.items():
        written = section_of(listed)
        document = replaced(document, name, written) if written else document
    DOCUMENT.write_text(document, encoding="utf-8")
    print(f"wrote {DOCUMENT}")

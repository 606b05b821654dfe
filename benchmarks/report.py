"""Writes docs/performance.md from the newest record of each case in `benchmarks/results`, peers' figures beside ours,
and the table of docs/quantization.md.

python -m benchmarks.report
"""

import json
import pathlib
from collections.abc import Iterable, Mapping

from benchmarks import quality_report
from benchmarks.harness import RESULTS, ROOT
from benchmarks.quality_report import markdown

DOCUMENT = ROOT.parent / "docs" / "performance.md"
INTRODUCTION = """# Performance

Written by `make performance` from `benchmarks/results/*.jsonl`; no figure in its tables is typed in. Each names its
device and was printed by the benchmark of its section, with random weights unless the model is a real one. The newest
record of a case counts. Peers' figures: {source}.

`hbm_share` is the bytes that a step must read (weights once, the KV cache once) over its time, as a share of the read
rate that the same run measured on the device. That rate varies between runs (see `read_tb_per_s` in the records) and is
an estimate from below: a share above 100 % says that it was too low, not that a kernel beat the memory.
"""

type Record = dict
type Case = tuple[tuple[str, object], ...]


def newest(records: Iterable[Record]) -> dict[tuple[str, str], dict[Case, dict[str, Record]]]:
    """(device, benchmark) -> case -> metric -> its last record."""
    table: dict[tuple[str, str], dict[Case, dict[str, Record]]] = {}
    for record in records:
        cases = table.setdefault((record["device"], record["benchmark"]), {})
        cases.setdefault(tuple(record["case"].items()), {})[record["metric"]] = record
    return table


def number(record: Record | None) -> str:
    """A measured value as text: shares as per cent, the rest with three or four digits."""
    if record is None:
        return ""
    if record["unit"] == "" and record["metric"].endswith("share"):
        return f"{100 * record['value']:.0f} %"
    return digits(record["value"])


def digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


PEERS_OF = {
    "decode": {"tokens_per_s": "decode", "ttft_ms": "first_token_ms", "ready_cold_s": "ready_s"},
    "throughput": {"output_tokens_per_s": "throughput"},
}
"""By benchmark and metric: the section of the peers' figures for the same work."""


def peers_for(peers: Mapping[str, list[dict]], section: str, metric: str, case: Mapping[str, object]) -> str:
    """Every peer's figure for the same model, weights and size: "vLLM 0.24.0: 201"."""
    found = []
    for peer in peers.get(section, []):
        keys = [key for key in peer if key in ("model", "weights", "batch", "prompt")]
        if all(peer[key] == case.get(key) for key in keys):
            value = f"{peer['low']:g}-{peer['high']:g}" if "low" in peer else digits(peer[metric])
            found.append(f"{peer['engine']}: {value}")
    return "; ".join(found)


def section(name: str, cases: Mapping[Case, Mapping[str, Record]], peers: Mapping[str, list[dict]]) -> str:
    """One benchmark's tables on one device: cases that share keys and metrics share a table."""
    shapes: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Case]] = {}
    for case, metrics in cases.items():
        shapes.setdefault((tuple(key for key, _ in case), tuple(metrics)), []).append(case)
    parts = [f"### {name}"]

    def order(value: object) -> tuple:
        return (0,) if value is None else (1 + isinstance(value, str), value)

    for (keys, metrics), unsorted in shapes.items():
        group = sorted(unsorted, key=lambda case: [order(value) for _, value in case])
        peer_of = PEERS_OF.get(name, {})
        compared = next((metric for metric in metrics if metric in peer_of), None)
        units = {metric: cases[group[0]][metric]["unit"] for metric in metrics}
        header = [*keys, *[f"{metric} [{units[metric]}]" if units[metric] else metric for metric in metrics], "commit"]
        rows = []
        for case in group:
            values = [number(cases[case][metric]) for metric in metrics]
            row = [*[str(value) for _, value in case], *values, str(cases[case][metrics[0]]["commit"])]
            if compared is not None:
                row.append(peers_for(peers, peer_of[compared], compared, dict(case)))
            rows.append(row)
        if compared is not None and any(row[-1] for row in rows):
            header.append(f"peers, {compared}")
        elif compared is not None:
            rows = [row[:-1] for row in rows]
        parts.append(markdown(header, rows))
    return "\n\n".join(parts)


def matches(wanted: Mapping[str, object], case: Mapping[str, object]) -> bool:
    """Whether a case has what is wanted of it; null for what it must not have."""
    return all(case.get(key) == value for key, value in wanted.items())


def best_match(target: Mapping, table: Mapping[tuple[str, str], Mapping[Case, Mapping[str, Record]]]) -> Record | None:
    """The record that a target is about: the best, where several cases fit."""
    sign = 1 if "at_least" in target else -1
    found = [
        metrics[target["metric"]]
        for (device, benchmark), cases in table.items()
        if benchmark == target["benchmark"] and target["device"] in device
        for case, metrics in cases.items()
        if target["metric"] in metrics and matches(target["case"], dict(case))
    ]
    return max(found, key=lambda record: sign * record["value"], default=None)


def targets_section(targets: Iterable[Mapping], table: Mapping) -> str:
    """Every target with what was measured: met, missed, or not measured."""
    rows = []
    for target in targets:
        record = best_match(target, table)
        bound = f"at least {target['at_least']:g}" if "at_least" in target else f"at most {target['at_most']:g}"
        if record is None:
            verdict = "not measured"
        elif record["value"] >= target.get("at_least", -float("inf")) and record["value"] <= target.get(
            "at_most", float("inf")
        ):
            verdict = "met"
        else:
            verdict = "**missed**"
        case = ", ".join(f"{key} {value}" for key, value in target["case"].items() if value is not None)
        measured = "" if record is None else f"{record['value']:.4g} {record['unit']}".strip()
        rows.append([case, target["metric"], bound, measured, verdict, target["device"]])
    return "## Targets\n\nOf several cases that fit a target the best counts.\n\n" + markdown(
        ["case", "metric", "target", "measured", "", "device"], rows
    )


def report(records: Iterable[Record], peers: Mapping, targets: Iterable[Mapping], notes: str) -> str:
    """The whole document. `notes` is prose about what the figures show, without figures of its own."""
    parts = [INTRODUCTION.format(source=peers["source"])]
    table = newest(records)
    parts += [targets_section(targets, table), notes]
    for device in dict.fromkeys(device for device, _ in table):
        parts.append(f"## {device}")
        parts += [section(name, cases, peers) for (owner, name), cases in table.items() if owner == device]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def read_records(folder: pathlib.Path) -> list[Record]:
    """All records of all devices, GPUs first, oldest first."""
    files = sorted(folder.glob("*.jsonl"), key=lambda path: (not path.stem.startswith("nvidia"), path.stem))
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]


def main() -> None:
    peers = json.loads((ROOT / "peers.json").read_text())
    targets = json.loads((ROOT / "targets.json").read_text())
    notes = (ROOT / "notes.md").read_text()
    records = read_records(RESULTS)
    DOCUMENT.write_text(report(records, peers, targets, notes))
    print(f"wrote {DOCUMENT}")
    quality_report.write(records)


if __name__ == "__main__":
    main()

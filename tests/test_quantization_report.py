"""The measured tables of docs/quantization.md, from records that are written here."""

from typing import Any

import pytest

from benchmarks.quality_report import BEGIN, DOCUMENT, END, clipping, decoding, loading, replaced


def records(benchmark: str, case: dict[str, Any], device: str = "card", commit: str = "c1", **values: Any) -> list:
    common = {"benchmark": benchmark, "case": case, "device": device, "commit": commit}
    return [{**common, "metric": metric, "value": value} for metric, value in values.items()]


def decode(weights: str, batch: int, rate: float, **others: Any) -> list:
    case = {"model": "llama-3-8b", "weights": weights, "kv": "bfloat16", "batch": batch, "prompt": 128, "output": 257}
    where = {key: others.pop(key) for key in ("device", "commit") if key in others}
    values: dict[str, Any] = where | {"tokens_per_s": rate, "ms_per_step": 1000 * batch / rate}
    return records("decode", case | others, **values)


def test_steps_of_each_kind_of_weights_stand_side_by_side() -> None:
    """The newest record counts; other caches, other cards, and what has one batch only do not."""
    written = [*decode("seed-mixed", 1, 400.0), *decode("seed-mixed", 16, 5000.0, commit="c2")]
    written += [*decode("bfloat16", 1, 100.0), *decode("bfloat16", 1, 250.0), *decode("bfloat16", 16, 4000.0)]
    written += [*decode("int4", 1, 600.0), *decode("int4", 16, 9.0, kv="int8"), *decode("int4", 1, 1.0, device="other")]
    assert decoding(written) == (
        "llama-3-8b, random weights, card, commit c1, c2:\n\n"
        "| weights | tokens/s, batch 1 | ms a step, batch 1 | tokens/s, batch 16 | ms a step, batch 16 |\n"
        "|---|---|---|---|---|\n"
        "| bfloat16 | 250 | 4.00 | 4,000 | 4.00 |\n"
        "| seed-mixed | 400 | 2.50 | 5,000 | 3.20 |"
    )
    with pytest.raises(ValueError, match=r"no record of benchmarks\.decode"):
        decoding([])


def test_clipping_by_each_error() -> None:
    """More bits come first; an exponent that was measured again has its newest figures."""
    assert clipping([]) == ""
    written = []
    for bits, exponent, perplexity in ((3, "2", 90.0), (4, "none", 58.0), (4, "2.4", 70.0), (4, "2.4", 59.5)):
        case = {"bits": bits, "group_size": 64, "symmetric": False, "exponent": exponent, "tokens": 4088}
        found = {"perplexity": perplexity, "original_perplexity": 44.16, "kl_mean": 0.33, "kl_p99": 1.5}
        written += records("clipping", case, **found)
    assert clipping(written) == (
        "card, commit c1:\n\n"
        "| bits | tokens | clipped for the least | perplexity | KL mean | KL 99 % | perplexity of bf16 |\n"
        "|---|---|---|---|---|---|---|\n"
        "| 4 | 4,088 | sum of \\|error\\|^2.4 | 59.50 | 0.3300 | 1.500 | 44.16 |\n"
        "| 4 | 4,088 | nothing is clipped | 58.00 | 0.3300 | 1.500 | 44.16 |\n"
        "| 3 | 4,088 | sum of \\|error\\|^2 | 90.00 | 0.3300 | 1.500 | 44.16 |"
    )


def test_loads_from_safetensors_and_from_the_store() -> None:
    assert loading([]) == ""
    case = {"shape": "llama-3-8b", "weights": "int4 g128", "gb": 5.7}
    written = records("store", case | {"gb": 1.2, "files": "cold", "from": "store"}, load_s=1.0, model_gb=1.2)
    for source, seconds in (("safetensors", 9.04), ("store", 2.5)):
        found: dict[str, Any] = {"load_s": seconds, "model_gb": 5.7, "peak_host_gb": 0.3, "peak_device_gb": 5.81}
        written += records("store", case | {"files": "cached", "from": source}, **found)
    written += records("store", case | {"files": "cached"}, share_of_plain_read=0.82)
    assert loading(written) == (
        "llama-3-8b, int4 in groups of 128, 5.7 GB, card, commit c1:\n\n"
        "| from | files | seconds | model, GB | peak on the host, GB | peak on the device, GB |\n"
        "|---|---|---|---|---|---|\n"
        "| safetensors | cached | 9.0 | 5.70 | 0.30 | 5.81 |\n"
        "| store | cached | 2.5 | 5.70 | 0.30 | 5.81 |\n\n"
        "Loaded again by a process that has compiled, the store comes at 82% of the rate of a plain read of its arrays "
        "where they are cached."
    )


def test_only_what_stands_between_the_marks_is_written() -> None:
    mark = BEGIN.format(name="b")
    document = f"x\n{BEGIN.format(name='a')}\n\none\n\n{END}\ny\n{mark}\n\n{END}\nz\n"
    assert replaced(document, "b", "two") == document.replace(f"{mark}\n\n{END}", f"{mark}\n\ntwo\n\n{END}")
    with pytest.raises(ValueError, match=r"has no <!-- written by `make performance`: c -->"):
        replaced(document, "c", "three")
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(BEGIN.format(name=name) in text for name in ("quality", "clipping", "decoding", "loading"))

"""Sensitivity: each weight's losses against the model's own, the knapsack against brute force, plans as TOML."""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

import jaxinfer as ji
import jaxinfer.cli
from checkpoints.progress import progress_bar
from jaxinfer.cli.sensitivity import precision_of
from jaxinfer.quantization import knapsack
from jaxinfer.quantization.calibration import Windows
from jaxinfer.quantization.moments import values_of
from jaxinfer.quantization.plan import HEAD, PRESETS, Plan, Precision, Rule, resolve
from jaxinfer.quantization.sensitivity_table import Sensitivity, plan_of, read_budget, to_toml

LLAMA = next(case for case in families.CASES if case.name == "llama")
COARSE, FINE, EIGHT = Precision(4, 64), Precision(4, 16), Precision(8)


def tokens(rows: int, length: int) -> Windows:
    ids = np.random.default_rng(0).integers(0, LLAMA.num_tokens, (rows, length)).astype(np.int32)
    return Windows(ids, np.zeros((0, length), np.int32), "random tokens")


@pytest.fixture(scope="module")
def model() -> ji.Model:
    return ji.load(LLAMA.folder, dtype="float32", progress=False)


@pytest.fixture(scope="module")
def found(model: ji.Model) -> Sensitivity:
    return ji.sensitivity(model, tokens(2, 24), precisions=[COARSE, FINE, EIGHT], measure_head=True, progress=False)


# --- Measuring


def divergence(model: ji.Model, original: ji.Model, ids: np.ndarray) -> float:
    """Mean KL over all positions, from the public logits in float64."""
    count = model.config.num_tokens
    p, q = (np.asarray(ji.logits(m, ids), np.float64)[..., :count] for m in (original, model))
    p, q = (x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True)) for x in (p, q))
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))


@pytest.mark.parametrize(("name", "precision"), [("layers.0.k_proj", COARSE), (HEAD, EIGHT)])
def test_a_weights_divergence_is_that_of_the_model_with_that_weight_quantised(
    name: str, precision: Precision, model: ji.Model, found: Sensitivity
):
    changed = ji.quantize(model, Plan((Rule((name,), precision),)))
    expected = divergence(changed, model, tokens(2, 24).calibration)
    row, column = found.names.index(name), found.precisions.index(precision)
    assert found.divergences[row, column] == pytest.approx(expected, rel=2e-3, abs=1e-8)
    assert expected > 0
    if name == HEAD:
        assert found.sizes[row, column] == sum(leaf.nbytes for leaf in jax.tree.leaves(changed.params.lm_head))
        assert found.original_sizes[row] == (0 if model.params.lm_head is None else 2 * model.params.lm_head.size)


def test_output_errors_and_sizes_are_those_of_the_codes(model: ji.Model, found: Sensitivity):
    """The first layer's q sees the normalised embeddings."""
    changed = ji.quantize(model, Plan((Rule(("layers.0.q_proj",), COARSE),))).params.layers[0].qkv
    packed, rows = changed.parts[0], changed.parts[0].shape[0]
    layer = model.params.layers[0]
    x = np.asarray(model.params.embed_tokens)[tokens(2, 24).calibration].astype(np.float64)
    x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + model.config.norm_eps) * np.asarray(layer.attn_norm)
    weight = np.asarray(layer.qkv[:rows], np.float64)
    error = np.asarray(values_of(packed), np.float64) - weight
    expected = np.sum((x @ error.T) ** 2) / np.sum((x @ weight.T) ** 2)
    row = found.names.index("layers.0.q_proj")
    assert found.output_errors[row, 0] == pytest.approx(expected, rel=1e-3)
    assert found.sizes[row, 0] == sum(leaf.nbytes for leaf in jax.tree.leaves(packed))
    assert found.original_sizes[row] == 2 * weight.size


def test_finer_precisions_cost_less_and_take_more(found: Sensitivity):
    totals, sizes = found.divergences.sum(axis=0), found.sizes.sum(axis=0)
    assert totals[0] > totals[1] > totals[2] > 0
    assert sizes[0] < sizes[1] < sizes[2] < found.original_sizes.sum()


def test_quick_measures_the_coarsest_and_scales_it(model: ji.Model, found: Sensitivity):
    quick = ji.sensitivity(model, tokens(2, 24), precisions=found.precisions, quick=True, progress=False)
    rows = len(quick.names)
    np.testing.assert_array_equal(quick.output_errors, found.output_errors[:rows])
    np.testing.assert_allclose(quick.divergences[:, 0], found.divergences[:rows, 0], rtol=1e-6)
    ratios = quick.output_errors / quick.output_errors[:, :1]
    np.testing.assert_allclose(quick.divergences, quick.divergences[:, :1] * ratios)
    assert quick.divergences.sum(axis=0) == pytest.approx(found.divergences[:rows].sum(axis=0), rel=0.3)


def test_the_proposed_plan_beats_the_uniform_one_of_its_size(model: ji.Model, found: Sensitivity):
    """In the room that groups of 64 take with the head in 16 bits, measured on the model as a whole."""
    uniform = Plan((Rule((HEAD,), Precision(16)), Rule(("*",), FINE)), "uniform")
    proposal, before = found.propose(uniform), found.evaluate(uniform)
    assert proposal.num_bytes <= before.num_bytes
    assert proposal.divergence < before.divergence
    ids = tokens(2, 24).calibration
    assert divergence(ji.quantize(model, proposal.plan), model, ids) < divergence(
        ji.quantize(model, uniform), model, ids
    )


@pytest.mark.parametrize(
    ("precisions", "message"),
    [
        ([], "precisions is empty"),
        ([Precision(16)], "16 bits quantises nothing"),
        ([Precision(4, 64, method="awq")], "scales several weights at once"),
    ],
)
def test_precisions_that_cannot_be_measured_are_refused(model: ji.Model, precisions: list[Precision], message: str):
    with pytest.raises(ValueError, match=message):
        ji.sensitivity(model, tokens(1, 8), precisions=precisions)


@pytest.mark.parametrize(("quick", "total"), [(True, 2 + 21 + 15), (False, 2 + 2 * (21 + 15))])
def test_the_bar_ends_with_the_last_layer(quick: bool, total: int, model: ji.Model, monkeypatch: pytest.MonkeyPatch):
    """It moves with every layer that all tokens go through: two of the original, then for each candidate of the seven
    weights of the first layer two, of the second one. The head, once for each of 15 weights, counts as one layer."""
    bars = []

    def kept(**options: Any) -> tqdm:
        bars.append(progress_bar(**options))
        return bars[-1]

    monkeypatch.setattr("jaxinfer.quantization.sensitivity.progress_bar", kept)
    wanted = {"precisions": [COARSE, EIGHT], "measure_head": True, "quick": quick, "progress": True}
    ji.sensitivity(model, tokens(2, 24), **wanted)
    assert (bars[0].n, bars[0].total) == (total, total)


def test_packed_models_and_empty_text_are_refused(model: ji.Model):
    with pytest.raises(ValueError, match="there are no tokens to calibrate with"):
        ji.sensitivity(model, Windows(np.zeros((0, 8), np.int32), np.zeros((0, 8), np.int32), "nothing"))
    packed = ji.quantize(model, "int4")
    with pytest.raises(ValueError, match=r"layers\.0\.qkv is packed already; load the original with packed=False"):
        ji.sensitivity(packed, tokens(1, 8))


def test_models_of_nan_are_refused(model: ji.Model):
    """Whose divergences all were 0.0, so that the coarsest plan was proposed."""
    norm = model.params.norm.at[3].set(jnp.nan)
    damaged = dataclasses.replace(model, params=dataclasses.replace(model.params, norm=norm))
    with pytest.raises(ValueError, match="its logits on this text are not finite, so nothing can be compared with"):
        ji.sensitivity(damaged, tokens(2, 24), precisions=[EIGHT], progress=False)
    first, last = model.params.layers
    assert isinstance(last.o, jax.Array)
    layers = [first, dataclasses.replace(last, o=last.o.at[0, 0].set(jnp.inf))]
    damaged = dataclasses.replace(model, params=dataclasses.replace(model.params, layers=layers))
    with pytest.raises(ValueError, match=r"layers\.1\.o_proj holds NaN or infinity"):
        ji.sensitivity(damaged, tokens(2, 24), precisions=[EIGHT], progress=False)


# --- The knapsack


def brute_force(losses: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int) -> float | None:
    """Least loss of all choices; None if none fits."""
    best = None
    for options in itertools.product(*(range(len(row)) for row in losses)):
        if sum(row[o] for row, o in zip(sizes, options, strict=True)) <= budget:
            loss = sum(row[o] for row, o in zip(losses, options, strict=True))
            best = loss if best is None else min(best, loss)
    return best


ITEMS = st.lists(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 60)), min_size=1, max_size=4), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=200)
@given(ITEMS, st.integers(0, 250))
def test_choices_are_the_best_of_all(items: list[list[tuple[int, int]]], budget: int):
    losses = [[float(loss) for loss, _ in row] for row in items]
    sizes = [[size for _, size in row] for row in items]
    best = brute_force(losses, sizes, budget)
    if best is None:
        with pytest.raises(ValueError, match="the smallest choice takes"):
            knapsack.choose(losses, sizes, budget)
        return
    chosen = knapsack.choose(losses, sizes, budget)
    assert sum(row[o] for row, o in zip(sizes, chosen, strict=True)) <= budget
    assert sum(row[o] for row, o in zip(losses, chosen, strict=True)) == best


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.95))
def test_rounded_sizes_lose_little_and_never_exceed_the_budget(seed: int, share: float):
    """Eight items of four sizes in a table of 1000 steps: rounding up costs each item less than a step.

    So the result is at least as good as the best for a budget that is smaller by eight steps.
    """
    rng = np.random.default_rng(seed)
    sizes = np.sort(rng.integers(10**5, 10**6, (8, 4)), axis=1)
    losses = -np.sort(-rng.exponential(1.0, (8, 4)), axis=1)
    low, high = int(sizes[:, 0].sum()), int(sizes[:, -1].sum())
    budget = low + int(share * (high - low))
    rows = sizes.tolist()
    before, knapsack.MOST_STEPS = knapsack.MOST_STEPS, 1000
    try:
        chosen = knapsack.choose(losses.tolist(), rows, budget)
    finally:
        knapsack.MOST_STEPS = before
    grid = np.indices((4,) * 8).reshape(8, -1)
    all_sizes = sum(sizes[item][grid[item]] for item in range(8))
    all_losses = sum(losses[item][grid[item]] for item in range(8))
    divisor = math.gcd(*(sizes - sizes[:, :1]).ravel().tolist())
    step = divisor * max(1, -(-((budget - low) // divisor) // 1000))
    best = float(np.min(np.where(all_sizes <= budget - 8 * step, all_losses, np.inf)))
    assert sum(row[o] for row, o in zip(rows, chosen, strict=True)) <= budget
    assert sum(losses[item][o] for item, o in enumerate(chosen)) <= best + 1e-9


def test_a_known_knapsack():
    """With 10 to spend: 6 on the first (loss 1 instead of 8.5) and 4 on the second beat 8 on the second alone."""
    losses, sizes = [[8.5, 1.0], [8.0, 5.0, 0.0]], [[0, 6], [0, 4, 8]]
    assert knapsack.choose(losses, sizes, 10) == [1, 1]
    assert knapsack.choose(losses, sizes, 8) == [0, 2]
    assert knapsack.choose(losses, sizes, 14) == [1, 2]


# --- Tables, budgets, plans


def table(names: Sequence[str], divergences: list[list[float]], sizes: list[list[int]]) -> Sensitivity:
    """Of two precisions, and weights of 100 bytes in 16 bits."""
    losses = np.array(divergences)
    originals = np.full(len(names), 100, np.int64)
    return Sensitivity(tuple(names), (COARSE, EIGHT), losses, losses, np.array(sizes, np.int64), originals, 8, "table")


def test_budgets_in_bytes_bits_and_plans():
    found = table(["layers.0.o_proj", "layers.0.down_proj"], [[3.0, 1.0], [5.0, 1.0]], [[25, 50], [25, 50]])
    assert found.propose(75).plan.precision("layers.0.down_proj") == EIGHT
    assert found.propose(75).plan.precision("layers.0.o_proj") == COARSE
    assert found.propose("75").num_bytes == 75
    assert found.propose("6 bits") == dataclasses.replace(
        found.propose(75), plan=dataclasses.replace(found.propose(75).plan, name="least loss in 6 bits")
    )  # 200 bytes in 16 bits are 100 weights
    assert found.propose("int4").num_bytes == 50
    assert found.propose(75).counts == {"int8": 1, str(COARSE): 1}
    by_gptq = found.propose(75, method="gptq")
    coarse = dataclasses.replace(COARSE, method="gptq")
    assert by_gptq.plan.precision("layers.0.o_proj") == coarse
    assert by_gptq.counts == {"int8": 1, str(coarse): 1}
    assert str(by_gptq).startswith("least loss in 75, gptq: 75 bytes, KL ")
    assert "as measured, less expected of gptq; weights: " in str(by_gptq) and "rtn" not in str(by_gptq)
    assert found.evaluate("int4").counts == {str(COARSE): 2}
    assert found.propose(PRESETS["int8"]).divergence == 2.0
    left = found.propose("1GB").plan
    assert [left.precision(name) for name in found.names] == [None, None]
    with pytest.raises(ValueError, match="the budget is 10 bytes and the smallest choice takes 50"):
        found.propose(10)
    with pytest.raises(ValueError, match=r"has layers\.0\.o_proj in int4 g64 hqq, which was not measured"):
        found.propose("int4-hqq")
    with pytest.raises(
        ValueError, match=r"wrong: no weight is named nope; names are like layers\.0\.o_proj and lm_head"
    ):
        found.propose(Plan((Rule(("nope",), COARSE),), "wrong"))
    assert found.propose("int4-int8-head").num_bytes == 50  # the head may be named although it was not measured


def test_amounts_of_budgets():
    amounts = {"4 Bits": 4.0, "4.5bits": 4.5, "60mb": 60_000_000, "0.5 KB": 500, 75: 75, "75.0": 75}
    for text, amount in amounts.items():
        found = read_budget(text)
        assert found == amount and type(found) is type(amount)
    for wrong in (4.5, "4.5"):
        with pytest.raises(ValueError, match=r"expected whole bytes, or '4\.5 bits' \(a weight\)"):
            read_budget(wrong)
    for wrong in (["int4"], None, True, b"60MB", float("nan"), "many"):
        with pytest.raises(
            ValueError, match=r"^--budget .*: expected a size such as 60MB, '4\.5 bits' \(a weight\), int4"
        ):
            read_budget(wrong, "--budget ")


def test_joined_weights_have_one_precision():
    names = [f"layers.0.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")]
    found = table(names, [[9.0, 0.0], [1.0, 0.0], [1.0, 0.0], [5.0, 0.0]], [[25, 50]] * 4)
    together, apart = found.propose(150), found.propose(150, joined=False)
    # 50 more than the least: q and o (14), or o alone (5) where q, k and v (11) would take 75 more.
    assert [apart.plan.precision(name) for name in names] == [EIGHT, COARSE, COARSE, EIGHT]
    assert [together.plan.precision(name) for name in names] == [COARSE, COARSE, COARSE, EIGHT]
    assert (apart.divergence, together.divergence) == (2.0, 11.0)


def test_plans_survive_their_file(tmp_path: pathlib.Path):
    precisions = {
        "layers.0.q_proj": Precision(4, 32, symmetric=True, method="gptq"),
        "layers.0.k_proj": Precision(8, method="fp8"),
        "layers.1.q_proj": Precision(3, 16),
        "layers.1.k_proj": Precision(16),
        HEAD: Precision(8),
    }
    plan = plan_of(precisions, 'a "name" with a \\')
    path = tmp_path / "plan.toml"
    path.write_text(to_toml(plan), encoding="utf-8")
    read = resolve(path)
    assert read.rules == plan.rules
    for name, precision in precisions.items():
        assert read.precision(name) == (None if precision.bits == 16 else precision)


def test_heat_map_and_table(found: Sensitivity, tmp_path: pathlib.Path):
    figure = found.plot(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title().split("\n")[0] for axes in maps] == list(map(str, found.precisions))
    drawn = np.asarray(maps[0].images[0].get_array())
    assert drawn.shape == (2, 7)
    row = found.names.index("layers.1.down_proj")
    assert drawn[1, 6] == pytest.approx(found.divergences[row, 0])
    (bar,) = [axes for axes in figure.axes if axes not in maps]
    assert bar.get_ylabel().endswith("nats") and bar.get_yscale() == "log"
    assert [label.get_text() for label in maps[0].get_yticklabels()] == ["0", "1"]
    picture = found._repr_png_()
    assert picture is not None
    assert picture.startswith(b"\x89PNG")
    assert "all 15" in str(found)


@pytest.mark.parametrize(
    ("text", "precision"),
    [("4:64:gptq", Precision(4, 64, method="gptq")), ("8::fp8", Precision(8, method="fp8")), (" 4 ", Precision(4))],
)
def test_precisions_on_the_command_line(text: str, precision: Precision):
    assert precision_of(text) == precision


def test_sensitivity_command(
    found: Sensitivity, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The plan that it writes is one that quantising reads."""
    measured = []

    def given_tokens(model: ji.Model, calibration: object, **options: object) -> Sensitivity:
        assert isinstance(calibration, ji.Calibration)
        measured.append((calibration.source, options["max_tokens"]))
        return found

    monkeypatch.setattr("jaxinfer.cli.sensitivity.sensitivity", given_tokens)
    path, folder = tmp_path / "plan.toml", str(LLAMA.folder)
    text = tmp_path / "a.txt"
    text.write_text("The bridge was closed. " * 20)
    arguments = [
        "sensitivity",
        "--calibration",
        str(text),
        "--precisions",
        "4,8",
        "--tokens",
        "16",
        "--plan",
        str(path),
    ]
    assert jaxinfer.cli.main([*arguments, folder, "--budget", "6 bits"]) == 0
    assert measured == [("a.txt", 16)]
    shown = capsys.readouterr().out
    assert "least loss in 6 bits" in shown
    assert "all int8" in shown
    quantised = ji.load(folder, quantize=path, progress=False)
    assert np.isfinite(np.asarray(ji.logits(quantised, [[1, 2, 3]]))).all()
    path.unlink()
    json_arguments = ["--json", "--heat-map", str(tmp_path / "map.png"), "--method", "gptq"]
    assert jaxinfer.cli.main([*arguments, folder, *json_arguments]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["weights"]) == 15
    assert facts["plan"]["bytes"] <= found.evaluate("int4").num_bytes
    methods = {(rule["bits"], rule["method"]) for rule in facts["plan"]["rules"]}
    assert (4, "gptq") in methods and methods <= {(4, "gptq"), (8, "rtn"), (16, "rtn")}
    assert "gptq" in path.read_text()
    path.unlink()
    measured.clear()
    capsys.readouterr()
    (tmp_path / "wrong.toml").write_text('[[rules]]\nweights = "nope"\n')
    for wrong, message in (
        (["--budget", "1KB"], "the budget is 1000 bytes and the smallest choice takes"),
        (["--budget", "0 bits"], "the budget is 0 bytes and the smallest choice takes"),
        (["--budget", str(tmp_path / "wrong.toml")], "no weight is named nope"),
    ):
        assert jaxinfer.cli.main([*arguments, folder, *wrong]) == 2
        assert message in capsys.readouterr().err
    assert not measured
    assert jaxinfer.cli.main(["sensitivity", folder, "--precisions", "5"]) == 2
    assert jaxinfer.cli.main(["sensitivity", folder, "--precisions", "four"]) == 2
    assert jaxinfer.cli.main(["sensitivity", folder, "--plan", "plan.json"]) == 2

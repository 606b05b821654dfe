"""The table that `jaxinfer.sensitivity` fills in: a heat map, and the plan of least loss in a given room."""

import collections
import dataclasses
import numbers
import os
import pathlib
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from jaxinfer.memory import shown_bytes
from jaxinfer.pictures import notebook_figure
from jaxinfer.planning.target import parse_bytes
from jaxinfer.quantization.knapsack import choose
from jaxinfer.quantization.plan import HEAD, PRESETS, Plan, Precision, Rule, resolve

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure

JOINED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Weights of a layer that are one product as long as their precisions agree."""

AS_IT_IS = Precision(16)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A plan, its bytes of weights (of those measured), and the sum of the KL divergences of its weights, in nats.

    `counts` are the numbers of weights by precision. `method` is the one that the plan asks for where the table was
    measured with another: the KL divergence is that of the table.
    """

    plan: Plan
    num_bytes: int
    divergence: float
    counts: Mapping[str, int]
    method: str | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as TOML, which `quantize` and `--quantize` read."""
        pathlib.Path(path).write_text(to_toml(self.plan), encoding="utf-8")

    def __str__(self) -> str:
        counts = ", ".join(f"{count} in {precision}" for precision, count in self.counts.items())
        expected = "expected" if self.method is None else f"as measured, less expected of {self.method}"
        return (
            f"{self.plan.name}: {shown_bytes(self.num_bytes)}, KL {self.divergence:.4f} {expected}; weights: {counts}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Sensitivity:
    """What each weight costs in each precision: rows are `names`, columns `precisions`.

    `output_errors` are shares of the output's mean square, `divergences` KL of the next token's distribution in nats,
    `sizes` bytes. `original_sizes` are those in 16 bits, 0 for a head that is tied to the embedding.
    """

    names: tuple[str, ...]
    precisions: tuple[Precision, ...]
    output_errors: Float64[np.ndarray, "weights precisions"]
    divergences: Float64[np.ndarray, "weights precisions"]
    sizes: Int64[np.ndarray, "weights precisions"]
    original_sizes: Int64[np.ndarray, " weights"]
    num_tokens: int
    model: str

    def propose(self, budget: int | str | Plan, *, joined: bool = True, method: str | None = None) -> Proposal:
        """The plan of least summed KL divergence whose weights fit into `budget`.

        The budget is a number of bytes, an amount such as "60MB", bits a weight such as "4.5 bits", or a plan: as much
        room as that takes. KL divergences of single weights are added up, which is sound as long as they are small:
        errors of different weights are all but uncorrelated, and KL grows with their squares. With `joined` q, k and v
        have one precision, and gate and up, so that each stays one product. Weights may also be left as they are.
        `method` is that of the plan's codes of 4 bits and fewer, where it is to be another than was measured: rounding
        takes no time, and what errs least by it mostly does by GPTQ too.

        Raises ValueError for a budget that nothing fits into, and for a plan with precisions that were not measured or
        with rules that name no weight.
        """
        units = list(self._units(joined))
        losses = [[*self.divergences[unit].sum(axis=0), 0.0] for unit in units]
        sizes = [[*map(int, self.sizes[unit].sum(axis=0)), int(self.original_sizes[unit].sum())] for unit in units]
        chosen = choose(losses, sizes, self._budget(budget))
        options = [*self.precisions, AS_IT_IS]
        precisions = {
            self.names[row]: options[option] for unit, option in zip(units, chosen, strict=True) for row in unit
        }
        picked = list(zip(losses, sizes, chosen, strict=True))
        name = f"least loss in {budget.name if isinstance(budget, Plan) else budget}"
        if method is not None:
            precisions = {weight: precision.by_method(method) for weight, precision in precisions.items()}
            name += f", {method}"
        return Proposal(
            plan_of(precisions, name),
            sum(size[option] for _, size, option in picked),
            float(sum(loss[option] for loss, _, option in picked)),
            _counts(precisions.values()),
            method,
        )

    def evaluate(self, plan: str | os.PathLike[str] | Plan) -> Proposal:
        """What the table foretells of any plan of measured precisions.

        Raises ValueError for other plans, and for rules that name no weight.
        """
        plan = resolve(plan, "plan=")
        plan.check([*self.names, HEAD])
        total, divergence = 0, 0.0
        for row, name in enumerate(self.names):
            precision = plan.precision(name)
            if precision is None:
                total += int(self.original_sizes[row])
                continue
            if precision not in self.precisions:
                measured = ", ".join(map(str, self.precisions))
                raise ValueError(f"{plan.name} has {name} in {precision}, which was not measured; measured: {measured}")
            column = self.precisions.index(precision)
            total += int(self.sizes[row, column])
            divergence += float(self.divergences[row, column])
        counts = _counts(plan.precision(name) or AS_IT_IS for name in self.names)
        return Proposal(plan, total, divergence, counts)

    def _budget(self, budget: int | str | Plan) -> int:
        room = read_budget(budget)
        if isinstance(room, Plan):
            return self.evaluate(room).num_bytes
        if isinstance(room, float):
            # A projection in 16 bits has two bytes a weight; a tied head in 8 bits has one and a scale a row.
            return int(room * self.original_sizes.sum() / 16)
        return room

    def _units(self, joined: bool) -> Iterable[list[int]]:
        """Rows that get one precision."""
        places: dict[str, list[int]] = {}
        for row, name in enumerate(self.names):
            layer, _, part = name.rpartition(".")
            group = next((group[0] for group in JOINED if part in group), part) if joined else part
            places.setdefault(f"{layer}.{group}", []).append(row)
        yield from places.values()

    def __str__(self) -> str:
        """The most sensitive weights, and the sums."""
        worst = np.argsort(-self.divergences[:, 0])[:10]
        width = max(len(self.names[row]) for row in worst)
        heads = [str(precision) for precision in self.precisions]
        lines = [f"{self.model}: KL divergence in nats, on {self.num_tokens} tokens"]
        lines.append(" " * width + "".join(f"  {head:>14}" for head in heads))
        for row in worst:
            values = "".join(f"  {value:14.6f}" for value in self.divergences[row])
            lines.append(f"{self.names[row]:<{width}}{values}")
        totals = "".join(f"  {value:14.6f}" for value in self.divergences.sum(axis=0))
        lines.append(f"{'all ' + str(len(self.names)):<{width}}{totals}")
        lines.append(
            f"{'size':<{width}}" + "".join(f"  {shown_bytes(int(value)):>14}" for value in self.sizes.sum(axis=0))
        )
        return "\n".join(lines)

    def to_mapping(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "model": self.model,
            "tokens": self.num_tokens,
            "precisions": [str(precision) for precision in self.precisions],
            "weights": [
                {
                    "name": name,
                    "output_error": self.output_errors[row].tolist(),
                    "kl": self.divergences[row].tolist(),
                    "bytes": self.sizes[row].tolist(),
                    "original_bytes": int(self.original_sizes[row]),
                }
                for row, name in enumerate(self.names)
            ],
        }

    def _repr_png_(self) -> bytes | None:
        """The heat map, for a notebook; None without matplotlib, and the notebook shows the text."""
        try:
            figure: Any = self.plot()
        except ImportError:
            return None
        return figure._repr_png_()

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws a heat map for each precision, layers by kinds of weight, of the KL divergence that each weight causes.

        One scale for all, in powers of ten. `path` also saves it, as PNG or by its ending. Needs matplotlib, which
        comes with `pip install jaxinfer[plot]`; raises ImportError without it.
        """
        columns = list(dict.fromkeys(name.rpartition(".")[2] for name in self.names if name != HEAD))
        layers = sorted({int(name.split(".")[1]) for name in self.names if name != HEAD})
        count = len(self.precisions)
        figure = notebook_figure((1.6 + 1.9 * count, 2.4 + 0.18 * len(layers)))
        from matplotlib.colors import LogNorm  # now that it is known to be there

        smallest = max(float(self.divergences[self.divergences > 0].min(initial=1.0)), 1e-9)
        losses = np.maximum(self.divergences, smallest)
        scale = LogNorm(smallest, max(float(losses.max()), 1.01 * smallest))
        image = None
        all_axes = figure.subplots(1, count, sharey=True, squeeze=False)[0]
        for column, (axes, precision) in enumerate(zip(all_axes, self.precisions, strict=True)):
            grid = np.full((len(layers), len(columns)), np.nan)
            for row, name in enumerate(self.names):
                if name != HEAD:
                    _, layer, part = name.split(".")
                    grid[layers.index(int(layer)), columns.index(part)] = losses[row, column]
            image = axes.imshow(grid, aspect="auto", cmap="viridis", norm=scale)
            title = str(precision)
            if HEAD in self.names:
                title += f"\n{HEAD}: KL {self.divergences[self.names.index(HEAD), column]:.1e}"
            axes.set_title(title, fontsize="small")
            axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize="small")
        step = -(-len(layers) // 16)
        all_axes[0].set_yticks(range(0, len(layers), step), layers[::step])
        all_axes[0].set_ylabel("layer")
        assert image is not None
        bar = figure.colorbar(image, ax=list(all_axes), pad=0.02, aspect=30)
        bar.set_label("KL divergence, nats", fontsize="small")
        about = f"{self.model}: what each weight costs when it alone is quantised, on {self.num_tokens:,} tokens"
        figure.suptitle(about, fontsize="medium")
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


@typing.no_type_check  # it checks more, and its errors are the ones users must see
def read_budget(budget: int | str | Plan, given_as: str = "budget=") -> int | float | Plan:
    """A budget as `Sensitivity.propose` takes it: bytes, bits a weight as a float, or the plan that takes the room.

    Raises ValueError for what is none of them; `given_as` is what errors call the argument.
    """
    if isinstance(budget, Plan):
        return budget
    text = str(budget) if isinstance(budget, str | os.PathLike | numbers.Real) else ""
    if text in PRESETS or text.endswith(".toml"):
        return resolve(text, given_as)
    amount = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(bits?)?\s*", text, re.IGNORECASE)
    if amount is not None and amount[2] is not None:
        return float(amount[1])
    if amount is not None and not float(amount[1]).is_integer():
        raise ValueError(f"{given_as}{budget!r}: expected whole bytes, or '{amount[1]} bits' (a weight)")
    try:
        return parse_bytes(text)
    except ValueError:
        expected = f"expected a size such as 60MB, '4.5 bits' (a weight), {', '.join(PRESETS)}, or a .toml file"
        raise ValueError(f"{given_as}{budget!r}: {expected}") from None


def _counts(precisions: Iterable[Precision]) -> dict[str, int]:
    return dict(collections.Counter(map(str, precisions)).most_common())


def plan_of(precisions: Mapping[str, Precision], name: str) -> Plan:
    """A plan that gives each of these weights its precision, and leaves others as they are."""
    by_precision: dict[Precision, list[str]] = {}
    for weight, precision in precisions.items():
        by_precision.setdefault(precision, []).append(weight)
    rules = [Rule(tuple(weights), precision) for precision, weights in by_precision.items() if precision.bits < 16]
    kept = by_precision.get(AS_IT_IS, [])
    return Plan((*rules, *([Rule(tuple(kept), AS_IT_IS)] if kept else [])), name)


def to_toml(plan: Plan) -> str:
    """A plan as the TOML that `quantization.plan` reads."""
    lines = [f"# {plan.name}"]
    for rule in plan.to_mapping()["rules"]:
        lines += ["", "[[rules]]"]
        lines += [f"{key} = {_toml(value)}" for key, value in rule.items()]
    return "\n".join(lines) + "\n"


def _toml(value: bool | int | str | Sequence[str]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return "[\n" + "".join(f"    {_toml(item)},\n" for item in value) + "]"

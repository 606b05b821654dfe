"""The multiple-choice knapsack: one option for each item, the least total loss, sizes within a budget.

Dynamic programming over sizes (Kellerer, Pferschy, Pisinger, "Knapsack Problems", chapter 11): exact where sizes have a
common divisor that leaves few enough steps, and near-exact where they have to be rounded up to steps.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

MOST_STEPS = 1 << 16
"""Steps of the table: a bit of 200 items in 16 options then takes 13 MB, and the time of as many additions."""


def choose(losses: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int) -> list[int]:
    """For each item the index of its option.

    `losses` and `sizes` have a row for each item and an entry for each of its options; sizes are whole and not
    negative, losses finite. The sum of the sizes of what is chosen is at most `budget`. With more than `MOST_STEPS`
    steps between the smallest choice and the budget sizes are rounded up to such steps; what that leaves of the budget
    is then spent one by one on the best exchange. Raises ValueError for a budget below the smallest choice.
    """
    kept = [_undominated(*row) for row in zip(losses, sizes, strict=True)]
    least = [min(sizes[item][option] for option in options) for item, options in enumerate(kept)]
    room = budget - sum(least)
    if room < 0:
        raise ValueError(f"the budget is {budget} bytes and the smallest choice takes {sum(least)}; raise it")
    extra = [[sizes[item][option] - least[item] for option in options] for item, options in enumerate(kept)]
    room = min(room, sum(max(row) for row in extra))
    divisor = functools.reduce(math.gcd, (size for row in extra for size in row), 0) or 1
    step = divisor * max(1, -(-(room // divisor) // MOST_STEPS))
    steps = room // step
    best = np.zeros(steps + 1)
    taken = np.zeros((len(kept), steps + 1), np.uint8)
    for item, options in enumerate(kept):
        totals = np.full((len(options), steps + 1), np.inf)
        for place, option in enumerate(options):
            width = -(-extra[item][place] // step)
            if width <= steps:
                totals[place, width:] = best[: steps + 1 - width] + losses[item][option]
        taken[item] = np.argmin(totals, axis=0)
        best = np.min(totals, axis=0)
    position = steps
    places = [0] * len(kept)
    for item in reversed(range(len(kept))):
        places[item] = int(taken[item, position])
        position -= -(-extra[item][places[item]] // step)
    chosen = [options[place] for options, place in zip(kept, places, strict=True)]
    return chosen if step == divisor else _spend(losses, sizes, chosen, budget)


def _undominated(losses: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Options that no other beats in both loss and size; of equal ones the first."""
    order = sorted(range(len(sizes)), key=lambda option: (sizes[option], losses[option], option))
    kept: list[int] = []
    for option in order:
        if not kept or losses[option] < losses[kept[-1]]:
            kept.append(option)
    return kept


def _spend(
    losses: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], chosen: Sequence[int], budget: int
) -> list[int]:
    """Exchanges options of single items, the one of largest gain first, as long as one fits into what is left."""
    chosen = list(chosen)
    left = budget - sum(row[option] for row, option in zip(sizes, chosen, strict=True))
    while True:
        gain, item, option, cost = max(
            (losses[item][chosen[item]] - losses[item][option], -item, option, sizes[item][option] - row[chosen[item]])
            for item, row in enumerate(sizes)
            for option in range(len(row))
            if sizes[item][option] - row[chosen[item]] <= left
        )
        if gain <= 0:
            return chosen
        chosen[-item] = option
        left -= cost

"""What the stamps of an INT4 product of few rows (int4_stamps.py) say: medians to be recorded, and a table."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.int4_stamps import HEAD, Places
from pallas_kernels.int4_matmul.plan import Plan
from pallas_kernels.int4_matmul.stream import first_and_count


@dataclasses.dataclass(frozen=True)
class Profile:
    """What the stamps of several launches say, in microseconds since a launch's first block started.

    Arrays are [launch, block] and, where a warp's turns are told apart, [launch, block, turn]; what a block with fewer
    strips has no turn for is NaN. Of the two warps that multiply it is their mean.
    """

    multiprocessors: np.ndarray
    strips: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    before: dict[str, np.ndarray]
    turns: dict[str, np.ndarray]

    @classmethod
    def of(cls, plan: Plan, outs: Sequence[jax.Array]) -> "Profile":
        places, most = Places(plan), plan.most_strips
        words = np.stack([np.asarray(out).reshape(-1)[places.start :][: places.blocks * places.block] for out in outs])
        words = words.view(np.uint32).reshape(len(outs), places.blocks, places.block).astype(np.int64)
        strips = np.array([first_and_count(plan, block)[1] for block in range(plan.blocks_per_slice)] * plan.slices)
        warps = [words[..., i:j] for i, j in itertools.pairwise(places.starts)]
        smid, start, end = (warps[-1][..., i] for i in range(HEAD))
        first = warps[-1][..., HEAD]
        place = HEAD + len(places.events[-1].before) + len(places.events[-1].turn) * strips
        last = np.take_along_axis(warps[-1], np.broadcast_to(place, first.shape)[..., None], -1)[..., 0]
        clocks_a_us = float(np.median(_since(last, first) / (end - start))) * 1e3
        starts = (start - start.min(1, keepdims=True)) / 1e3

        def microseconds(clocks: np.ndarray) -> np.ndarray:
            return starts[..., None] + _since(clocks, first[..., None]) / clocks_a_us

        before, turns = {}, {}
        for events in dict.fromkeys(places.events):
            same = [warp for warp, other in zip(warps, places.events, strict=True) if other == events]
            times = np.mean([microseconds(warp[..., HEAD:]) for warp in same], 0)
            written = np.min(same, 0)[..., HEAD:] > 0
            count, each = len(events.before), len(events.turn)
            before |= {name: times[..., i] for i, name in enumerate(events.before)}
            shape = (*smid.shape, most, each)
            inside = (np.arange(most)[:, None] < strips[:, None, None]) & written[..., count:-1].reshape(shape)
            in_turns = np.where(inside, times[..., count:-1].reshape(shape), np.nan)
            turns |= {name: in_turns[..., i] for i, name in enumerate(events.turn)}
        return cls(smid, strips, starts, (end - start.min(1, keepdims=True)) / 1e3, before, turns)

    def metrics(self) -> dict[str, tuple[float, str]]:
        """Medians over launches and blocks, but of first and last ones.

        `first_written`: the end of the first turn, where its results, if it has any, are written or sent. What no block
        has, as sums where those of several turns are added at once, is left out. `lateness_repeats`: the correlation of
        how late multiprocessors end on average in one half of the launches with the other half; 0 where it is
        another's turn each time.
        """
        weights, ends = self.turns["weights there"], self.ends
        between = np.diff(weights, axis=-1)
        most = self.strips == self.strips.max()
        late = ends[:, most] - np.median(ends[:, most], 1, keepdims=True)
        by_place = [self._by_multiprocessor(late[i::2], self.multiprocessors[:, most][i::2]) for i in range(2)]
        times = {
            "last_start": np.median(self.starts.max(1)),
            "x_asked": np.median(self.before["x asked for"]),
            "x_there": np.median(self.before["x there"]),
            "x_summed": np.median(self.before["x summed"]),
            "first_weights": np.median(weights[..., 0]),
            "first_sums": np.median(self.turns["all sums" if "all sums" in self.turns else "sums there"][..., 0]),
            "first_written": np.median(self.turns["results written"][..., 0]),
            "second_weights": np.nanmedian(weights[..., 1]),
            "later_turn": np.nanmedian(between[..., 1:] if between.shape[-1] > 1 else between),
            "first_end": np.median(ends.min(1)),
            "end_fewer_strips": np.median(ends[:, self.strips == self.strips.min()]),
            "end_most_strips": np.median(ends[:, most]),
            "last_end": np.median(ends.max(1)),
        }
        return {name: (float(value), "us") for name, value in times.items() if np.isfinite(value)} | {
            "lateness_repeats": (float(np.corrcoef(by_place[0], by_place[1])[0, 1]), "")
        }

    def _by_multiprocessor(self, late: np.ndarray, multiprocessors: np.ndarray) -> np.ndarray:
        """Each one's mean; zero for one that had no such block."""
        numbers, count = multiprocessors.reshape(-1), int(self.multiprocessors.max()) + 1
        runs = np.bincount(numbers, minlength=count)
        return np.bincount(numbers, late.reshape(-1), count) / np.maximum(runs, 1)

    def table(self) -> list[str]:
        """Lines of text: quantiles over blocks and launches, and a line for each turn."""
        lines = [f"{'microseconds':>24} {'first':>7} {'10 %':>7} {'median':>7} {'90 %':>7} {'last':>7}"]
        for name, times in {"block starts": self.starts, **self.before, "block ends": self.ends}.items():
            values = [times.min(1), *(np.quantile(times, q, axis=1) for q in (0.1, 0.5, 0.9)), times.max(1)]
            lines.append(f"{name:>24} " + " ".join(f"{np.median(value):7.2f}" for value in values))
        lines.append(f"{'turn (medians)':>24} " + " ".join(f"{name:>15}" for name in self.turns))
        for turn in range(int(self.strips.max())):
            columns = [times[..., turn] for times in self.turns.values()]
            text = [f"{np.nanmedian(c):15.2f}" if np.isfinite(c).any() else f"{'-':>15}" for c in columns]
            lines.append(f"{turn + 1:>24} " + " ".join(text))
        return lines


def _since(clocks: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Clocks from `start` on, of 32-bit counters: negative before it."""
    return (clocks - start + (1 << 31)) % (1 << 32) - (1 << 31)

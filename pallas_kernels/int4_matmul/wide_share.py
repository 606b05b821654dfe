"""Parts of equal numbers of stages, whatever they are of: how blocks that have parts of one tile put it together.

A tile is the features and tokens that a cluster computes at a time. Where tiles do not fill the card evenly, each
cluster has a run of stages instead, which may begin and end within a tile. It hands on its sums of the tile that it
begins within, which is the first thing it does; and of the tile that it ends within it has the first stages, so it
adds what the clusters behind it handed on long ago, always in the same order, and writes the results.

Clusters take the runs from the last to the first: who waits has been brought onto the card after those it waits for.
"""

from typing import Any

from pallas_kernels.int4_matmul.wide_plan import Part, WidePlan


class Run:
    """The parts of one cluster."""

    def __init__(self, plan: WidePlan, cluster: Any, rank: Any):
        self.plan, self.rank = plan, rank
        self.index = (plan.clusters - 1) - cluster
        stages = plan.tiles * plan.steps
        self.start, self.end = (edge * stages // plan.clusters for edge in (self.index, self.index + 1))
        self.first_tile = self.start // plan.steps
        self.parts = (self.end - 1) // plan.steps - self.first_tile + 1

    def part(self, w: Any, i: Any) -> Part:
        plan, tile = self.plan, self.first_tile + i
        before = tile * plan.steps
        first = w.select(before < self.start, self.start - before, w.integer(0))
        last = w.select(before + plan.steps < self.end, w.integer(plan.steps), self.end - before)
        return Part.of_tile(plan, tile, first, last - first, self.rank)

    def others(self, i: Any) -> Any:
        """How many clusters behind this one hand on sums of part `i`'s tile."""
        stages, clusters = self.plan.tiles * self.plan.steps, self.plan.clusters
        end = (self.first_tile + i + 1) * self.plan.steps
        return (end * clusters - 1) // stages - self.index


class Exchange:
    """What blocks hand on: float32 [cluster, block, warp, number of a lane / 4, lane, 4], and a flag for every warp."""

    def __init__(self, plan: WidePlan, sums: Any, flags: Any):
        self.plan, self.sums, self.flags = plan, sums, flags

    def _place(self, w: Any, index: Any, rank: Any) -> Any:
        return (index * self.plan.schedule.cluster + rank) * self.plan.consumer_warps + w.warp

    def hand_on(self, w: Any, run: Run, values: list[Any]) -> None:
        place = self._place(w, run.index, run.rank)
        for i in range(0, len(values), 4):
            w.store_four(self.sums, (place * (len(values) // 4) * 32 + w.lane) * 4, 32 * i, values[i : i + 4])
        w.raise_flag(self.flags, place)

    def add(self, w: Any, run: Run, others: Any, values: list[Any]) -> list[Any]:
        """The sums with those of the `others` clusters behind this one."""

        def more(i: Any, sums: Any) -> list[Any]:
            place = self._place(w, run.index + 1 + i, run.rank)
            w.wait_for_flag(self.flags, place)
            added: list[Any] = []
            for j in range(0, len(values), 4):
                four = w.load_four(self.sums, (place * (len(values) // 4) * 32 + w.lane) * 4, None, 32 * j)
                added += [a + b for a, b in zip(sums[j : j + 4], four, strict=True)]
            return added

        return list(w.loop(others, values, more))

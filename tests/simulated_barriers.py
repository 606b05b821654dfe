"""Barriers in the shared memory of simulated blocks, and those of a block's warpgroups."""

import threading


class Barriers:
    """The barriers in the shared memory of a cluster, by (block, address)."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.groups: dict[tuple[int, int], threading.Barrier] = {}
        self.turns: dict[tuple[int, int], list[int]] = {}  # arrivals so far
        self.state: dict[tuple[int, int], list[int]] = {}  # arrivals of a phase, those left, bytes left, phases

    def together(self, block: int, warpgroup: int) -> threading.Barrier:
        with self.changed:
            return self.groups.setdefault((block, warpgroup), threading.Barrier(4, timeout=60))

    def turn(self, block: int, barrier: int, wait: bool) -> None:
        """One of the four warps that wait, or of the four that give the turn."""
        with self.changed:
            state = self.turns.setdefault((block, barrier), [0])
            state[0] += 1
            phase = state[0] // 8
            if state[0] % 8 == 0:
                self.changed.notify_all()
            elif wait:
                assert self.changed.wait_for(lambda: state[0] // 8 > phase, timeout=60), f"block {block} waits for ever"

    def update(self, block: int, address: int, arrivals: int = 0, nbytes: int = 0) -> None:
        with self.changed:
            state = self.state[block, address]
            state[1] -= arrivals
            state[2] += nbytes
            assert state[1] >= 0, "more arrivals than the phase has"
            if state[1] == 0 and state[2] == 0:
                state[1], state[3] = state[0], state[3] + 1
                self.changed.notify_all()

    def wait(self, block: int, address: int, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: (self.state[block, address][3] + 1) % 2 == parity, timeout=60)
            assert done, f"block {block} waits for ever"

"""A lock that nobody can keep from the others by asking for it again at once."""

import collections
import threading


class FairLock:
    """Re-entrant; threads get it in the order in which they asked. `threading.RLock` may go to the same one always."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._waiting: collections.deque[tuple[int, threading.Event]] = collections.deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._gate:
            if self._owner == me or (self._owner is None and not self._waiting):
                self._owner, self._depth = me, self._depth + 1
                return
            turn = (me, threading.Event())
            self._waiting.append(turn)
        try:
            turn[1].wait()
        except BaseException:  # an interrupt: the turn goes to the next
            with self._gate:
                if self._owner == me:
                    self._pass_on()
                else:
                    self._waiting.remove(turn)
            raise

    def __exit__(self, *_: object) -> None:
        with self._gate:
            self._depth -= 1
            if self._depth == 0:
                self._pass_on()

    def _pass_on(self) -> None:
        """Hands the lock to whoever asked first."""
        if self._waiting:
            self._owner, event = self._waiting.popleft()
            self._depth = 1
            event.set()
        else:
            self._owner, self._depth = None, 0

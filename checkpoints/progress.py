"""Progress of long work on standard error: a bar where somebody watches, a line now and then in a log."""

import sys
from typing import Any

from tqdm.auto import tqdm

LOG_INTERVAL = 10.0
"""Seconds between two lines in a log; work that takes less says nothing there."""
BEFORE_TOKENS = "no tokens yet: programs of new sizes are compiled first"
"""What a bar says while nothing has come."""

_LINE = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt} after {elapsed}, {remaining} left, {rate_fmt}{postfix}"


def progress_bar(*, total: int, shown: bool, **options: Any) -> tqdm:
    """A tqdm bar up to `total`, with tqdm's own `options`; `shown=False` is one that prints nothing.

    On a terminal and in a notebook it is drawn over itself. Anywhere else that would be one line without end, so it
    writes a line each time `LOG_INTERVAL` seconds have passed.
    """
    if shown and not is_watched():
        options |= {
            "file": _Lines(),
            "delay": LOG_INTERVAL,
            "mininterval": LOG_INTERVAL,
            "miniters": 1,
            "bar_format": _LINE,
        }
    return tqdm(total=total, disable=not shown, **options)


def is_watched() -> bool:
    """Whether somebody sees standard error as it is drawn: on a terminal, or in a notebook."""
    kernel = sys.modules.get("ipykernel.kernelapp")  # which others may import too
    return sys.stderr.isatty() or (kernel is not None and kernel.IPKernelApp.initialized())


class _Lines:
    """Standard error without what moves a terminal's cursor: what tqdm draws, each time as a line of its own."""

    def write(self, text: str) -> None:
        words = " ".join(text.replace("\x1b[A", "").split())
        if words:
            sys.stderr.write(f"{words}\n")

    def flush(self) -> None:
        sys.stderr.flush()

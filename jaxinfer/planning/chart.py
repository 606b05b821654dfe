"""Bars of what memory goes to: in text, and drawn."""

import os
import typing
from collections.abc import Iterable, Sequence

from jaxinfer.memory import shown_binary
from jaxinfer.pictures import notebook_figure

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 40
"""Characters of a bar as long as the capacity."""


def text_bars(items: Sequence[tuple[str, int]], capacity: int) -> Iterable[str]:
    """A line for each item: name, size, and a bar that begins where the one before it ended.

    The scale ends at the capacity, or at the sum where that is larger; `|` marks the capacity then.
    """
    total = sum(size for _, size in items)
    scale = max(capacity, total, 1)
    name_width = max(len(name) for name, _ in items)
    before = 0
    for name, size in items:
        start, stop = round(WIDTH * before / scale), round(WIDTH * (before + size) / scale)
        before += size
        bar = " " * start + ("#" * (stop - start) or ("." if size else ""))
        mark = round(WIDTH * capacity / scale)
        bar = f"{bar:<{WIDTH + 1}}"
        if capacity < scale and bar[mark] == " ":
            bar = bar[:mark] + "|" + bar[mark + 1 :]
        yield f"{name:<{name_width}}  {shown_binary(size):>12}  {bar}".rstrip()


def figure(
    items: Sequence[tuple[str, int]], capacity: int, title: str, path: str | os.PathLike[str] | None = None
) -> "Figure":
    """One stacked bar with a line at the capacity. Raises ImportError without matplotlib."""
    drawing = notebook_figure((9.0, 3.0))
    axes = drawing.add_subplot()
    start = 0.0
    for name, size in items:
        width = size / 2**30
        axes.barh([0], [width], left=start, height=0.6, label=f"{name}: {shown_binary(size)}")
        start += width
    axes.axvline(capacity / 2**30, color="black", linestyle="--", label=f"available: {shown_binary(capacity)}")
    axes.set_yticks([])
    axes.set_xlabel("GiB")
    axes.set_title(title)
    drawing.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    if path is not None:
        drawing.savefig(path, dpi=150)
    return drawing

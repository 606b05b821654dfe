"""A picture of when the device did what: prefill and decode programs as bars over time."""

import os
import typing
from collections.abc import Sequence

from jaxinfer.engine.metrics import Span
from jaxinfer.pictures import notebook_figure

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_timeline(spans: Sequence[Span], path: str | os.PathLike[str] | None = None) -> "Figure":
    """Draws spans in two rows, prefill and decode, the more opaque the more sequences; returns the figure.

    A notebook shows what is returned; `path` also saves it, as PNG or whatever its ending says. Needs matplotlib, which
    comes with `pip install jaxinfer[plot]`. Raises ImportError without it and ValueError if there is nothing to draw.
    """
    figure = notebook_figure((12.0, 2.4))
    if not spans:
        raise ValueError("no programs have run since the metrics were reset; there is no timeline to draw")

    axes = figure.add_subplot()
    origin = min(span.start for span in spans)
    most = max(span.rows for span in spans)
    for place, (kind, colour) in enumerate((("decode", "tab:blue"), ("prefill", "tab:orange"))):
        mine = [span for span in spans if span.kind == kind]
        if mine:
            axes.broken_barh(
                [(span.start - origin, span.end - span.start) for span in mine],
                (place + 0.1, 0.8),
                facecolors=[(colour, 0.25 + 0.75 * span.rows / most) for span in mine],
            )
    axes.set_yticks([0.5, 1.5], ["decode", "prefill"])
    axes.set_ylim(0, 2)
    axes.set_xlabel("seconds")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure

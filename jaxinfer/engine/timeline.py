"""A picture of when the device did what: prefill and decode programs as bars over time."""

import io
import os
import typing
from collections.abc import Sequence

from jaxinfer.engine.metrics import Span

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_timeline(spans: Sequence[Span], path: str | os.PathLike[str] | None = None) -> "Figure":
    """Draws spans in two rows, prefill and decode, the more opaque the more sequences; returns the figure.

    A notebook shows what is returned; `path` also saves it, as PNG or whatever its ending says. Needs matplotlib, which
    comes with `pip install jaxinfer[plot]`. Raises ImportError without it and ValueError if there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure  # an optional dependency, and slow to import
    except ImportError as error:
        raise ImportError("the timeline is drawn by matplotlib; install it with: pip install jaxinfer[plot]") from error
    if not spans:
        raise ValueError("no programs have run since the metrics were reset; there is no timeline to draw")

    class NotebookFigure(Figure):
        """Shows itself in a notebook, which does so for pyplot's figures only."""

        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=100)
            return picture.getvalue()

    figure = NotebookFigure(figsize=(12, 2.4), layout="constrained")
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

"""A picture of when the device did what: prefill and decode programs as bars over time."""

import os
import typing
from collections.abc import Sequence

from jaxinfer.engine.metrics import Span
from jaxinfer.pictures import notebook_figure

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_timeline(spans: Sequence[Span], path: str | os.PathLike[str] | None = None) -> "Figure":
    """Draws spans in a row for each kind, the more opaque the more sequences; returns the figure. Kinds are prefill,
    decode and, where there is one, a draft's own prefill.

    A notebook shows what is returned; `path` also saves it, as PNG or whatever its ending says. Needs matplotlib, which
    comes with `pip install jaxinfer[plot]`. Raises ImportError without it and ValueError if there is nothing to draw.
    """
    figure = notebook_figure((12.0, 2.4))
    if not spans:
        raise ValueError("no programs have run since the metrics were reset; there is no timeline to draw")

    axes = figure.add_subplot()
    origin = min(span.start for span in spans)
    most = max(span.rows for span in spans)
    kinds = {"decode": "tab:blue", "prefill": "tab:orange", "draft": "tab:green"}
    if not any(span.kind == "draft" for span in spans):
        del kinds["draft"]
    for place, (kind, colour) in enumerate(kinds.items()):
        mine = [span for span in spans if span.kind == kind]
        if mine:
            axes.broken_barh(
                [(span.start - origin, span.end - span.start) for span in mine],
                (place + 0.1, 0.8),
                facecolors=[(colour, 0.25 + 0.75 * span.rows / most) for span in mine],
            )
    axes.set_yticks([place + 0.5 for place in range(len(kinds))], list(kinds))
    axes.set_ylim(0, len(kinds))
    axes.set_xlabel("seconds")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure

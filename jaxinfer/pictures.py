"""Figures that a notebook shows by itself."""

import io
import typing

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure


def notebook_figure(size: tuple[float, float]) -> "Figure":
    """An empty figure of `size` inches. A notebook shows what a cell returns, but knows how for pyplot's figures only.

    Needs matplotlib, which comes with `pip install jaxinfer[plot]`. Raises ImportError without it.
    """
    try:
        from matplotlib.figure import Figure  # an optional dependency, and slow to import
    except ImportError as error:
        raise ImportError("pictures are drawn by matplotlib; install it with: pip install jaxinfer[plot]") from error

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=100)
            return picture.getvalue()

    return NotebookFigure(figsize=size, layout="constrained")

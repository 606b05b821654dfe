"""What a model, its cache and its programs take on a device, as a record that shows itself."""

import dataclasses
import os
import typing
from collections.abc import Iterable, Mapping

from jaxinfer.batch import PAGE_SIZE, bucket, pages_for
from jaxinfer.memory import shown_binary
from jaxinfer.planning.chart import figure, text_bars

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure

CACHE_SHARE = 0.9
"""Of what the weights leave, `generate` gives the cache so much."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes that `generate` takes on one device for `batch` sequences of up to `context` tokens, the output included.

    Printed it is a table with bars; in a notebook a picture; `plot` draws that to a file.
    """

    model: str
    device: str
    capacity: int
    """What arrays may take there."""
    batch: int
    context: int
    weights: Mapping[str, int]
    """By precision."""
    draft_weights: Mapping[str, int]
    """By precision; empty without a draft."""
    kv_dtype: str
    kv_bytes_per_token: int
    """Of all layers, the draft's included. Of a tiered cache, its bytes for each of the tokens it has room for."""
    kv_cache: int
    """With room for `rounded`."""
    prefill: int
    """Activations of the largest call that prompts are computed in."""
    decode: int
    """Temporaries of a decode step, most of them copies of its logits."""
    logits: int
    """Logits of the prompts' last tokens, which stay until the batch is done."""
    compiling: int
    """What the compiler takes to try kernels out, where nothing is in its cache yet; not at the same time as the rest
    of the temporaries."""
    loading: int
    """What loading takes beside the weights; gone before there is a cache."""
    temporaries_from: str
    """"formula", or "compiler": XLA's own figures."""
    largest_batch: int | None
    """Most sequences of `context` tokens that fit; None if not even one does."""
    longest_context: int | None
    """Longest context with which `batch` sequences fit, up to the model's; None if not even the shortest does."""

    @property
    def total_weights(self) -> int:
        return sum(self.weights.values()) + sum(self.draft_weights.values())

    @property
    def peak(self) -> int:
        """The most that is in use at any moment, from loading to the last token."""
        running = self.kv_cache + max(self.logits + max(self.prefill, self.decode), self.compiling)
        return self.total_weights + max(running, self.loading)

    @property
    def rounded(self) -> tuple[int, int]:
        """Rows and tokens that cache and programs are made for: powers of two, so that there are few programs."""
        return bucket(self.batch), pages_for(self.context) * PAGE_SIZE

    @property
    def fits(self) -> bool:
        """Whether the device has room for it, and `generate` would not make smaller batches of it."""
        return fits_in(self.capacity, self.total_weights, self.kv_cache, self.peak)

    def items(self) -> list[tuple[str, int]]:
        """What the memory goes to at its fullest, loading aside: of temporaries that take turns, the largest."""
        rows = [(f"weights, {name}", size) for name, size in self.weights.items()]
        rows += [(f"draft, {name}", size) for name, size in self.draft_weights.items()]
        rows += [(f"KV cache, {self.kv_dtype}", self.kv_cache), ("logits of prompts", self.logits)]
        others = {"prefill activations": self.prefill, "decode temporaries": self.decode}
        others["compiler, trying kernels"] = self.compiling - self.logits
        most = max(others, key=lambda name: others[name])
        return [*rows, (most, others[most])]

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_png_(self) -> bytes | None:
        """The picture, for a notebook; None without matplotlib, and the notebook shows the text."""
        try:
            return getattr(self.plot(), "_repr_png_")()  # noqa: B009 (a Figure has none; the one for notebooks does)
        except ImportError:
            return None

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws the memory as one bar against the device's capacity; `path` also saves it, as PNG or by its ending.

        Needs matplotlib, which comes with `pip install jaxinfer[plot]`; raises ImportError without it.
        """
        return figure(self.items(), self.capacity, f"{self.model}: {self.batch} x {self.context:,} tokens", path)


def fits_in(capacity: int, weights: int, cache: int, peak: int) -> bool:
    """Whether a device of `capacity` bytes has room for the peak, and `generate` for the cache in one batch."""
    return peak <= capacity and cache <= CACHE_SHARE * (capacity - weights)


def _lines(plan: MemoryPlan) -> Iterable[str]:
    """The plan for people."""
    yield f"{plan.model}: {plan.batch} x {plan.context:,} tokens on {plan.device}"
    yield ""
    yield from text_bars(plan.items(), plan.capacity)
    yield ""
    verdict = "fits" if plan.fits else "does not fit"
    yield f"peak           {shown_binary(plan.peak)} of {shown_binary(plan.capacity)}: {verdict}"
    yield f"while loading  {shown_binary(plan.total_weights + plan.loading)}"
    if plan.compiling:
        size = shown_binary(plan.compiling)
        yield f"compiling      {size} to try kernels, once: not where the program is in the cache"
    yield f"prefill        {shown_binary(plan.prefill)} of activations, by the {plan.temporaries_from}"
    yield f"decode         {shown_binary(plan.decode)} of temporaries"
    yield f"KV per token   {plan.kv_bytes_per_token:,} bytes"
    if plan.rounded != (plan.batch, plan.context):
        rows, tokens = plan.rounded
        yield f"rounded up     {rows:,} x {tokens:,} tokens: cache and programs are made for powers of two"
    batch = "none" if plan.largest_batch is None else f"{plan.largest_batch:,}"
    yield f"largest batch  {batch} at {plan.context:,} tokens"
    context = "none" if plan.longest_context is None else f"{plan.longest_context:,} tokens"
    yield f"longest        {context} at batch {plan.batch}"

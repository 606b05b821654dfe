"""How a kernel takes its turn behind the one before it, while the next one is brought onto the card already."""

from jax.experimental.pallas import mosaic_gpu as plgpu


def take_turn() -> None:
    """Waits until the kernel before this one has ended, then lets the next one be launched; every kernel begins so.

    In this order: the next one comes onto the card when the kernel before this one has ended. The other way round, a
    kernel of few blocks would let it come while that one still runs; a chain with such a kernel gave other bits from
    run to run on an H200 (XLA had given the kernel's result the place of what the one before it read). A kernel takes
    longer than a launch, so nothing is lost.
    """
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()

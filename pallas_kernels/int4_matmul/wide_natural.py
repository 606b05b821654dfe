"""x as it is, for the INT4 kernel for many rows: those that multiply read words of codes in the order of its inputs.

Of every eight neighbouring inputs the tensor cores want two from each of four lanes, while packed words have all eight
in one lane: the words of four lanes are four by four pairs of inputs, to be transposed. So a lane reads words of all
four, and puts each of its own together from halves of two.
"""

from typing import Any

from pallas_kernels.int4_matmul.wide_plan import BOX, BOX_BYTES, Part, WidePlan
from pallas_kernels.token_order import STAGE


def fetch_tokens(
    w: Any, plan: WidePlan, x: Any, part: Part, rank: Any, step: Any, base: Any, full: Any, leader: Any
) -> None:
    """This block's share of a stage of x: both halves of the inputs, one, or half of the tokens of one."""
    readers = plan.readers
    for i in range(plan.boxes // readers):
        box = rank + i if readers > 1 else w.integer(i)
        half, first = box % 2, box // 2 * plan.box_tokens
        place = base + half * (plan.x_bytes // 2) + first * BOX_BYTES
        token = part.token_tile * plan.schedule.tokens + first
        w.copy_box(place, x, step * STAGE + half * BOX, token, full, readers, leader)


def words_in_order(w: Any, piece: Any, start: int) -> list[Any]:
    """A lane's four words of the 512 bytes at `piece + start`, each put together from halves of two.

    Of every eight inputs the lane's are 2 quad and 2 quad + 1: in the words of one of four lanes, in one or the other
    byte of two. Which of the four a lane reads first depends on its row, so that no two rows meet in a bank.
    """
    address = piece + w.lane // 4 * 64 + w.lane % 4 // 2 * 4
    swapped, exchanged = w.lane // 8 % 2, w.lane // 16
    addresses = [address + (swapped + i) % 2 * 16 + (exchanged + i // 2) % 2 * 32 for i in range(4)]
    selector = w.lane % 2 * 0x1111 + w.select(swapped < 1, w.integer(0x6240), w.integer(0x2604))
    words = []
    for place in (0, 8):
        read = [w.shared_word(address, start + place) for address in addresses]
        pairs = [w.pick_bytes(*read[i : i + 2], selector) for i in (0, 2)]
        words += [w.select(exchanged < 1, *pairs), w.select(exchanged < 1, *pairs[::-1])]
    return words

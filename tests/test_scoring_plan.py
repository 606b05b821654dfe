"""The plan of a scoring call, without a device: what is shared, nothing missed, every page with what its rows need."""

import families
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config import ModelConfig
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.scoring_plan import Run, TokenPair, build_forest, rows_for, schedule

PAGE = 4
LLAMA = from_hugging_face(families.BY_NAME["llama"].config, {}, num_tokens=None, extra_eos=())


def levels_of(
    pairs: list[TokenPair], num_pages: int, *, page_size: int = PAGE, longest_run: int = 8, config: ModelConfig = LLAMA
) -> list[list[Run]]:
    forest = build_forest(rows_for(pairs), config, page_size, longest_run)
    return [list(level) for level in schedule(forest, num_pages, page_size)]


def num_tokens(levels: list[list[Run]]) -> int:
    return sum(len(run.tokens) for level in levels for run in level)


@st.composite
def many_pairs(draw: st.DrawFn) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Contexts that grow from one another, of two token ids, so that prefixes, contexts and whole pairs repeat."""
    tokens = st.lists(st.integers(1, 2), max_size=20).map(tuple)
    contexts: list[tuple[int, ...]] = [()]
    pairs = []
    for _ in range(draw(st.integers(1, 12))):
        kept = draw(st.sampled_from(contexts))
        context = kept[: draw(st.integers(0, len(kept)))] + draw(tokens)
        contexts.append(context)
        pairs.append((context or (1,), draw(tokens.filter(bool))))
    return pairs


@given(many_pairs(), st.integers(0, 30))
def test_every_token_is_scored_once_after_the_right_tokens(
    drawn: list[tuple[tuple[int, ...], tuple[int, ...]]], spare_pages: int
) -> None:
    """The calls are carried out on pages that hold tokens instead of keys, few of them."""
    pairs = [TokenPair(*pair) for pair in drawn]
    num_pages = 1 + max(-(-pair.num_inputs // PAGE) for pair in pairs) + spare_pages
    expected = [
        ((*pair.context, *pair.continuation[:index]), token)
        for pair in pairs
        for index, token in enumerate(pair.continuation)
    ]
    scored: dict[int, tuple[tuple[int, ...], int]] = {}
    memory: dict[int, tuple[int, ...]] = {}
    for level in levels_of(pairs, num_pages):
        written: dict[int, tuple[int, ...]] = {}
        for run in level:
            read = [token for page in run.pages[: run.start // PAGE] for token in memory[page]]
            assert len(read) == run.start
            # Attention may read its own tokens from the pages too: none of them is on the scratch page.
            assert len(run.pages) == -(-run.end // PAGE)
            assert 0 < len(run.tokens) <= 8
            for place, token, slot in zip(run.targets.places, run.targets.tokens, run.targets.slots, strict=True):
                assert slot not in scored
                scored[slot] = ((*read, *run.tokens[: place + 1].tolist()), token)
            for index, page in enumerate(run.pages[run.start // PAGE :]):
                assert page not in written
                assert 1 <= page < num_pages
                written[page] = tuple(run.tokens[index * PAGE : (index + 1) * PAGE].tolist())
        assert not written.keys() & {page for run in level for page in run.pages[: run.start // PAGE]}
        memory |= written
    assert scored == dict(enumerate(expected))


def test_shared_prefixes_are_computed_once(rng: np.random.Generator) -> None:
    """The issue's shape, smaller: 32 pages of a prompt are computed once, and the first token of its answers scored."""
    prompts = rng.integers(0, 1000, (4, 512))
    pairs = [
        TokenPair(tuple(prompts[index % 4].tolist()), tuple(rng.integers(0, 1000, 32).tolist())) for index in range(40)
    ]
    levels = levels_of(pairs, 512, page_size=16, longest_run=2048)
    assert [len(level) for level in levels] == [4, 40]
    assert num_tokens(levels) == 4 * 512 + 40 * 31
    assert [len(run.targets.slots) for run in levels[0]] == [10] * 4


def test_sharing_has_levels() -> None:
    """Eight examples are common to all, a question to its answers."""
    header, questions = tuple(range(64)), [(100 + index,) * 16 for index in range(5)]
    pairs = [TokenPair((*header, *question), (answer,) * 3) for question in questions for answer in range(4)]
    levels = levels_of(pairs, 512, longest_run=64)
    assert [len(level) for level in levels] == [1, 5, 20]
    assert num_tokens(levels) == 64 + 5 * 16 + 20 * 2


def test_few_common_tokens_are_computed_again() -> None:
    """Rows that start from nothing have the faster attention: BOS and a system prompt do not make all others wait."""
    pairs = [TokenPair((*range(PAGE), *(100 + index,) * 60), (1,)) for index in range(5)]
    levels = levels_of(pairs, 512, longest_run=64)
    assert [len(level) for level in levels] == [5]
    assert num_tokens(levels) == 5 * 64
    assert all(len(run.pages) == 64 // PAGE for run in levels[0])


def test_answers_of_one_token_are_one_row() -> None:
    pairs = [TokenPair(tuple(range(8)), (answer,)) for answer in range(50)]
    assert [len(row.targets.slots) for row in rows_for(pairs)] == [50]
    first, second = levels_of([*pairs, TokenPair(tuple(range(9)), (1,))], 9)
    assert [len(run.targets.slots) for run in first] == [50]  # that row ends with the pages it shares
    assert [run.tokens.tolist() for run in second] == [[8]]
    same = [TokenPair((1, 2, 3), (4,)), TokenPair((1, 2), (3, 4)), TokenPair((1, 2, 3), (4,))]
    (row,) = rows_for(same)  # also where contexts end at different places
    assert row.num_context == 2
    assert row.targets.slots.tolist() == [0, 1, 2, 3]
    assert row.targets.places.tolist() == [2, 1, 2, 2]


@pytest.mark.parametrize(
    ("name", "original", "beyond", "sharing"),
    [
        ("llama", 32, (-1, 1), True),
        ("llama_rope_dynamic", 16, (-1, 0), True),
        ("llama_rope_dynamic", 16, (1, 2), False),
        ("phi3_longrope", 16, (1, 2), True),
        ("phi3_longrope", 16, (0, 1), False),
    ],
)
def test_keys_rotated_for_different_lengths_are_not_shared(
    name: str, original: int, beyond: tuple[int, int], sharing: bool
) -> None:
    """Beyond the original length, dynamic RoPE depends on what length a sequence reaches, longrope on that it does."""
    config = from_hugging_face(families.BY_NAME[name].config, {}, num_tokens=None, extra_eos=())
    rope = config.layers[0].rope
    assert rope is not None and rope.original_max_position_embeddings == (0 if name == "llama" else original)
    lengths = [original + more for more in beyond]
    pairs = [TokenPair((*range(original // 2), *(100 + n,) * (n - original // 2)), (1,)) for n in lengths]
    levels = levels_of(pairs, 512, longest_run=64, config=config)
    assert [len(level) for level in levels] == ([1, 2] if sharing else [2])
    assert sorted(run.context_length for run in levels[-1]) == lengths


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="2 pages of 4 tokens do not hold a sequence of 8 tokens"):
        levels_of([TokenPair(tuple(range(19)), (1,))], 2)

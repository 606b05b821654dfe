"""Drafts, policies and reports by themselves: lookups, 4-bit weights, a draft of a user's own, lengths, counts."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import markov
import numpy as np
import pytest
from families import BY_NAME
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.cli import main
from jaxinfer.config import ModelConfig
from jaxinfer.generation import generate
from jaxinfer.kv_cache import PagedKVCache
from jaxinfer.model import Model, load
from jaxinfer.packed_weights import device_layout
from jaxinfer.quantization.plan import Precision, uniform
from jaxinfer.quantization.report import QuantizationReport
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative import compatibility
from jaxinfer.speculative.acceptance import Proposal
from jaxinfer.speculative.comparison import (
    Choices,
    Comparison,
    Difference,
    Run,
    compare,
    first_differences,
    measure_plain,
    num_runs,
)
from jaxinfer.speculative.compatibility import expected_acceptance
from jaxinfer.speculative.lossy import LossyTopK
from jaxinfer.speculative.model_draft import ModelDraft
from jaxinfer.speculative.ngram import NgramDraft, lookup
from jaxinfer.speculative.null_draft import NullDraft
from jaxinfer.speculative.policy import (
    FIRST_RETRY,
    Adaptive,
    FixedLength,
    LengthByContext,
    expected_tokens,
    interpolated,
)
from jaxinfer.speculative.proposer import Draft, Rows, Wanted, fit_vocabulary
from jaxinfer.speculative.report import SpeculationReport
from jaxinfer.speculative.self_draft import SelfDraft, round_to_nearest
from jaxinfer.speculative.speculation import Speculation
from pallas_kernels.int4_matmul import dequantize

ROOM = 24


def looked_up(row: Sequence[int], min_n: int, max_n: int, k: int) -> list[int] | None:
    """What prompt lookup is: the longest suffix that occurred before, where it occurred last; then on and round."""
    last = len(row) - 1
    for n in range(max_n, min_n - 1, -1):
        for end in range(last - 1, n - 2, -1):
            if row[end - n + 1 : end + 1] == row[last - n + 1 :]:
                return [row[end + 1 + ahead % (last - end)] for ahead in range(k)]
    return None


find = jax.jit(lookup, static_argnums=(2, 3, 4))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=ROOM), min_size=4, max_size=4))
def test_lookup_finds_the_longest_and_latest_match(rows: list[list[int]]):
    history = np.full((4, ROOM), 1, np.int32)  # what lies behind a row's end could match, and must not
    for row, tokens in enumerate(rows):
        history[row, : len(tokens)] = tokens
    positions = np.array([len(tokens) - 1 for tokens in rows], np.int32)
    tokens, found = find(jnp.asarray(history), jnp.asarray(positions), 2, 3, 5)
    for row, own in enumerate(rows):
        expected = looked_up(own, 2, 3, 5)
        assert bool(found[row]) == (expected is not None)
        if expected is not None:
            assert tokens[row].tolist() == expected


def test_lookup_by_hand():
    """1 2 3 | 9 | 1 2: after 1 2 came 3 9 1 2, and then again; an idle row (-1) finds nothing."""
    history = jnp.array([[1, 2, 3, 9, 1, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]], jnp.int32)
    tokens, found = lookup(history, jnp.array([5, -1], jnp.int32), 1, 3, 6)
    assert tokens[0].tolist() == [3, 9, 1, 2, 3, 9]
    assert found.tolist() == [True, False]


def test_an_ngram_draft_follows_a_repetition():
    """Trap H7's prompt, one word 48 times: all drafts are accepted, and five tokens come a step."""
    model = markov.model({5: 5})
    speculation = Speculation(NgramDraft(k=4, min_n=2, max_n=5), policy=FixedLength())
    params = SamplingParams(max_tokens=16, temperature=0.0)
    [output] = generate(model, [[5] * 48], params, draft=speculation)
    assert output.token_ids == (5,) * 16
    assert speculation.report.acceptance_rate == 1.0
    assert speculation.report.tokens_per_step == 5.0
    assert speculation.report.histogram == [0, 0, 0, 0, 3]


def test_rounded_weights_are_within_half_a_step():
    """Groups of 64 inputs, the last one of 32; a group's step is its range, 0 included, over 15."""
    weight = np.random.default_rng(0).normal(0, 0.1, (8, 96)).astype(np.float32)
    rounded = np.asarray(dequantize(round_to_nearest(jnp.asarray(weight)), jnp.float32))
    for start in (0, 64):
        group = weight[:, start : start + 64]
        step = (np.maximum(group.max(1), 0) - np.minimum(group.min(1), 0)) / 15
        # Half a step for the code, half for the zero point; a bfloat16 scale is off by 2^-9, 15 steps by 15 times that.
        errors = np.abs(rounded[:, start : start + 64] - group).max(1)
        assert (errors <= step * (1.0 + 15 * 2**-9)).all()
    assert np.abs(rounded - weight).mean() < 0.01


def test_a_self_draft_that_is_no_cheaper_than_its_target_says_so(caplog: pytest.LogCaptureFixture):
    """Of a target whose layers are packed already; half of them, or one projection that is not, are cheaper."""
    config = dataclasses.replace(MODEL.config, layers=MODEL.config.layers * 2)
    params = dataclasses.replace(MODEL.params, layers=MODEL.params.layers * 2)
    model = dataclasses.replace(MODEL, config=config, params=params)
    packed = dataclasses.replace(model, params=SelfDraft(model).params)
    first = dataclasses.replace(packed.params.layers[0], down=model.params.layers[0].down)
    mixed = dataclasses.replace(
        packed, params=dataclasses.replace(packed.params, layers=[first, packed.params.layers[1]])
    )
    SelfDraft(packed, num_layers=1)
    SelfDraft(mixed)
    assert not caplog.messages
    SelfDraft(packed)
    assert len(caplog.messages) == 1 and "the layers of markov are packed already" in caplog.messages[0]


def test_logits_of_another_width_are_padded_or_cut():
    logits = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    assert fit_vocabulary(logits, 2).tolist() == [[0, 1], [3, 4]]
    assert fit_vocabulary(logits, 4).tolist() == [[0, 1, 2, -np.inf], [3, 4, 5, -np.inf]]


def test_expected_acceptance_is_the_overlap_along_a_text():
    """Successors of probability 0.979: models that agree overlap by 1, those that do not by 2 / 64 or so."""
    model = markov.model({1: 2, 2: 3}, scale=1.0)
    assert expected_acceptance(model, model, [1, 2, 3, 4]) == pytest.approx(1.0, abs=1e-5)
    other = markov.model({1: 9, 2: 8}, scale=1.0)
    chance = np.exp(8) / (np.exp(8) + 63)
    differs = 2 * (1 - chance) / 63 + 62 * (1 - chance) / 63
    assert expected_acceptance(model, other, [1, 2]) == pytest.approx((differs + differs) / 2, abs=1e-4)
    assert expected_acceptance(model, model, "A|BC") == pytest.approx(1.0, abs=1e-5)
    assert expected_acceptance(model, model, list(range(60)) * 2) == pytest.approx(1.0, abs=1e-5)  # the context is 64
    for text, message in (
        ([1], "a text of 1 tokens; expected at least 2"),
        ([1, 64], "prompt 0 holds token id 64; this model's ids are 0 to 63"),
        ([1, -1], "prompt 0 holds token id -1"),
        ([1, 2.5], "prompt 0 holds 2.5; a prompt is a string or a list of int token ids"),
        (None, "prompt 0 is None"),
    ):
        with pytest.raises(ValueError, match=message):
            expected_acceptance(model, model, text)
    with pytest.raises(ValueError, match="expected_acceptance's draft is the string 'small'; expected a model"):
        expected_acceptance(model, "small", [1, 2])


def test_a_draft_of_another_family_is_announced_with_its_expected_acceptance(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    model = markov.model({1: 2, 2: 3}, scale=1.0)
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, model_type="mistral"))
    ModelDraft(other).check(model, 8)
    assert "on a text of yours (prompt 0: the tokenizer cannot encode this text" in caplog.messages[0]
    monkeypatch.setattr(compatibility, "SAMPLE", "A|BC")
    draft = ModelDraft(other)
    draft.check(model, 8)
    draft.check(model, 8)  # said once
    assert "is a mistral and the target markov a llama: models of two families rarely agree" in caplog.messages[1]
    assert caplog.messages[1].endswith("about 100% of drafted tokens would be accepted")
    assert len(caplog.messages) == 2


def test_a_draft_of_another_shape_is_told_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "jaxinfer")
    model = markov.model({})
    config = dataclasses.replace(model.config, max_position_embeddings=32, layers=model.config.layers * 2)
    draft = ModelDraft(dataclasses.replace(model, config=config))
    draft.check(model, 8)
    draft.check(model, 8)
    ModelDraft(model).check(model, 8)
    assert caplog.messages == [
        "the draft markov has the tokens of markov; layers 2 (target 1), context 32 (target 64)",
        "the draft markov has the tokens of markov; same shape",
    ]


MODEL = markov.model({})
NO_NUMBER: Any = "4"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NgramDraft(k=NO_NUMBER), "NgramDraft: k='4'; expected 1 to 15 drafted tokens a step"),
        (lambda: NgramDraft(min_n=NO_NUMBER), "NgramDraft: min_n='4'; expected 1 to 16 tokens"),
        (lambda: NullDraft(k=NO_NUMBER), "NullDraft: k='4'; expected 1 to 15"),
        (lambda: ModelDraft(NO_NUMBER), "ModelDraft: the draft is the string '4'; expected a model from jaxinfer.load"),
        (lambda: ModelDraft(MODEL, k=NO_NUMBER), "ModelDraft: k='4'; expected 1 to 15"),
        (lambda: SelfDraft(MODEL.params), "SelfDraft: the target is Params; expected a model from jaxinfer.load"),
        (lambda: SelfDraft(MODEL, int4=NO_NUMBER), "SelfDraft: int4='4'; expected True"),
        (lambda: SelfDraft(MODEL, num_layers=NO_NUMBER), "SelfDraft: num_layers='4'; markov has 1 layers"),
        (lambda: FixedLength(NO_NUMBER), "FixedLength: length='4'; expected a number of tokens, or None"),
        (lambda: FixedLength(-1), "FixedLength: length=-1; expected a number of tokens"),
        (lambda: LengthByContext(NO_NUMBER), "LengthByContext: '4'; expected a tuple of pairs such as"),
        (lambda: LengthByContext(((0, NO_NUMBER),)), r"LengthByContext: \(\(0, '4'\),\); expected a tuple of pairs"),
        (lambda: Adaptive(NO_NUMBER), "Adaptive: lengths='4'; expected numbers of drafted tokens such as"),
        (lambda: Adaptive((2, NO_NUMBER)), r"Adaptive: lengths=\(2, '4'\); expected numbers"),
        (lambda: LossyTopK(start=NO_NUMBER), "LossyTopK: start='4'; expected at least 1"),
        (lambda: LossyTopK(end_tokens=-1), "LossyTopK: end_tokens=-1; expected a number of tokens, 0 or more"),
        (lambda: Speculation(NO_NUMBER), "draft is str; expected a draft such as jaxinfer.NgramDraft"),
        (lambda: Speculation(NgramDraft), "draft is the class NgramDraft; expected an object of it: a draft such as"),
        (lambda: Speculation(NgramDraft(), acceptance=NO_NUMBER), "acceptance is str; expected None for exact"),
        (
            lambda: Speculation(NgramDraft(), acceptance=LossyTopK),
            "acceptance is the class LossyTopK; expected",
        ),
        (lambda: Speculation(NgramDraft(), policy=NO_NUMBER), "policy is str; expected None, or a policy of"),
        (lambda: Speculation(NgramDraft(), policy=Adaptive), "policy is the class Adaptive; expected an object of it"),
    ],
)
def test_wrong_types_are_named_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# --- A draft of a user's own


@dataclasses.dataclass(frozen=True)
class HeadDraft:
    """What heads for several tokens would do: reads the target's last hidden state. `successors` are the head's."""

    k: int
    successors: tuple[int, ...]
    name = "head"
    draws = False
    has_own_cache = False
    bytes_per_token = 0

    @property
    def params(self) -> jax.Array:
        return jnp.array(self.successors, jnp.int32)

    def check(self, target: Model, longest: int) -> None: ...

    def proposer(self, target: Model) -> "HeadProposer":
        return HeadProposer(target.config)

    def create_state(self, target: Model, num_pages: int, page_size: int, batch: int) -> jax.Array:
        return jnp.zeros(batch, jnp.int32)


@dataclasses.dataclass(frozen=True)
class HeadProposer:
    config: ModelConfig

    def propose(
        self,
        params: jax.Array,
        state: jax.Array,
        cache: PagedKVCache,
        rows: Rows,
        wanted: Wanted,
    ) -> tuple[Proposal, jax.Array, PagedKVCache]:
        # In this test the hidden state is the embedding, times 8, of the token before the newest.
        token = params[jnp.argmax(rows.hidden, axis=1).astype(jnp.int32)]
        drafted = []
        for _ in range(wanted.num_drafted):
            token = params[token]
            drafted.append(token)
        proposal = Proposal(jnp.stack(drafted, axis=1), jnp.full_like(token, wanted.num_drafted))
        return proposal, state, cache

    def settle(self, state: jax.Array, positions: jax.Array) -> jax.Array:
        return positions

    def catch_up(
        self, params: Any, state: Any, rows: Rows, known: jax.Array, chunk: int, from_empty: bool
    ) -> jax.Array:
        return state


def test_a_further_draft_needs_the_protocol_alone():
    """Its first step has no hidden state yet and fails; all later ones are accepted whole."""
    successors = {token: token + 1 for token in range(61)}
    model = markov.model(successors)
    table = tuple(successors.get(token, markov.END) for token in range(markov.VOCAB))
    draft = HeadDraft(3, table)
    assert isinstance(draft, Draft)
    speculation = Speculation(draft, policy=FixedLength())
    [output] = generate(
        model, [[10]], SamplingParams(max_tokens=1 + 1 + 12, temperature=0.0, ignore_eos=True), draft=speculation
    )
    assert output.token_ids == tuple(range(11, 25))
    assert speculation.report.histogram == [1, 0, 0, 3]


def test_a_null_draft_is_plain_decoding():
    model = markov.model({token: token + 1 for token in range(61)})
    speculation = Speculation(NullDraft(k=3), policy=FixedLength())
    [output] = generate(model, [[10]], SamplingParams(max_tokens=9, temperature=0.0), draft=speculation)
    assert output.token_ids == tuple(range(11, 20))
    assert (speculation.report.tokens_per_step, speculation.report.judged) == (1.0, [0, 0, 0])


# --- Policies


def observe(controller: Any, k: int, accepted: int, seconds: float, chunks: int = 1) -> None:
    for _ in range(chunks):
        controller.observe(k, np.full((4, 1), k), np.full((4, 1), accepted), seconds)


def test_expected_tokens_are_sums_of_products():
    assert expected_tokens(np.array([10.0, 8.0]), np.array([8.0, 4.0])) == pytest.approx([1.0, 1.8, 2.2])
    # An unmeasured position counts as the one before it: 0.5 + 0.25.
    assert expected_tokens(np.array([10.0, 0.0]), np.array([5.0, 0.0])) == pytest.approx([1.0, 1.5, 1.75])
    assert interpolated({0: 1.0, 4: 2.0}, (0, 2, 4)) == {0: 1.0, 2: 1.5, 4: 2.0}
    assert interpolated({4: 2.0}, (0, 2, 4)) == {4: 2.0}


def test_adaptive_times_both_ways_switches_off_and_on_and_says_so(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="jaxinfer")
    controller = Adaptive((2, 4)).begin(4, 1, 1000)
    assert [controller.choose(10) for _ in range(3)] == [4, 4, 4]
    observe(controller, 4, 0, 1.2, 3)
    # Nothing was accepted: plain steps are timed next.
    assert controller.choose(10) == 0
    observe(controller, 0, 0, 1.0, 3)
    assert controller.choose(10) == 0
    assert "speculation off: drafting runs at 0.91 times plain decoding (0% of drafted tokens" in caplog.text
    # Off for a while, then tried again; a text that is easier now turns it on.
    for _ in range(FIRST_RETRY):
        observe(controller, 0, 0, 1.0)
    assert [controller.choose(10) for _ in range(4)] == [4, 4, 4, 0]
    observe(controller, 4, 4, 1.2, 3)
    assert controller.choose(10) == 4
    assert "speculation on again: k = 4" in caplog.text


def test_adaptive_tries_again_though_drafting_looks_a_little_faster():
    """Off; then plain steps become slower, and drafting would run at 1.02 times their speed: too little to switch."""
    controller = Adaptive((4,)).begin(4, 1, 1000)
    observe(controller, 4, 0, 1.2, 3)
    observe(controller, 0, 0, 1.0, 3)
    assert controller.current == 0
    observe(controller, 0, 0, 1.2 * 1.02, FIRST_RETRY + 2)
    assert controller.speeds()[4] == pytest.approx(1.02 * controller.speeds()[0])
    assert [controller.choose(10) for _ in range(4)] == [4, 4, 4, 0]


def test_adaptive_times_plain_steps_though_chosen_chunks_do_not_come():
    """An engine puts chunks off, and asks again when it has as many rows again."""
    controller = Adaptive((4,)).begin(4, 1, 1000)
    observe(controller, 4, 0, 1.2, 3)
    assert [controller.choose(10) for _ in range(6)] == [0] * 5 + [4]  # no more than these while none is read
    observe(controller, 4, 0, 1.2)
    assert controller.choose(10) == 0


def test_adaptive_takes_a_middle_length_where_the_tail_is_refused():
    """Two of four accepted: 3 tokens for an interpolated 1.5 against 3 for 2 and 1 for 1."""
    controller = Adaptive((2, 4)).begin(4, 1, 1000)
    observe(controller, 4, 2, 2.0, 3)
    observe(controller, 0, 0, 1.0, 3)
    assert controller.choose(10) == 2


def test_adaptive_does_not_time_plain_steps_for_short_outputs():
    controller = Adaptive().begin(4, 1, 32)
    observe(controller, 4, 0, 1.0, 5)
    assert controller.choose(10) == 4


def test_costs_are_remembered_by_batch_size():
    policy = Adaptive((4,))
    observe(policy.begin(4, 8, 1000), 0, 0, 1.0, 3)
    assert policy.begin(4, 8, 1000).costs.known() == {0: 1.0}
    assert policy.begin(4, 4, 1000).costs.known() == {}


def test_length_by_context():
    policy = LengthByContext(((0, 4), (100, 2), (1000, 0))).begin(4, 1, 10)
    assert [policy.choose(context) for context in (0, 99, 100, 999, 1000, 5000)] == [4, 4, 2, 2, 0, 0]
    with pytest.raises(ValueError, match="pairs from context 0 upwards"):
        LengthByContext(((10, 4),))
    with pytest.raises(ValueError, match="length 4; expected 0 to the draft's k=2"):
        policy.begin(2, 1, 10)
    with pytest.raises(ValueError, match="expected some from 1 to the draft's k=2"):
        Speculation(NgramDraft(k=2), policy=Adaptive((3,)))


# --- Report


def test_report_by_hand():
    """Two steps of three rows, k = 2: accepted 2, 0 and idle; then 1, nothing proposed, idle."""
    report = SpeculationReport()
    report.add(2, np.array([[2, 2, -1], [2, 0, -1]]), np.array([[2, 0, -1], [1, 0, -1]]), 7, 0.5)
    assert report.judged == [3, 2]
    assert report.accepted == [2, 1]
    assert report.acceptance_by_position == pytest.approx((2 / 3, 1 / 2))
    assert report.acceptance_rate == pytest.approx(3 / 5)
    assert report.histogram == [1, 1, 1]
    assert report.mean_accepted_length == 1.0
    assert report.tokens_per_step == pytest.approx(7 / 4)
    report.add(0, np.array([[0, 0, -1]]), np.array([[0, 0, -1]]), 2, 0.1)
    assert report.tokens_per_step == pytest.approx(7 / 4)  # plain steps between do not change what drafting gains
    assert report.steps == {2: 2, 0: 1}
    assert report.tokens == {2: 7, 0: 2}
    assert report.estimated_speedup == pytest.approx(7 / 4 * 0.1 / 0.25)
    assert "acceptance by position: 67%  50%" in str(report)
    assert "k = 2: 2 steps of 250.00 ms" in str(report)
    assert "plain: 1 steps of 100.00 ms" in str(report)
    report.add(
        0, np.array([[0, 0, -1]]), np.array([[0, 0, -1]]), 2, None
    )  # compiled meanwhile: counts, but not its time
    report.add(1, np.array([[1, 0, -1]]), np.array([[0, 0, -1]]), 2, None)
    assert (report.steps, report.timed_steps, report.seconds) == ({2: 2, 0: 2, 1: 1}, {2: 2, 0: 1}, {2: 0.5, 0: 0.1})
    assert report.estimated_speedup == pytest.approx(9 / 6 * 0.1 / 0.25)
    assert "plain: 2 steps of 100.00 ms" in str(report) and "k = 1: 1 steps\n" in str(report)


def test_spec_bench_prints_the_comparison(tmp_path, capsys: pytest.CaptureFixture[str]):
    folder = markov.save(tmp_path / "model", {token: token + 1 for token in range(60)})
    common = ["spec-bench", str(folder), "--prompt", "A", "--max-tokens", "12", "--repeats", "1"]
    assert main([*common, "--draft", "self", "--k", "2", "--lossy", "top-k"]) == 0
    shown = capsys.readouterr().out
    assert "acceptance 100%, by position 100%  100%" in shown
    assert "1 of 1 completions are those of plain decoding" in shown
    assert "0 accepted   0%" in shown and f"2 accepted 100% {'#' * 40}\n" in shown
    assert "is lossy: 100.0% of tokens are the target's first choice, 0.000 nats from it" in shown
    assert main([*common, "--draft", "self:none"]) == 2
    assert "expected self:N with a number of layers" in capsys.readouterr().err


def test_spec_bench_looks_at_a_draft_before_it_measures(
    tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """What differs in shape is printed; other tokens are an error."""

    def measured(*_: object, **__: object) -> None:
        raise ValueError("measured")

    monkeypatch.setattr("jaxinfer.cli.spec_bench.measure_plain", measured)
    folder, other = (str(markov.save(tmp_path / name, {1: 2})) for name in ("model", "other"))
    common = ["spec-bench", folder, "--prompt", "A", "--quiet"]
    assert main([*common, "--draft", other]) == 2
    shown = capsys.readouterr()
    assert shown.out == f"the draft {other} has the tokens of {folder}; same shape\n"
    assert shown.err == "error: measured\n"
    assert main([*common, "--draft", str(BY_NAME["llama"].folder)]) == 2
    assert "llama has no tokenizer to compare" in capsys.readouterr().err


def test_runs_of_a_comparison_are_counted_as_they_end():
    """What spec-bench shows of many repeats: one to compile and the repeats, plain, verifying, and with the draft."""
    model, ended = markov.model({1: 2, 2: 3, 3: 1}), []
    params = SamplingParams(max_tokens=4, temperature=0.0)
    plain = measure_plain(model, [[1]], params, repeats=2, after_run=lambda: ended.append("plain"))
    speculation = Speculation(NgramDraft(k=2), policy=FixedLength())
    found = compare(model, [[1]], params, speculation, plain=plain, repeats=2, after_run=lambda: ended.append("draft"))
    assert (ended.count("plain"), ended.count("draft")) == (3, 6)
    assert len(ended) == num_runs(1, repeats=2)
    assert found.same_tokens == 1


def test_completions_of_one_token_have_no_step_to_compare():
    model = markov.model({1: 2, 2: 3, 3: 1})
    with pytest.raises(ValueError, match=r"ended with its first token.*set max_tokens to 2 or more"):
        measure_plain(model, [[1], [2]], SamplingParams(max_tokens=1, temperature=0.0), repeats=1)


def test_a_comparison_needs_a_step_during_which_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch):
    added = SpeculationReport.add
    monkeypatch.setattr(SpeculationReport, "add", lambda report, *counts: added(report, *counts[:-1], None))
    model, params = markov.model({1: 2, 2: 3, 3: 1}), SamplingParams(max_tokens=4, temperature=0.0)
    with pytest.raises(ValueError, match="compiled during every step, so none was timed; raise repeats or max_tokens"):
        compare(model, [[1]], params, Speculation(NgramDraft(k=2), policy=FixedLength()), repeats=1)


def test_a_comparison_by_hand():
    """Steps of 15 ms give 2 tokens, plain ones of 10 ms one; verification alone takes 12 ms."""
    report = SpeculationReport()
    report.add(2, np.array([[2], [2]]), np.array([[2], [0]]), 4, 0.03)
    plain, drafted = (Run(seconds, 20, {(0, 0): (1, 2)}) for seconds in (2.0, 1.25))
    found = Comparison("n-gram(2..4)", 2, plain, drafted, report, plain_step=0.010, verify_step=0.012, step=0.015)
    assert (found.speedup, found.running_speedup) == pytest.approx((1.6, 2 * 10 / 15))
    assert found.draft_seconds == pytest.approx(0.003)
    shown = str(found)
    assert "16.0 tokens/s, plain 10.0 tokens/s: speed-up 1.60" in shown
    assert "step 15.00 ms = draft 3.00 + verify 12.00; plain step 10.00 ms" in shown
    assert "mean accepted length 1.00, 2.00 tokens a step" in shown
    noisy = dataclasses.replace(found, verify_step=0.02)
    assert noisy.draft_seconds == 0.0 and "so these times are noise" in str(noisy)


def test_differences_by_hand():
    """The second token is another, which the target finds e^32 times less probable."""
    model = markov.model({1: 2, 2: 3, 3: 1})
    plain, same, other = (Run(1.0, 3, {(0, 0): tokens}) for tokens in ((2, 3, 1), (2, 3, 1), (2, 9, 9)))
    assert first_differences(model, [[1]], plain, same) == []
    [found] = first_differences(model, [[1]], plain, other)
    assert found == Difference(0, 1, found.gap) and found.gap == pytest.approx(32, rel=1e-3)


def test_choices_by_hand():
    """Four tokens that the target would say itself, and two that it finds e^32 times less probable."""
    model = markov.model({1: 2, 2: 3, 3: 1})
    choices = Choices.of(model, [[1], [2]], Run(1.0, 6, {(0, 0): (2, 3, 1), (1, 0): (3, 9, 9)}))
    assert choices.first == pytest.approx(4 / 6)
    assert choices.gap == pytest.approx(2 * 32 / 6, rel=1e-3)


def test_plans_that_differ_are_warned_of_once_something_was_judged(caplog: pytest.LogCaptureFixture):
    """Two plans with codes of one form; and weights that differ from the target's in another projection than `down`."""
    target = markov.model({})
    plans = [uniform("small", Precision(4)), uniform("clipped", Precision(4, method="hqq"))]
    first, second = (
        dataclasses.replace(target, quantization=QuantizationReport(plan, "text", 0, (), None)) for plan in plans
    )
    layer = target.params.layers[0]
    other = dataclasses.replace(layer, o=device_layout(round_to_nearest(jnp.asarray(layer.o))))
    mixed = dataclasses.replace(target, params=dataclasses.replace(target.params, layers=[other]))
    for own, draft, message in (
        (first, first, None),
        (target, target, None),
        (first, second, "differently (float32 by small and float32 by clipped); 75 % of drafted tokens"),
        (target, mixed, "differently (float32 and 4 bits, zero_point, groups of 16 beside float32); 75 % of"),
    ):
        speculation = Speculation(ModelDraft(draft))
        caplog.clear()
        speculation.warn_of_plans(own)
        assert not caplog.text
        speculation.report.add(4, np.array([[4]]), np.array([[3]]), 4, None)
        speculation.warn_of_plans(own)
        speculation.warn_of_plans(own)  # said once
        assert len(caplog.messages) == (message is not None)
        assert message is None or message in caplog.messages[0]


def test_lossy_acceptance_is_announced(caplog: pytest.LogCaptureFixture):
    Speculation(NgramDraft(), acceptance=LossyTopK())
    assert "is not exact: outputs are not those of the target alone" in caplog.text


@pytest.mark.parametrize("plan", ["int8", "seed-mixed"])
def test_weights_of_8_bits_draft_and_are_drafted_for(plan: str) -> None:
    """They are no arrays: neither packing again nor saying how they are stored may ask them for a dtype."""
    model = load(BY_NAME["llama"].folder, dtype="float32", quantize=plan)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    plain = generate(model, [[1, 2, 3]], greedy)[0].token_ids
    for draft in (NgramDraft(k=2), SelfDraft(model, k=2), ModelDraft(model, k=2)):
        assert generate(model, [[1, 2, 3]], greedy, draft=draft)[0].token_ids == plain

"""The page table of a sequence that decodes alone: narrow while it is short, where that gives it a faster kernel."""

import dataclasses
from typing import Any

import engine_cases as cases
import jax
import jax.numpy as jnp
import pytest

from jaxinfer.config import LayerConfig, ModelConfig, RopeConfig
from jaxinfer.engine import settings as engine_settings
from jaxinfer.engine.row_width import attention_block_width
from jaxinfer.engine.settings import settle
from jaxinfer.generation import generate
from jaxinfer.params import random_params
from jaxinfer.quantization.plan import resolve
from jaxinfer.speculative.drafts import ModelDraft, NgramDraft, SelfDraft
from jaxinfer.speculative.policy import FixedLength
from jaxinfer.speculative.speculation import Speculation
from pallas_kernels.int4_matmul import Packed
from pallas_kernels.int4_matmul import api as int4_api

# Of sizes that no other test packs: how codes are laid out, with a GPU or without, is traced once a process.
ROPE = RopeConfig("default", 1e6, 128)
SMALL = ModelConfig("qwen3", 4096, 256, 1024, 3072, 8, 4, 128, (LayerConfig(ROPE),), 40960, 1e-6, qk_norm="head")


def width(config: ModelConfig, widest: int, plan: str | None = "int4", page_size: int = 16) -> int:
    params: Any = jax.eval_shape(
        lambda: random_params(config, jnp.bfloat16, 0, plan=None if plan is None else resolve(plan))
    )
    return attention_block_width(params, config, jnp.dtype(jnp.bfloat16), page_size, widest)


def test_as_wide_as_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_api.dispatch, "hopper_refusal", lambda: None)
    assert [width(SMALL, widest) for widest in (2560, 130, 129, 128, 100, 1)] == [128, 128, 129, 128, 100, 1]
    assert width(SMALL, 2560, page_size=32) == 64
    assert width(SMALL, 2560, plan=None) == width(dataclasses.replace(SMALL, hidden_size=2048), 2560) == 0


def test_what_drafts_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-draft is packed though its target is not; pages of codes have no such kernel."""
    monkeypatch.setattr(engine_settings, "reads_lengths", lambda *_: True)
    monkeypatch.setattr(
        engine_settings,
        "attention_block_width",
        lambda params, *_: 3 if isinstance(params.layers[0].qkv, Packed) else 0,
    )
    model = cases.model()
    coded = dataclasses.replace(model, kv_dtype=jnp.dtype("int8"))
    packed = dataclasses.replace(model, params=SelfDraft(model).params)
    for target, draft, expected in (
        (model, SelfDraft(model, k=2), (3, 17)),
        (coded, SelfDraft(coded, k=2), (17,)),
        (model, SelfDraft(model, k=2, int4=False, num_layers=1), (17,)),
        (model, ModelDraft(packed, k=2), (3, 17)),
        (packed, NgramDraft(k=2), (3, 17)),
    ):
        speculation = Speculation(draft, policy=FixedLength())
        assert settle(cases.CONFIG, target, speculation).row_widths == expected


def test_a_row_alone_begins_with_narrow_tables_and_goes_on_with_wide_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_settings, "reads_lengths", lambda *_: True)
    monkeypatch.setattr(engine_settings, "attention_block_width", lambda *_: 3)
    row = cases.params(max_tokens=14)
    (expected,) = generate(cases.model(), cases.prompt(5), row)
    with cases.engine(decode_rows=(1, 4), prefill_rows=(1,), sampling=(row,)) as engine:
        assert (engine.settings.page_widths, engine.settings.row_widths) == ((16,), (3, 16))
        assert engine.generate(cases.prompt(5), row)[0].token_ids == expected.token_ids
        assert engine._runner is not None
        programs = engine._runner.programs
        alone = {(1, 3), (1, 16)}
        for sizes, found in ((programs._compiled, alone), (programs.expected(), alone | {(4, 16)})):
            assert {(size.rows, size.width) for size in sizes if size.kind == "decode"} == found

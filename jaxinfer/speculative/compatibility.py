"""Whether one model can draft for another: the same ids must be the same tokens."""

import logging
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import steps
from jaxinfer.config import ModelConfig
from jaxinfer.model import Model
from jaxinfer.request import Prompt, encode_prompt
from jaxinfer.tokenization import Tokenizer

log = logging.getLogger("jaxinfer")

SHOWN = 3
"""Differences that an error names."""
SAMPLE = (
    "The library opens at nine, and most of its readers come in the morning. Those who want a book from the cellar "
    "fill in a card at the desk; it is brought up within the hour, unless somebody else has it."
)
"""A text that two models of different families are compared on."""


def check_model(model: object, what: str) -> None:
    """Raises ValueError for what is no model."""
    if not isinstance(model, Model):
        given = f"the string {model!r}" if isinstance(model, str) else type(model).__name__
        raise ValueError(f"{what} is {given}; expected a model from jaxinfer.load")


@typing.runtime_checkable
class WithTokens(typing.Protocol):
    """A model, or what is known of one before its weights are read."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


def check_tokens(target: WithTokens, draft: WithTokens) -> None:
    """Raises ValueError, naming what differs, unless both models' ids stand for the same tokens.

    Rows of the embedding beyond the tokenizer's ids are padding and may differ in number. Without tokenizers only the
    sizes of the vocabularies can be compared.
    """
    pair = f"the draft {draft.name} does not fit the target {target.name}"
    if (target.tokenizer is None) != (draft.tokenizer is None):
        bare = target if target.tokenizer is None else draft
        raise ValueError(f"{pair}: {bare.name} has no tokenizer to compare; load both with one, or neither")
    differences = []
    if target.config.num_tokens != draft.config.num_tokens:
        differences.append(f"it has {draft.config.num_tokens} tokens, the target {target.config.num_tokens}")
    if target.tokenizer is not None and draft.tokenizer is not None:
        differences += token_differences(target.tokenizer, draft.tokenizer)
    if differences:
        shown = "; ".join(differences[:SHOWN])
        more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise ValueError(f"{pair}: {shown}{more}; take a draft that was trained with the target's tokenizer")


def token_differences(target: Tokenizer, draft: Tokenizer) -> list[str]:
    """What differs between two vocabularies, special tokens first, a phrase each."""
    differences = []
    if target.bos_token_id != draft.bos_token_id:
        differences.append(f"its beginning-of-text id is {draft.bos_token_id}, the target's {target.bos_token_id}")
    if set(target.special_ids) - set(target.eos_token_ids) != set(draft.special_ids) - set(draft.eos_token_ids):
        odd = sorted(map(int, target.special_ids ^ draft.special_ids))
        differences.append(f"ids {odd[:SHOWN]} are special in one of them only")
    if set(target.eos_token_ids) != set(draft.eos_token_ids):
        differences.append(
            f"its end-of-text ids are {sorted(map(int, draft.eos_token_ids))}, "
            f"the target's {sorted(map(int, target.eos_token_ids))}"
        )
    for token in range(min(target.num_tokens, draft.num_tokens)):
        own, other = target.token_bytes(token), draft.token_bytes(token)
        if own != other:
            differences.append(f"token {token} is {other!r}, the target's {own!r}")
    return differences


def shape_differences(target: Model, draft: Model) -> str:
    """In what the shapes of two models differ, which they may."""
    both = [
        {
            "layers": model.config.num_layers,
            "hidden size": model.config.hidden_size,
            "heads": model.config.num_heads,
            "KV heads": model.config.num_kv_heads,
            "context": model.config.max_position_embeddings,
            "rows of the embedding": model.config.vocab_size,
            "dtype": str(model.dtype),
        }
        for model in (draft, target)
    ]
    differences = [f"{name} {own} (target {both[1][name]})" for name, own in both[0].items() if own != both[1][name]]
    return f"the draft {draft.name} has the tokens of {target.name}; {', '.join(differences) or 'same shape'}"


def tell_of_shapes(target: Model, draft: Model) -> None:
    """Logs what `shape_differences` says."""
    log.info("%s", shape_differences(target, draft))


def warn_of_families(target: Model, draft: Model) -> None:
    """Says that two models rarely agree, and how far they do on a few lines of English."""
    try:
        share = expected_acceptance(target, draft, SAMPLE)
        estimate = f"on a few lines of English about {share:.0%} of drafted tokens would be accepted"
    except ValueError as error:  # tokens that are not for English, or no tokenizer
        estimate = f"jaxinfer.expected_acceptance says how far on a text of yours ({error})"
    log.warning(
        "the draft %s is a %s and the target %s a %s: models of two families rarely agree; %s",
        draft.name,
        draft.config.model_type,
        target.name,
        target.config.model_type,
        estimate,
    )


@typing.no_type_check  # it checks more, and its errors are the ones users must see
def expected_acceptance(target: Model, draft: Model, text: Prompt) -> float:
    """The mean of sum(min(p, q)) over the places of a text: the share of drafted tokens that sampling at temperature 1
    would accept there.

    `text` is a string or token ids; what does not fit in both contexts is left out. Raises ValueError for what is no
    model, if the models' tokens differ, for ids that the models do not have, and for fewer than 2 tokens.
    """
    check_model(target, "expected_acceptance's target")
    check_model(draft, "expected_acceptance's draft")
    check_tokens(target, draft)
    context = min(target.config.max_position_embeddings, draft.config.max_position_embeddings)
    if not isinstance(text, str) and hasattr(text, "__len__"):
        text = text[:context]
    token_ids = encode_prompt(target, text, 0)[:context]
    longest = len(token_ids)
    if longest < 2:
        raise ValueError(f"expected_acceptance: a text of {longest} tokens; expected at least 2")
    padded = np.zeros((1, -(-longest // 64) * 64), np.int32)
    padded[0, :longest] = token_ids
    lengths = jnp.array([longest], jnp.int32)
    both = []
    for model in (target, draft):
        logits = steps.full_logits(model.params, jnp.asarray(padded), lengths, config=model.config)
        both.append(jax.nn.softmax(logits[0, :longest, : target.config.num_tokens], axis=-1))
    return float(jnp.minimum(*both).sum(axis=-1).mean())

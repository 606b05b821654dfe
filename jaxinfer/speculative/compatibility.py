"""Whether one model can draft for another: the same ids must be the same tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import steps
from jaxinfer.model import Model
from jaxinfer.tokenization import Tokenizer

SHOWN = 3
"""Differences that an error names."""


def check_tokens(target: Model, draft: Model) -> None:
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


def expected_acceptance(target: Model, draft: Model, token_ids: list[int]) -> float:
    """The mean of sum(min(p, q)) over the places of a text: the share of drafted tokens that sampling at temperature 1
    would accept there. Raises ValueError if the models' tokens differ or the text is shorter than 2 tokens."""
    check_tokens(target, draft)
    longest = min(len(token_ids), target.config.max_position_embeddings, draft.config.max_position_embeddings)
    if longest < 2:
        raise ValueError(f"expected_acceptance: a text of {longest} tokens; expected at least 2")
    padded = np.zeros((1, -(-longest // 64) * 64), np.int32)
    padded[0, :longest] = token_ids[:longest]
    lengths = jnp.array([longest], jnp.int32)
    both = []
    for model in (target, draft):
        logits = steps.full_logits(model.params, jnp.asarray(padded), lengths, config=model.config)
        both.append(jax.nn.softmax(logits[0, :longest, : target.config.num_tokens], axis=-1))
    return float(jnp.minimum(*both).sum(axis=-1).mean())

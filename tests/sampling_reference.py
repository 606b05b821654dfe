"""The sampler's definitions in float64 NumPy, by sorting: slow, short, and written apart from the device code."""

import numpy as np


def kept_tokens(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[int]:
    """Ids that may be drawn, most probable first, equal ones by id: min-p, then top-k, then top-p."""
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, kind="stable")
    weights = _weights(logits, temperature)
    order = order[weights[order] >= min_p]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        mass = np.cumsum(weights[order])
        order = order[: 1 + int(np.argmax(mass >= top_p * mass[-1]))]
    return [int(token) for token in order if np.isfinite(logits[token])]


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The distribution that a row is drawn from."""
    kept = kept_tokens(logits, temperature, top_k, top_p, min_p)
    result = np.zeros(len(logits))
    result[kept] = _weights(np.asarray(logits, np.float64), temperature)[kept]
    return result / result.sum()


def penalised(logits, prompt, output, repetition=1.0, frequency=0.0, presence=0.0) -> np.ndarray:
    """Logits after the penalties, token by token."""
    result = np.array(logits, np.float64)
    for token in {*prompt, *output}:
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in set(output):
        result[token] -= frequency * list(output).count(token) + presence
    return result


def log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _weights(logits, temperature) -> np.ndarray:
    return np.exp((logits - logits.max()) / temperature)

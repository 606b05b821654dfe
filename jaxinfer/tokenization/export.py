"""A tokenizer as the files of a Hugging Face folder."""

import json
from typing import Any

from jaxinfer.tokenization.tokenizer import Tokenizer


def hugging_face_files(tokenizer: Tokenizer, *, max_length: int) -> dict[str, bytes]:
    """tokenizer.json, and tokenizer_config.json with named special tokens and chat templates.

    `tokenizer_from_folder` makes the same tokenizer of them, and so does transformers, which is told to take
    tokenizer.json as it stands. `max_length` is the model's longest context in tokens. Raises ValueError for a
    tokenizer that has to change a text in a way that tokenizer.json has no form for.
    """
    if tokenizer.prepare_text is not None:
        raise ValueError("the tokenizer normalises text as SentencePiece does and tokenizer.json cannot")
    description: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    model = description["model"]
    # What only pads the embedding is no token.
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < tokenizer.num_tokens}
    templates = tokenizer.chat_templates
    named = [{"name": name, "template": template} for name, template in templates.items()]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
        **({"chat_template": templates["default"] if templates.keys() == {"default"} else named} if templates else {}),
    }
    return {
        "tokenizer.json": json.dumps(description, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
    }

"""Writes `tests/fixtures/lm_eval`: a tiny model with two tokenizers, and what lm-evaluation-harness' `hf` model says.

Needs lm-eval 0.4.13 with torch, transformers 5.17, accelerate and peft; the tests need lm-eval alone:

    python tests/oracle/make_lm_eval.py

`model` has config.json and model.safetensors, `plain` and `bos` the tokenizers' files: one that adds no BOS, one that
does. `expected.json` has, for each of the settings below, every request's token ids and answer, and for each tokenizer
the results of `lm_eval_tasks.tasks()`, with and without chat template. Seeded; a second run writes the same bytes.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import lm_eval
import lm_eval_tasks
import tokenizers
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

FOLDER = pathlib.Path(__file__).parents[1] / "fixtures" / "lm_eval"
CONTEXT = 96
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "bos": ("bos", {}),
    "plain with BOS": ("plain", {"add_bos_token": True}),
    "bos without": ("bos", {"add_bos_token": False}),
    "short": ("plain", {"max_length": 40, "prefix_token_id": 5}),
}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE, trained on the tasks' own words so that tokens are words and parts of words."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    words = [f" {word}" for row in lm_eval_tasks.ANIMALS for word in row] * 4
    tokenizer.train_from_iterator([*lm_eval_tasks.STORIES, *words, "The horse has this many legs:"], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write_checkpoint() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    tokenizer = build_tokenizer()
    for name in ("plain", "bos"):
        if name == "bos":
            tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
        )
        fast.chat_template = TEMPLATE
        fast.save_pretrained(FOLDER / name)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        spread = 1.0 + 0.2 * torch.randn(parameter.shape, generator=generator)
        wide = torch.randn(parameter.shape, generator=generator) * (1.0 if "embed" in name else 0.35)
        parameter.data = (spread if "norm" in name else wide).to(torch.bfloat16)
    model.save_pretrained(FOLDER / "model")
    (FOLDER / "model" / "generation_config.json").unlink()


def assemble(tokenizer: str, folder: pathlib.Path) -> str:
    for source in (FOLDER / "model", FOLDER / tokenizer):
        shutil.copytree(source, folder / tokenizer, dirs_exist_ok=True)
    return str(folder / tokenizer)


class Recording(HFLM):
    """`hf` that remembers the token ids it works on."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(device="cpu", dtype="float32", batch_size=1, logits_cache=False, **settings)
        self.pairs: list[list[list[int]]] = []
        self.prompts: list[list[int]] = []

    def _loglikelihood_tokens(self, requests: Any, **options: Any) -> Any:
        self.pairs += [[list(context), list(continuation)] for _, context, continuation in requests]
        return super()._loglikelihood_tokens(requests, **options)

    def _model_generate(self, context: torch.Tensor, **options: Any) -> torch.Tensor:
        self.prompts += context.tolist()
        return super()._model_generate(context, **options)


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, one, index, metadata=("requests", index, 1)) for index, one in enumerate(arguments)]


def record_requests(model: Recording, settings: dict[str, Any]) -> dict[str, Any]:
    """Every kind of request by itself, with the ids that the model was given."""
    pairs = lm_eval_tasks.loglikelihood_requests()
    if settings.get("add_bos_token") is not False and model.tok_encode("")[:1] == [0]:
        pairs = [pair for pair in pairs if pair[0] != "<s>"]  # a context of BOS alone
    limit = model.max_length
    pairs = [pair for pair in pairs if len(model.tok_encode(pair[1])) < limit]
    answers = model.loglikelihood(instances("loglikelihood", pairs))
    found: dict[str, Any] = {
        "loglikelihood": [
            {"arguments": pair, "ids": ids, "answer": answer}
            for pair, ids, answer in zip(pairs, model.pairs, answers, strict=True)
        ]
    }
    texts = [(text,) for text in lm_eval_tasks.rolling_requests()]
    rolling = []
    for text in texts:
        model.pairs.clear()
        (answer,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", [text]))
        rolling.append({"arguments": text, "ids": list(model.pairs), "answer": answer})
    found["loglikelihood_rolling"] = rolling
    found["generate_until"] = record_generations(model)
    found["tokens"] = record_tokens(model)
    return found


def record_tokens(model: Recording) -> list[dict[str, Any]]:
    """Continuations given as ids: what the model would say itself, to its end and with one token changed."""
    found = []
    for context in ([302, 286, 299], [384, 389, 390]):
        said = model.model.generate(torch.tensor([context]), max_new_tokens=6, do_sample=False)[0, 3:].tolist()
        for continuation in (said, said[:1], [*said[:5], said[5] - 1], [said[0] - 1, *said[1:]]):
            (answer,) = model._loglikelihood_tokens([(("", ""), context, continuation)])
            found.append({"ids": [context, continuation], "answer": answer})
    return found


def record_generations(model: Recording) -> list[dict[str, Any]]:
    """Whatever the model says first shows which texts can end it: inside, at the end, and over several tokens."""
    found = []

    def ask(context: str, **options: Any) -> str:
        model.prompts.clear()
        (text,) = model.generate_until(instances("generate_until", [(context, options)]))
        found.append({"arguments": (context, options), "ids": model.prompts[0], "answer": text})
        return text

    for context in ("The horse has", "Nobody knew <|im_start|>", lm_eval_tasks.STORIES[0], "<s>A sparrow"):
        said = ask(context, until=[], max_gen_toks=16)
        for until in ([said[4:5]], [said[3:9], "never"], [said[-2:]], said[2:4]):
            ask(context, until=until, max_gen_toks=16, do_sample=False)
        ask(context, until=["<|im_end|>", "</s>"], max_gen_toks=20, temperature=0.0)
    return found


def record_tasks(model: Recording, chat: bool) -> dict[str, Any]:
    results = lm_eval.simple_evaluate(
        model, tasks=lm_eval_tasks.tasks(), apply_chat_template=chat, bootstrap_iters=0, fewshot_as_multiturn=chat
    )
    return {
        name: {
            "metrics": {
                key: value for key, value in metrics.items() if isinstance(value, float) and "stderr" not in key
            },
            "samples": [
                {"arguments": sample["arguments"], "responses": sample["filtered_resps"]}
                for sample in results["samples"][name]
            ],
        }
        for name, metrics in results["results"].items()
    }


def main() -> None:
    write_checkpoint()
    expected: dict[str, Any] = {"requests": {}, "tasks": {}, "chat": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, (tokenizer, settings) in SETTINGS.items():
            path = assemble(tokenizer, pathlib.Path(folder))
            model = Recording(pretrained=path, **settings)
            expected["requests"][name] = {"tokenizer": tokenizer, "settings": settings}
            expected["requests"][name] |= record_requests(model, settings)
            if not settings:
                for chat in (False, True):
                    expected["tasks"][f"{name} chat" if chat else name] = record_tasks(model, chat)
        conversation = lm_eval_tasks.chat()
        expected["chat"] = {
            "asked": model.apply_chat_template(conversation[:2]),
            "continued": model.apply_chat_template(conversation, add_generation_prompt=False),
        }
    text = json.dumps(expected, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    (FOLDER / "expected.json").write_text(text + "\n")
    print(f"wrote {FOLDER / 'expected.json'}, {len(text):,} characters")


if __name__ == "__main__":
    main()

"""Small tasks for lm-evaluation-harness, one of each kind, with their documents: no network, no files.

Shared by the tests and by `tests/oracle/make_lm_eval.py`, so it imports nothing of jaxinfer.
"""

from typing import Any

ANIMALS = [
    ("horse", "four", "grass"),
    ("sparrow", "two", "seeds"),
    ("spider", "eight", "flies"),
    ("cow", "four", "hay"),
    ("ant", "six", "leaves"),
    ("hen", "two", "corn"),
    ("lizard", "four", "worms"),
    ("bee", "six", "nectar"),
]
NUMBERS = ["two", "four", "six", "eight"]
STORIES = [
    "The horse ran over the hill and did not stop until the sun went down behind the old mill. " * 6,
    "A sparrow sat on the wall.",
    "Nobody knew where the spider came from, but it had built its web in the corner of the window, and every "
    "morning there were drops of water on the threads. When the wind blew, the whole web moved like a sail.",
]


def _rows(kind: str) -> list[dict[str, Any]]:
    if kind == "stories":
        return [{"text": text} for text in STORIES]
    return [
        {"animal": animal, "legs": legs, "food": food, "choices": NUMBERS, "answer": NUMBERS.index(legs)}
        for animal, legs, food in ANIMALS
    ]


def _task(name: str, kind: str, **settings: Any) -> dict[str, Any]:
    def dataset(**_: Any) -> Any:
        import datasets

        rows = _rows(kind)
        return {"train": datasets.Dataset.from_list(rows[:3]), "test": datasets.Dataset.from_list(rows)}

    return {"task": name, "custom_dataset": dataset, "test_split": "test", "metadata": {"version": 1}, **settings}


def tasks() -> list[dict[str, Any]]:
    """Task configurations as `lm_eval.simple_evaluate` takes them."""
    accuracy = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    question = "The {{animal}} has this many legs:"
    return [
        _task(
            "legs",
            "animals",
            output_type="multiple_choice",
            training_split="train",
            fewshot_split="train",
            num_fewshot=2,
            fewshot_config={"sampler": "first_n"},
            doc_to_text=question,
            doc_to_choice="choices",
            doc_to_target="answer",
            metric_list=[accuracy, {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}],
        ),
        _task(
            "last_word",
            "animals",
            output_type="loglikelihood",
            doc_to_text="What the {{animal}} eats is ",  # its last space belongs to the answer
            doc_to_target="{{food}}",
            target_delimiter="",
            metric_list=[
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                accuracy,
            ],
        ),
        _task(
            "stories",
            "stories",
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[
                {"metric": "word_perplexity"},
                {"metric": "byte_perplexity"},
                {"metric": "bits_per_byte"},
            ],
        ),
        _task(
            "say",
            "animals",
            output_type="generate_until",
            doc_to_text=question,
            doc_to_target="{{legs}}",
            generation_kwargs={"until": ["e"], "max_gen_toks": 24, "do_sample": False},
            metric_list=[exact],
        ),
        _task(
            "say_more",
            "animals",
            output_type="generate_until",
            doc_to_text=question,
            doc_to_target="{{legs}}",
            generation_kwargs={"until": ["zz", "\n"], "max_gen_toks": 12},
            metric_list=[exact],
        ),
    ]


def loglikelihood_requests() -> list[tuple[str, str]]:
    """Contexts and continuations, most of them where the boundary between the two is not plain."""
    return [
        ("The horse has", " four legs"),
        ("The horse has ", "four legs"),
        ("The horse has \n ", "four legs"),
        ("The horse has four leg", "s"),
        ("", "The horse has four legs"),
        ("", " four"),
        ("<s>", " The horse"),
        ("<s>The horse", " has"),
        ("", "<s>The horse"),
        ("Größe é 😀", " déjà vu"),
        ("Größe é 😀 ", "\u00e9"),
        ("The horse has", "\n\n four"),
        ("<|im_start|>user\nThe horse<|im_end|>\n", "<|im_start|>"),
        (STORIES[0], " The horse has four legs"),  # longer than the context
        (STORIES[0], STORIES[2][:120]),
        ("A", " b"),
        ("A", " b"),
    ]


def rolling_requests() -> list[str]:
    return [*STORIES, "", "A", "<s>The horse"]


def chat() -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many legs has a horse?"},
        {"role": "assistant", "content": "It has "},
    ]

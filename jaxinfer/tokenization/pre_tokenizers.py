r"""How byte-level BPE models cut text into words before merging, by the name in GGUF's `tokenizer.ggml.pre`.

GGUF stores that name instead of the rule. The rules are those of the models' own tokenizer.json where that is
known (it is the reference; llama.cpp approximates some of them for its regex engine), and llama.cpp's
otherwise. They are for the Oniguruma engine of `tokenizers`.
"""

import dataclasses

from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}|{_CASED_REST}"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# DeepSeek LLM's list of letters with upper and lower case. Escaped, because a text editor that normalises
# characters (U+212A to K) would silently change it.
_CASED_LETTERS = (
    r"\x{41}-\x{5a}\x{61}-\x{7a}\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}"
    r"\x{1c4}-\x{293}\x{295}-\x{2af}\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}"
    r"\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}"
    r"\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}"
    r"\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}"
    r"\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}"
    r"\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}"
    r"\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}"
    r"\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}"
    r"\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}"
    r"\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}"
    r"\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}"
    r"\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}"
    r"\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}"
    r"\x{1e900}-\x{1e943}"
)
_HAN_HANGUL = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"


def _split(*patterns: str | PreTokenizer) -> tuple[PreTokenizer, ...]:
    """Each pattern cuts what the ones before left over; then bytes are spelled as characters."""
    cuts = [Split(Regex(pattern), behavior="isolated") if isinstance(pattern, str) else pattern for pattern in patterns]
    return (*cuts, ByteLevel(add_prefix_space=False, use_regex=False))


_BYTE_LEVEL = ByteLevel(add_prefix_space=False, use_regex=True)
_EACH_DIGIT = Digits(individual_digits=True)


@dataclasses.dataclass(frozen=True)
class PreTokenization:
    """One model family's rule, and what goes with it.

    `ignore_merges`: a word that is itself a token is that token, even where the merges would build it
    differently. `nfc`: text is brought to Unicode form C first. `adds_bos`: BOS opens a text unless the file
    says otherwise.
    """

    steps: tuple[PreTokenizer, ...]
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        return Sequence(list(self.steps))

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_LLAMA3 = PreTokenization(_split(_CL100K), ignore_merges=True, adds_bos=True)
_QWEN = PreTokenization(_split(_QWEN2), nfc=True)
_QWEN_AS_IS = PreTokenization(_split(_QWEN2))
_GPT = PreTokenization((_BYTE_LEVEL,))
_GPT_NFC = PreTokenization((_BYTE_LEVEL,), nfc=True)
_DIGITS = PreTokenization((_EACH_DIGIT, _BYTE_LEVEL))
_CL = PreTokenization(_split(_CL100K))
_O200K_CASED = PreTokenization(_split(_O200K))
_DEEPSEEK3 = PreTokenization(
    _split(r"\p{N}{1,3}", r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+", _DEEPSEEK_V3)
)

PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    # What llama.cpp does for files that name no family: close to Falcon's rule.
    "default": PreTokenization(_split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT,
    "gpt2": _GPT,
    "phi-2": _GPT,
    "mellum": _GPT,
    "exaone4": _GPT,
    "granite-docling": _GPT,
    "mpt": _GPT_NFC,
    "olmo": _GPT_NFC,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _CL,
    "smaug-bpe": _CL,
    "glm4": _CL,
    "chatglm-bpe": _CL,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "megrez": _QWEN,
    "stablelm2": _QWEN_AS_IS,
    "qwen35": PreTokenization(_split(_QWEN35), nfc=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "minerva-7b": _DIGITS,
    "command-r": PreTokenization((_EACH_DIGIT, _BYTE_LEVEL), nfc=True),
    "deepseek-llm": PreTokenization(
        _split(
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
            r"\s+$",
            _HAN_HANGUL,
            _EACH_DIGIT,
        )
    ),
    "deepseek-coder": PreTokenization(_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, _EACH_DIGIT)),
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "gpt-4o": _O200K_CASED,
    "llama4": _O200K_CASED,
    "tekken": PreTokenization(_split(_TEKKEN), ignore_merges=True, adds_bos=True),
    "falcon": PreTokenization(
        _split(Punctuation("contiguous"), _BYTE_LEVEL, Digits(individual_digits=False), "[0-9][0-9][0-9]")[:-1]
    ),
    "seed-coder": PreTokenization(
        _split(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    ),
}


def pre_tokenization(name: str | None) -> PreTokenization:
    """The rule that `tokenizer.ggml.pre` names. Raises ValueError, listing the known names, for any other."""
    if name is None or name not in PRE_TOKENIZATIONS:
        given = "is missing" if name is None else f"is {name!r}"
        raise ValueError(
            f"tokenizer.ggml.pre {given}, so it is unknown how text is cut into words; "
            f"convert the model again, or set it to one of {', '.join(sorted(PRE_TOKENIZATIONS))}"
        )
    return PRE_TOKENIZATIONS[name]

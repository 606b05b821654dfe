"""Text to token ids and back: tokenizers of GGUF files and Hugging Face folders, chats, streaming."""

from jaxinfer.tokenization.gguf import tokenizer_from_gguf
from jaxinfer.tokenization.huggingface import tokenizer_from_folder
from jaxinfer.tokenization.stream import TextStream
from jaxinfer.tokenization.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer", "tokenizer_from_folder", "tokenizer_from_gguf"]

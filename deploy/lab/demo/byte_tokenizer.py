"""A tokenizer in which one byte is one token, with a chat template, as Hugging Face files.

It knows the file formats of `tokenizers` and no model.
"""

from typing import Any

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NUM_BYTES = 256

PAD_ID = _NUM_BYTES
EOS_ID = _NUM_BYTES + 2
VOCAB_SIZE = 320
"""Bytes and special tokens, rounded up to a multiple of 64, which tensor parallelism divides."""

PRINTABLE_IDS = tuple(range(0x20, 0x7F))

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_files() -> dict[str, dict[str, Any]]:
    """JSON contents by file name. A byte's token id is the byte itself."""
    special = [
        {
            "id": _NUM_BYTES + index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(_SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": False},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": False},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {symbol: byte for byte, symbol in enumerate(_byte_symbols())},
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": _SPECIAL_TOKENS[0],
            "eos_token": _SPECIAL_TOKENS[2],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1_000_000,
            "chat_template": _CHAT_TEMPLATE,
        },
        "generation_config.json": {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
    }


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves; the rest take code points from 256 upwards,
    in order. GPT-2's vocabulary introduced this table, and `tokenizers` implements it.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, next_code = [], _NUM_BYTES
    for byte in range(_NUM_BYTES):
        if byte in plain:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(next_code))
            next_code += 1
    return symbols

"""Byte-level BPE tokenizers, as the files of a Hugging Face folder. They lose nothing of any text."""

from __future__ import annotations

import json
from collections.abc import Iterable

BEGIN, END = "<|begin|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
"""An answer ends with the end token, and begins with a line, which is one token before every text."""


def byte_bpe(texts: Iterable[str], size: int) -> tuple[dict[str, str], int]:
    """The files of a tokenizer of at most `size` tokens, by name, and how many it has: the begin token, the end token,
    256 bytes, and what was merged of `texts`. The same texts give the same files.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": 1_000_000,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(config, indent=1)}
    return files, tokenizer.get_vocab_size()

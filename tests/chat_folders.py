"""Tokenizers with chat templates, for tests of conversations."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tpshard.train.data.byte_bpe import byte_bpe

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
)
MARKERS = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|observation|>", "<|eot|>", "<|eom|>")


def chat_folder(folder: Path, template: str, end: str = "<|end|>", stops: tuple[str, ...] = ()) -> Path:
    """A folder with a byte-level tokenizer that has markers of turns, a template, and the ids that stop."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in byte_bpe(["It is sunny. What is two plus two? It is four."] * 3, 300)[0].items():
        (folder / name).write_text(content, encoding="utf-8")
    rust = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rust.add_special_tokens([AddedToken(name, special=True) for name in MARKERS])
    rust.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"eos_token": end, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [rust.token_to_id(name) for name in stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids or None}))
    return folder

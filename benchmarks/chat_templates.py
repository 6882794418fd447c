"""Chat templates that you have, against transformers: are tokens, and the tokens that are learned, the same?

    python benchmarks/chat_templates.py FOLDER [--record]

FOLDER holds templates (`*.jinja`), configurations of tokenizers (`tokenizer_config.json`, `chat_template.json`), or
folders of these. One small byte-level tokenizer renders five conversations with each. `tokens` counts conversations
whose tokens are transformers'; `masks` those whose learned tokens are too, `other_masks` those whose are not, where
transformers can tell: it needs `{% generation %}`, and its mask is wrong for some templates (transformers#47325). A
conversation that both refuse is `refused`; `refused_here` is one of which the template drops a message, which
transformers renders without it. The record keeps names and counts, nothing of the templates.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record import Record, parser_of

CALL = {"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": {"at": "home"}}}
TOOL = {"type": "function", "function": {
    "name": "weather", "description": "The weather at a place.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "The place."}},
                   "required": ["at"]},
}}  # fmt: skip
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "What is two plus two?"}, {"role": "assistant", "content": "It is four."},
]  # fmt: skip
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": (TURNS, None),
    "two turns": ([*TURNS, {"role": "user", "content": "And?"}, {"role": "assistant", "content": " Sunny. "}], None),
    "system": ([{"role": "system", "content": "Be brief."}, *TURNS], None),
    "thinking": ([TURNS[0], {**TURNS[1], "reasoning_content": "Two and two."}], None),
    "tools": ([{"role": "user", "content": "The weather?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
               {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "sunny"},
               {"role": "assistant", "content": "It is sunny."}], [TOOL]),
}  # fmt: skip
COUNTS = ("tokens", "masks", "other_masks", "refused", "refused_here", "differ")


def templates(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields (name, source) of the templates in a folder and those below it."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".jinja":
            yield name, path.read_text(encoding="utf-8")
        elif path.name in ("tokenizer_config.json", "chat_template.json"):
            found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
            several = found if isinstance(found, list) else [{"name": "", "template": found}] if found else []
            for one in several:
                yield f"{name}:{one['name']}".rstrip(":"), one["template"]


def tokenizer_of(sources: list[str], folder: Path) -> Path:
    """Writes a byte-level tokenizer to which the markers in the templates are special tokens."""
    from tokenizers import AddedToken, Tokenizer
    from tpshard.train.data.byte_bpe import byte_bpe

    for name, content in byte_bpe(["It is sunny. What is two plus two? It is four."] * 3, 300)[0].items():
        (folder / name).write_text(content, encoding="utf-8")
    rust = Tokenizer.from_file(str(folder / "tokenizer.json"))
    markers = sorted({marker for source in sources for marker in re.findall(r"<\|\w+\|>", source)})
    rust.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    rust.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|end|>"}))
    return folder


def compared(source: str, ours: Any, theirs: Any) -> dict[str, Any]:
    """The counts of one template, and the conversations that differ."""
    from tpshard.models.folders.assistant_spans import ConversationRenderer
    from tpshard.models.folders.chat_template import ChatTemplate, TemplateError

    row: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "conversations": []}
    marks = re.search(r"{%-?\s*generation\b", source) is not None
    for name, (messages, tools) in CONVERSATIONS.items():
        mine: Any
        try:
            mine = ConversationRenderer(ours, ChatTemplate(source, ours.special)).rendered(messages, tools)
        except (TemplateError, ValueError):
            mine = None
        try:
            other = theirs.apply_chat_template(messages, tools=tools, chat_template=source, tokenize=True,
                                               return_dict=True, return_assistant_tokens_mask=marks)  # fmt: skip
        except Exception:  # whatever a template's own code raises
            other = None
        if mine is None or other is None or mine.ids != list(other["input_ids"]):
            kind = "differ" if mine is not None else "refused" if other is None else "refused_here"
            row[kind] += 1
            row["conversations"] += [name] * (kind != "refused")
            continue
        row["tokens"] += 1
        if marks and any(other["assistant_masks"]):
            row["masks" if mine.learned == list(map(bool, other["assistant_masks"])) else "other_masks"] += 1
    return row


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    from tpshard.models.folders.folder_tokenizer import FolderTokenizer
    from transformers import AutoTokenizer

    found = dict(templates(options.folder))
    if not found:
        print(
            f"{options.folder} has no templates: *.jinja, tokenizer_config.json or chat_template.json", file=sys.stderr
        )
        return 2
    record = Record("chat_templates", "tokenizers", "jinja2", quiet=options.json)
    with tempfile.TemporaryDirectory() as scratch:
        folder = tokenizer_of(list(found.values()), Path(scratch))
        ours, theirs = FolderTokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
        record.say(f"{'template':<48} " + " ".join(f"{count:>11}" for count in COUNTS))
        for name, source in found.items():
            row = compared(source, ours, theirs)
            record.rows.append({"name": name, **row})
            shown = " ".join(f"{row[count]:>11}" for count in COUNTS)
            record.say(f"{name[:48]:<48} {shown} {', '.join(row['conversations'])}".rstrip())
    record.figure("templates", len(found), "templates")
    for count in COUNTS:
        record.figure(count, sum(row[count] for row in record.rows), "conversations")
    record.close(write=options.record, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

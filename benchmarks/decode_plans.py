"""Plans of a decoding step with act-ordered weights: `layout: naive` gathers activations, `tp_aware` does not.

python benchmarks/decode_plans.py --record        the transcripts in docs/planning.md; needs no GPU
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from record import Record, parser_of
from running import tpshard

RECIPE = """cluster: {{device: h100-sxm-80g, devices_per_node: 8}}
model: {{preset: llama3-8b, seq_len: 4096}}
quantize: {{bits: 4, group_size: 64}}
serve: {{checkpoint: llama3-8b-gptq, mesh: {{tp: 8}}, layout: {layout}, requests: 16}}
"""


def plan(layout: str) -> str:
    """Runs `tpshard plan` for a layout, and returns what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{layout}.yaml").write_text(RECIPE.format(layout=layout))
        return tpshard("plan", f"{layout}.yaml", "--for", "decode", "--dry-run", cwd=folder)


def main() -> None:
    options = parser_of(__doc__).parse_args()
    record = Record("decode_plans", quiet=options.json)
    for layout in ("naive", "tp_aware"):
        record.texts[layout] = plan(layout)
        record.rows.append({"layout": layout, "recipe": RECIPE.format(layout=layout)})
        record.say(record.texts[layout])
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()

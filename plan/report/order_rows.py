"""What became of the act-order of a server's linears: moved into the linears before, or what stands between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpshard.parallelism.words import IN_SEQUENCE
from tpshard.plan.report.pattern import pattern


def order_rows(between: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for each linear of a layer, as JSON: its pattern, how many there are, what stands between ("": nothing).

    between: see `Arrangement.between`.
    """
    counts: dict[tuple[str, str], int] = {}
    for weight, what in between.items():
        key = pattern(weight.removesuffix(".weight")), " ".join(map(pattern, what.split(" ")))
        counts[key] = counts.get(key, 0) + 1
    return [
        {"linear": linear, "count": count, "absorbed": not what, "between": what}
        for (linear, what), count in counts.items()
    ]


def order_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in a sentence, the absorbed ones first; "" for none."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: not row["absorbed"]):
        groups.setdefault(row["between"], []).append(row)
    parts = []
    for what, group in groups.items():
        modules: dict[str, list[str]] = {}
        for row in group:
            module, _, leaf = row["linear"].rpartition(".")
            modules.setdefault(module, []).append(leaf)
        names = ", ".join(f"{module}.{', '.join(leaves)}" for module, leaves in modules.items())
        count = sum(row["count"] for row in group)
        if what == IN_SEQUENCE:
            parts.append(f"{count} have no order ({names}): {what}")
        else:
            parts.append(
                f"{count} stay ({names}): {what}" if what else f"{count} absorbed by the linears before ({names})"
            )
    return "; ".join(parts)

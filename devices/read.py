"""Reads device files: checks them and returns a `Device`. All errors are reported together, with their places."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from tpshard.devices.device_keys import (
    CROWD,
    EFFICIENCY,
    HOST,
    LAYOUTS,
    LEVEL,
    LINK,
    MAPS,
    OF_CPU,
    OVERHEAD,
    PREFIX,
    PRODUCT,
    RATES,
    SERVING,
    TOP,
    UNITS,
    WORDS,
    DeviceKey,
)
from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, Source
from tpshard.parallelism.pricing.cost import BUS, Cpu, Crowd, Device, Efficiency, Overhead, ServingOverhead
from tpshard.parallelism.pricing.network import Level, Link
from tpshard.recipes.keys.schema import DEVICES
from tpshard.recipes.text.nodes import Node, read, scalar


def device(name_or_file: str, where: Source | None = None) -> Device:
    """Reads a shipped device by its name, or a device file. Raises `Mistakes` (exit 3) with file, line and column."""
    if name_or_file in DEVICES:
        text = resources.files("tpshard.devices").joinpath(f"{name_or_file}.yaml").read_bytes()
        return parse(text, f"{name_or_file}.yaml")
    path = Path(name_or_file)
    if not path.is_file():
        raise Mistakes.one(
            f"there is no device `{name_or_file}`",
            where=where,
            why="it is neither a known name nor a file",
            fix=f"one of {', '.join(DEVICES)}, or a file; `tpshard doctor --measure` writes one for this machine",
        )
    return parse(path.read_bytes(), name_or_file)


def parse(data: bytes, file: str) -> Device:
    """The `Device` described by the bytes of a device file; `file` is its name in errors."""
    root = _read(data, file)
    reader = _Reader()
    top = reader.section(root, TOP, "")
    reader.refuse()
    host, rates, constants = top["host"], top["rates"], top["constants"]
    inside, across, levels = _network(root, top, reader)
    result = Device(
        name=top["name"],
        kind=top["kind"],
        backend=top["backend"],
        memory_bytes=int(top["memory"]),
        context_bytes=int(top["context"]),
        channels=top["channels"],
        memory_bandwidth=top["memory_bandwidth"],
        rates=rates,
        host_devices=host["devices"],
        inside=inside,
        across=across,
        bus=BUS if host["bus"]["bandwidth"] is None else _link(host["bus"]),
        levels=levels,
        efficiency=Efficiency(**{name: constants[name] for name in EFFICIENCY}),
        overhead=Overhead(
            **{f"{name}_s": constants[name] for name in OVERHEAD},
            serving=ServingOverhead(*(constants[name] for name in SERVING)),
        ),
        cpu=Cpu(
            cores=host["cores"],
            crowds={n: _crowd(crowd) for n, crowd in host["crowds"].items()},
            products=host["products"],
            view_s=constants["view"],
            **{name: constants[name] for name in OF_CPU},
        ),
        fitted=top["fitted"],
    )
    if result.kind == "cpu" and result.cpu.cores < 1:
        reader.wrong("a CPU needs `host.cores`", root, "its processes share them", "host: {cores: 8, ...}")
    if result.context_bytes >= result.memory_bytes:
        reader.wrong("`context` leaves no memory", root, f"a device has {result.memory_bytes:,} bytes", "a smaller one")
    reader.refuse()
    return result


def _read(data: bytes, file: str) -> Node:
    """The file's YAML tree. Errors about an empty file or a list name the device file instead of a recipe."""
    try:
        tree = read(data, file)
    except Mistakes as error:
        needed = "schema, name, kind, backend, memory, memory_bandwidth, rates and host are needed"
        raise Mistakes(
            replace(d, message=d.message.replace("recipe", "device file"), fix=needed) if "recipe" in d.message else d
            for d in error.diagnostics
        ) from None
    if tree.mistakes:
        raise Mistakes(tree.mistakes)
    return tree


def _link(values: dict[str, Any]) -> Link:
    return Link(*(values[key] for key in LINK))


def _network(root: Node, top: dict[str, Any], reader: _Reader) -> tuple[Link, Link, tuple[Level, ...]]:
    """The links within a host and between hosts, and the network's levels. Raises `Mistakes` where they do not fit.

    Where levels are given, the links are those of the last level within a host and of the first between hosts.
    """
    host = top["host"]
    node, list_node = root.get("host") or root, root.get("levels")
    if list_node is None:
        for key in ("inside", "across"):
            if node.get(key) is None:
                reader.wrong(f"`host.{key}` is missing", node, HOST[key].what, f"{key}: {WORDS['link'][1]}")
        reader.refuse()
        return _link(host["inside"]), _link(host["across"]), ()
    for key in ("inside", "across"):
        if (written := node.get(key)) is not None:
            reader.wrong(f"`host.{key}` and `levels` both describe the links", written, "", f"leave `host.{key}` out")
    levels = tuple(
        Level(link=_link(values), **{key: values[key] for key in LEVEL.keys() - LINK.keys()})
        for values in top["levels"]
    )
    if why := _level_mistake(levels, host["devices"], top["kind"]):
        reader.wrong("these `levels` do not form a network", list_node, why, "from the nearest: " + WORDS["levels"][1])
    reader.refuse()
    first = next(i for i, level in enumerate(levels) if level.between_hosts)
    return levels[first - 1].link, levels[first].link, levels


def _level_mistake(levels: tuple[Level, ...], devices: int, kind: str) -> str:
    """What is wrong with the order, sizes or names of the levels; empty if they make a network."""
    if kind == "cpu":
        return "processes of a CPU share its memory: `host.inside` and `host.across`"
    near = [level for level in levels if not level.between_hosts]
    far = [level for level in levels if level.between_hosts]
    if not near or not far or list(levels) != near + far:
        return "first those of one host (`devices`), then those between hosts (`hosts`, the last without)"
    if near[-1].devices != devices:
        return f"`{near[-1].name}` must join the {devices} devices of a host"
    if any(level.hosts == 0 for level in far[:-1]):
        return "only the last one may leave `hosts` out: it joins all"
    for sizes in ([level.devices for level in near], [level.hosts for level in far if level.hosts]):
        if any(b % a or a == b for a, b in itertools.pairwise(sizes)):
            return "each must join several of the level before"
    if len({level.name for level in levels}) < len(levels):
        return "two have one name"
    return "only hosts have rails" if any(level.rails for level in near) else ""


def _crowd(values: dict[str, Any]) -> Crowd:
    fields: list[Any] = [None if values[key] < 0 else values[key] for key in CROWD]
    return Crowd(*fields)


class _Reader:
    """Reads the values of a device file's keys, and collects what is wrong with them in `mistakes`."""

    def __init__(self) -> None:
        self.mistakes: list[Diagnostic] = []

    def wrong(self, message: str, node: Node, why: str, fix: str) -> None:
        """Adds a mistake at the place of `node`: what is wrong, why, and how to write it right."""
        self.mistakes.append(Diagnostic(message, Exit.RECIPE, node.source, why, fix))

    def refuse(self) -> None:
        """Raises the mistakes so far, if any."""
        if self.mistakes:
            raise Mistakes(self.mistakes)

    def section(self, node: Node, keys: dict[str, DeviceKey], path: str) -> dict[str, Any]:
        """The value of each key of a map, or its default. Unknown and missing keys are mistakes."""
        values: dict[str, Any] = {}
        if node.kind != "map":
            self.wrong(f"`{path or 'the file'}` is not a map", node, "", "write `key: value` pairs")
            return {name: key.default for name, key in keys.items()}
        for written, _ in node.entries:
            if written.text not in keys:
                message = f"unknown key `{_join(path, written.text)}`"
                self.wrong(message, written, "not part of a device file", ", ".join(keys))
        for name, key in keys.items():
            value_node = node.get(name)
            if value_node is None:
                if key.default is None:
                    words = WORDS.get(key.unit, (key.unit.replace("|", " or "), ""))
                    fix = f"{name}: {words[1]}" if words[1] else ""
                    self.wrong(f"`{_join(path, name)}` is missing", node, key.what or words[0], fix)
                nested = MAPS.get(key.unit)
                values[name] = {k: v.default for k, v in nested.items()} if nested else key.default
            else:
                values[name] = self.value(value_node, key, _join(path, name))
        return values

    def value(self, node: Node, key: DeviceKey, path: str) -> Any:
        """The value written for a key, converted by the key's unit; its default where the value is a mistake."""
        if key.unit in MAPS:
            return self.section(node, MAPS[key.unit], path)
        readers = {"rates": self._rates, "levels": self._levels, "crowds": self._crowds, "products": self._products}
        if key.unit in readers:
            return readers[key.unit](node, path)
        if key.unit == "texts":
            if node.kind != "map":
                self.wrong(f"`{path}` is not a map", node, "", "write `constant: what it was fitted on`")
            return {name.text: value.text for name, value in node.entries}
        if node.kind != "scalar":
            self.wrong(f"`{path}` is not a single value", node, "", "write one value, without brackets")
            return key.default
        if "|" in key.unit:
            if node.text not in key.unit.split("|"):
                self.wrong(f"`{path}: {node.text}` is not known", node, "", f"write {key.unit.replace('|', ' or ')}")
            return node.text
        if key.unit == "text":
            return node.text
        if key.unit == "bool":
            truth = scalar(node)
            if not isinstance(truth, bool):
                self.wrong(f"`{path}: {node.text}` is not true or false", node, "", "write true or false")
            return truth
        number = self._number(node, key, path)
        if number is None:
            return key.default
        if not (key.least <= number <= key.most):
            least, most = _show(key.least, key.unit), _show(key.most, key.unit)
            limits = f"of {least}" if least == most else f"between {least} and {most}"
            self.wrong(f"`{path}: {node.text}` is not allowed", node, "", f"write a value {limits}")
        return int(number) if key.unit == "int" else number

    def _levels(self, node: Node, path: str) -> list[dict[str, Any]]:
        if node.kind != "list" or not node.items:
            self.wrong(f"`{path}` is not a list", node, *WORDS["levels"])
            return []
        return [self.section(one, LEVEL, f"{path}[{i}]") for i, one in enumerate(node.items)]

    def _crowds(self, node: Node, path: str) -> dict[int, dict[str, Any]]:
        if node.kind != "map":
            self.wrong(f"`{path}` is not a map", node, "", "write `number of processes: what one reaches`")
            return {}
        crowds = {}
        for written, value in node.entries:
            inside = _join(path, written.text)
            if not written.text.isascii() or not written.text.isdigit() or not 1 <= int(written.text) <= 4096:
                self.wrong(f"`{inside}` is not a number of processes", written, "", "write 1 to 4096")
                continue
            crowds[int(written.text)] = self.section(value, CROWD, inside)
        return crowds

    def _products(self, node: Node, path: str) -> dict[str, dict[int, float]]:
        if node.kind != "map":
            self.wrong(f"`{path}` is not a map", node, "", "write `layout: {rows: seconds per weight}`")
            return {}
        products: dict[str, dict[int, float]] = {}
        for layout, by_rows in node.entries:
            inside = _join(path, layout.text)
            if layout.text not in LAYOUTS or by_rows.kind != "map":
                self.wrong(f"`{inside}` is no layout with its rows", layout, "", f"one of {', '.join(LAYOUTS)}")
                continue
            products[layout.text] = {}
            for rows, seconds in by_rows.entries:
                if not rows.text.isascii() or not rows.text.isdigit() or not 1 <= int(rows.text) <= 1 << 16:
                    self.wrong(f"`{inside}.{rows.text}` is not a number of rows", rows, "", "write 1 to 65536")
                    continue
                measured = self.value(seconds, PRODUCT, f"{inside}.{rows.text}")
                products[layout.text][int(rows.text)] = measured
        return products

    def _rates(self, node: Node, path: str) -> dict[str, float]:
        if node.kind != "map" or not node.entries:
            self.wrong(f"`{path}` names no dtype", node, "dtype: rate", "rates: {bf16: 989 TFLOP/s}")
            return {}
        rates = {}
        for name, value in node.entries:
            if name.text not in RATES:
                self.wrong(f"unknown dtype `{_join(path, name.text)}`", name, "", ", ".join(RATES))
                continue
            rates[name.text] = self.value(value, RATES[name.text], _join(path, name.text))
        if not {"bf16", "fp32"} & rates.keys():
            self.wrong(f"`{path}` has neither bf16 nor fp32", node, "one of them is needed", "add fp32: 1 TFLOP/s")
        return rates

    def _number(self, node: Node, key: DeviceKey, path: str) -> float | None:
        if key.unit in ("share", "ratio", "int"):
            parsed = scalar(node)
            good = isinstance(parsed, int) if key.unit == "int" else isinstance(parsed, (int, float))
            if isinstance(parsed, bool) or not good or not math.isfinite(float(parsed)):  # type: ignore[arg-type]
                kind = "whole number" if key.unit == "int" else "number"
                self.wrong(f"`{path}: {node.text}` is not a {kind}", node, "", f"write a {kind}")
                return None
            return float(parsed)  # type: ignore[arg-type]
        match = UNITS[key.unit].fullmatch(node.text.strip())
        if match is None:
            words, example = WORDS[key.unit]
            self.wrong(f"`{path}: {node.text}` is not {words} with its unit", node, "", f"write it as in {example}")
            return None
        if key.unit == "time":
            return float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[match[2]]
        step = PREFIX[match[2]]
        if match[3]:
            step = 1024.0 ** round(math.log(step, 1000))
        number = float(match[1]) * step
        return number / 8 if key.unit == "bandwidth" and match[4] == "bit" else number


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _show(number: float, unit: str) -> str:
    """A limit with its unit, in the largest unit of which it is 1 or more."""
    suffix = {"bytes": "B", "bandwidth": "B/s", "rate": "FLOP/s", "time": "s"}.get(unit)
    if suffix is None:
        return f"{number:g}"
    if unit == "time":
        return f"{number:g} s"
    marks = {"bytes": ("", "Ki", "Mi", "Gi", "Ti"), "rate": ("", "k", "M", "G", "T", "P")}.get(unit, ("", *"kMGT"))
    step = 1024.0 if unit == "bytes" else 1000.0
    power = min(len(marks) - 1, int(math.log(number, step) + 1e-9)) if number >= 1 else 0
    return f"{number / step**power:g} {marks[power]}{suffix}"

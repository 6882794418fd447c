"""Types of values that several sections of a recipe share."""

from __future__ import annotations

from typing import Annotated, Literal

from tpshard.recipes.constraints import ALONE, SIZE, form, limits

AXES = ("pp", "dp", "fsdp", "ep", "spatial", "tp")
"""Mesh axes that rules may name even if the mesh does not have them: they then have size 1."""

Count = Annotated[int, limits(least=1, most=10**12)]
CountOrZero = Annotated[int, limits(least=0, most=10**12)]
Positive = Annotated[float, limits(above=0, most=1e12)]
NonNegative = Annotated[float, limits(least=0, most=1e12)]
Share = Annotated[float, limits(least=0, most=1)]
Dtype = Literal["fp32", "bf16", "fp16"]
Computed = Literal["fp32", "bf16", "fp16", "fp8"]
AxisName = Annotated[str, form(r"[A-Za-z_][A-Za-z0-9_]*", "a name of letters, digits and underscores")]
AxisSize = Annotated[int, SIZE]
Axes = Annotated[tuple[AxisName, ...], ALONE]

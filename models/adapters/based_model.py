"""A model made of another one: what its class does not change is the other's."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from tpshard.models.model_spec import ModelSpec


def of_base(name: str) -> Any:
    """A property or a method that is the base's."""
    return property(attrgetter(f"base.{name}"))


class BasedModel(ModelSpec):
    """A model with a `base`, whose parameters have other forms or others beside them."""

    base: ModelSpec

    source = of_base("source")
    outline = of_base("outline")
    vocab = of_base("vocab")
    positions = of_base("positions")
    activations = of_base("activations")
    instead = of_base("instead")
    recurrent = of_base("recurrent")
    reads_code = of_base("reads_code")
    fewest_rows = of_base("fewest_rows")
    names_dims = of_base("names_dims")
    dtype = of_base("dtype")
    sizes = of_base("sizes")
    weights = of_base("weights")
    adaptable = of_base("adaptable")
    folder_names = of_base("folder_names")
    tied = of_base("tied")
    divides = of_base("divides")
    refusal = of_base("refusal")

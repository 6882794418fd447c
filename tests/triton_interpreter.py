"""Triton's interpreter, whose products add in order and which does once what it does for every call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


def prepare() -> None:
    """Changes this process's interpreter; where kernels run on a GPU nothing changes."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)  # three casts for a sum of integers
    interpreter._get_np_dtype = functools.partial(_numpy_dtype, functools.cache(interpreter._get_np_dtype))
    interpreter._patch_lang = functools.partial(_patch_once, interpreter._patch_lang)
    interpreter.InterpreterBuilder.create_dot = _dot


def _numpy_dtype(of_scalar: Any, dtype: Any) -> Any:
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)


def _patch_once(patch: Any, function: Any) -> Any:
    """A launch replaces the operations of `triton.language`; a function that its kernel calls need not do so again."""
    languages = [x for x in function.__globals__.values() if x is tl or x is tl.core]
    if any(tl.core.is_builtin(language.load) for language in languages):
        return patch(function)
    return interpreter._LangPatchScope()


def _values(block: Any) -> Any:
    if block.dtype.is_floating() and block.dtype.primitive_bitwidth == 8:  # held as bytes
        return interpreter._convert_float(block.data, block.dtype, tl.float16, None).view(np.float16)
    return block.data


def _dot(self: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
    """A product as a sum over the inner dim in order, whose rows are independent as those of a GPU are. numpy's library
    for matrices sums a row in an order that depends on its place in the block."""
    x, y = (_values(block).astype(total.data.dtype) for block in (a, b))
    terms = np.moveaxis(x, -1, 0)[..., None] * np.moveaxis(y, -2, 0)[..., None, :]
    return interpreter.TensorHandle(total.data + np.add.reduce(terms, axis=0), total.dtype.scalar)

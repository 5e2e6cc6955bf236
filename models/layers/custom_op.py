"""Operators of our own: a compiler takes them as they are and need not look inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def custom_op(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """The function as the operator `name`, for every device; it changes none of its inputs, and returns nothing that shares memory with them.

    As `torch.library.custom_op`, whose operators import the whole compiler when they are first called: a second of every start, compiled or not.
    """

    def define(function: Callable[P, T]) -> Callable[P, T]:
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "default", function)
        space, _, word = name.partition("::")
        return cast(Callable[P, T], getattr(getattr(torch.ops, space), word).default)

    return define

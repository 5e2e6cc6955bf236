"""Custom operators: torch.compile calls them without tracing their bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def custom_op(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function as operator `name` for every device. It must not mutate its inputs, nor return tensors that share memory with them.

    `torch.library.custom_op` does the same, but its operators import the compiler when they are first called: one second at every start.
    """

    def define(function: Callable[P, T]) -> Callable[P, T]:
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "default", function)
        namespace, _, op_name = name.partition("::")
        return cast(Callable[P, T], getattr(getattr(torch.ops, namespace), op_name).default)

    return define

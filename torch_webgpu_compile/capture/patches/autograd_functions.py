"""What AOTAutograd makes the function of a graph with gradients of.

Patched: ``AOTDispatchAutograd.post_compile``, which tells what it was given and what it has made.

Why: this package stores compiled graphs, and AOTAutograd's function of two of them is made again of
what this was given. Without it a program that is started again traces its training graphs again.

Until: PyTorch's own cache of such functions takes those of any backend, and stores nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

from ...patches import replaced
from ...torch_private import AOTDispatchAutograd

Told = Callable[[Mapping[str, Any], Callable[..., Any]], None]


def install(tell: Told) -> AbstractContextManager[None]:
    """Tells of each function that is made, as long as the context.

    Args:
        tell: takes arguments by name, for ``post_compile``, and what that has made of them.
    """

    def telling(original: Callable[..., Any]) -> Callable[..., Any]:
        def post_compile(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            made: Callable[..., Any] = original(*args, **kwargs)
            given = signature(original).bind(*args, **kwargs).arguments
            tell(vars(given["spec"]) if "spec" in given else given, made)
            return made

        return post_compile

    return replaced(__name__, lambda: AOTDispatchAutograd, "post_compile", telling)

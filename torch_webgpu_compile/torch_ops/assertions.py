"""Assertions as operators without results: they raise where their argument does not hold."""

from __future__ import annotations

import torch

_aten = torch.ops.aten

# The host calls these: no kernel can raise their messages.
ASSERTIONS = (
    *(_aten._assert_async.default, _aten._assert_async.msg, _aten._linalg_check_errors.default),
)

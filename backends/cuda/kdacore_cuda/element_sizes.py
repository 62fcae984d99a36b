"""Bytes of an element, by the name of its dtype."""

from __future__ import annotations

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

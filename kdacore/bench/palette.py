"""The colours of pictures: a contender has the same one in all of them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

OWN = {
    "kdacore": "#1d5f8a",
    "kdacore cuda": "#1d5f8a",
    "kdacore triton": "#6fa8cf",
    "kdacore xla": "#6d597a",
    "kdacore pallas": "#c3a6cf",
    "kdacore reference": "#adb5bd",
    "fla-core": "#e07a5f",
    "FlashKDA": "#81b29a",
    "flash-kda": "#81b29a",
    "cuDNN frontend": "#b08968",
    "nvidia-cudnn-frontend": "#b08968",
    "FlashQLA": "#d4a017",
    "flash-qla": "#d4a017",
    "flashinfer-python": "#8c2f39",
    "vLLM": "#e07a5f",
}
"""By the contender's name, without its version."""
OWN |= {name: OWN[f"kdacore {name}"] for name in ("cuda", "triton", "xla", "pallas", "reference")}
OTHERS = (
    "#2f4b7c", "#f2b5a0", "#3d6b52", "#e3cfa8", "#5f676e", "#b56576", "#90c2e7", "#a3a847",
    "#457b9d", "#d1495b", "#66a182", "#edae49", "#7b6d8d", "#9a8c98",
)  # fmt: skip
"""Of contenders without one of their own, by their names: a form that is in several pictures has its colour in all of
them, but where another one of the picture has taken it."""


SERIES = {
    "decode null slots": OTHERS[1],
    "decode plain": OTHERS[0],
    "prefill pack": OTHERS[7],
    "prefill pack of 8000": OTHERS[13],
    "shipped": OTHERS[4],
    "two launches side by side": OTHERS[6],
}
"""Of contenders in several pictures whose names would give them those of others there."""


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each contender of a picture."""
    names = list(names)
    found: dict[str, str] = {}
    for name in names:
        own = OWN.get(re.sub(r" \d+\.\d\S*$", "", name)) or SERIES.get(name)
        if own and own not in found.values():  # two versions are told apart
            found[name] = own
    for name in names:
        if name not in found:
            first = zlib.crc32(name.encode()) % len(OTHERS)
            turned = OTHERS[first:] + OTHERS[:first]
            found[name] = next((colour for colour in turned if colour not in found.values()), turned[0])
    return found

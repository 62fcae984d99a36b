"""The colours of pictures: a contender has the same one in all of them."""

from __future__ import annotations

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
    "flash-qla": "#d4a017",
    "flashinfer-python": "#8c2f39",
}
"""By the contender's name, without its version."""
OTHERS = (
    "#2f4b7c", "#f2b5a0", "#3d6b52", "#e3cfa8", "#5f676e", "#b56576", "#90c2e7", "#a3a847",
    "#457b9d", "#d1495b", "#66a182", "#edae49", "#7b6d8d", "#9a8c98",
)  # fmt: skip
"""Of contenders without one of their own, in the order in which they come."""


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each contender of a picture, versions and remarks behind its name aside."""
    found: dict[str, str] = {}
    for name in names:
        own = OWN.get(name) or next((OWN[n] for n in _longest_first if name.startswith(f"{n} ")), "")
        if not own or own in found.values():  # two forms of one backend are told apart
            left = [colour for colour in OTHERS if colour not in found.values()] or OTHERS
            own = left[0]
        found[name] = own
    return found


_longest_first = sorted(OWN, key=len, reverse=True)

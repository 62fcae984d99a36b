"""One row of tokens on several ranks: the calls with ``cp=``, and the pieces that they are made of.

A framework with communication of its own (a pipeline's, an all-to-all) builds what it needs of
:func:`segment_transition`, :func:`compose` and :func:`fold`; :func:`local_group` makes ranks of threads.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kdacore.parallel.fold import compose, fold
from kdacore.parallel.transition import segment_transition

if TYPE_CHECKING:
    from kdacore.parallel.local_ranks import LocalRanks as LocalRanks
    from kdacore.parallel.local_ranks import local_group

__all__ = ["compose", "fold", "local_group", "segment_transition"]

_LATER = {"local_group": "kdacore.parallel.local_ranks"}
"""Names whose modules import torch."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'kdacore.parallel' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value

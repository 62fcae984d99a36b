"""The values of an array of any kind on the host, as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdacore.types import Request

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def to_numpy(array: Any) -> NDArray[Any]:
    """A NumPy copy or view of a NumPy, torch or JAX array. torch bfloat16, which NumPy lacks,
    widens to float32."""
    if type(array).__module__.partition(".")[0] == "torch" or hasattr(array, "detach"):
        array = array.detach().cpu()
        if str(array.dtype) == "torch.bfloat16":
            array = array.float()
        return np.asarray(array.numpy())
    return np.asarray(array)


def to_float64(array: Any) -> F64:
    """The exact values of ``array`` (any float dtype, ``ml_dtypes.bfloat16`` included) as a fresh
    float64 array."""
    return np.array(to_numpy(array), dtype=np.float64)


def rounded(x: Any, dtype: str) -> Any:
    """``x`` rounded to ``dtype``, to nearest even, as float64."""
    if dtype == "bfloat16":
        with np.errstate(over="ignore"):  # gate inputs may be infinite
            word: Any = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000
        return word.astype(np.uint32).view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):  # gate inputs may be infinite
        return np.asarray(x).astype(dtype).astype(np.float64)


def to_int64(array: Any) -> I64:
    """The values of an integer ``array`` as int64."""
    return np.array(to_numpy(array), dtype=np.int64)


def to_offsets(request: Request, cu_seqlens: Any, name: str = "cu_seqlens") -> I64:
    """The offsets of a packed call, checked against the contract. ``name`` is the argument they
    were passed as."""
    offsets = to_int64(cu_seqlens)
    from kdacore.contract.values import check_offsets  # packed calls alone need it

    check_offsets(request, name, offsets)
    return offsets

"""The NumPy part of recognising a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdacore.acceleration.checks import Bounds
from kdacore.arrays.numpy import NUMPY
from kdacore.ops import WRITABLE_ARGUMENTS


def array_test(arrays: dict[str, Any], same_strides: bool) -> tuple[str, dict[str, Any]] | None:
    """See :data:`kdacore.acceleration.matchers.ArrayTest`. NumPy has one object for each native dtype; another one, of
    the other byte order say, is never that object and takes the ordinary path."""
    if not all(type(x) is np.ndarray for x in arrays.values()):
        return None
    tests = [
        f"type({name}) is ndarray and {name}.dtype is dtype_{name} and {name}.shape == shape_{name}"
        for name in arrays
    ]
    tests += [
        f"{name}.strides == strides_{name}" for name in arrays if same_strides or name in WRITABLE_ARGUMENTS
    ]
    tests += [
        f"{name}.flags.writeable is {x.flags.writeable}"
        for name, x in arrays.items()
        if name in WRITABLE_ARGUMENTS
    ]
    values: dict[str, Any] = {"ndarray": np.ndarray}
    for name, x in arrays.items():
        values |= {f"dtype_{name}": x.dtype, f"shape_{name}": x.shape, f"strides_{name}": x.strides}
    return " and ".join(tests), values


def family_test(arrays: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """See :data:`kdacore.acceleration.matchers.FamilyTest`."""
    if not all(type(x) is np.ndarray for x in arrays.values()):
        return None
    tests = [
        f"type({name}) is ndarray and {name}.dtype is dtype_{name} and {name}.ndim == {x.ndim}"
        for name, x in arrays.items()
    ]
    return " and ".join(tests), {"ndarray": np.ndarray, **{f"dtype_{n}": x.dtype for n, x in arrays.items()}}


def bounds(arrays: Any) -> Bounds:
    """Where arrays lie, None left out."""
    return [bounds_of(x) for x in arrays if x is not None]


def bounds_of(x: Any) -> tuple[int, int, bool]:
    """Where an array lies; an empty one nowhere."""
    return NUMPY.extent(x) or (0, 0, True)


def likeness(x: Any) -> Callable[[Any], bool]:
    """A test for arrays that differ from this one in their shapes and strides alone."""
    kind, dtype = type(x), x.dtype
    return lambda y: type(y) is kind and y.dtype is dtype

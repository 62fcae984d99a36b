"""Values that no call should end in a raw error for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore.errors import ConfigError, ContractError

HUGE = 10**6000


def _arrays(make: Any = np.ones) -> list[Any]:
    return [make((1, 16, 1, 8)) for _ in range(4)] + [make((1, 16, 1))]


@pytest.mark.parametrize("option", ["checkpoint_every", "backend", "output_final_state", "scale"])
@pytest.mark.parametrize("value", [HUGE, -HUGE, "x" * 100_000], ids=["digits", "negative", "text"])
def test_what_errors_repeat_is_short(option: str, value: Any) -> None:
    with pytest.raises(ContractError) as caught:
        kdacore.chunk_kda(*_arrays(), **{option: value})
    assert caught.value.argument == option and len(str(caught.value)) < 1000


def test_a_long_variable_is_not_repeated_whole() -> None:
    assert len(str(ConfigError("KDACORE_BACKEND", "x" * 100_000, "a backend"))) < 1000


@pytest.mark.parametrize("name", ["q", "k", "beta"])
def test_a_parameter_without_a_shape_is_named(name: str) -> None:
    torch = pytest.importorskip("torch")
    x = dict(zip(("q", "k", "v", "g", "beta"), _arrays(torch.zeros), strict=True))
    with pytest.raises(ContractError, match=f"'{name}': got a UninitializedParameter"):
        kdacore.chunk_kda(**{**x, name: torch.nn.UninitializedParameter()})


@pytest.mark.parametrize("name", ["q", "v"])
def test_real_tensors_among_fake_ones_are_named(name: str) -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses import FakeTensorMode

    x = dict(zip(("q", "k", "v", "g", "beta"), _arrays(torch.zeros), strict=True))
    x[name] = FakeTensorMode().from_tensor(x[name])
    with pytest.raises(ContractError, match=f"got a tensor with values; wanted a fake tensor, as {name} is"):
        kdacore.chunk_kda(**x)

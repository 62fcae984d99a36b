"""Parameters of the kernels: the names of kernels/__init__.py, groups instead of long lists, and named constants."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

from kdacore_triton import gate_families, kernels
from kdacore_triton.kernels import common, groups
from kdacore_triton.launch import group_types

pytestmark = pytest.mark.quick

MOST = 29
"""Run-time parameters of the decode kernel, which has the most; groups count once. It reads ten arrays by single
numbers, which are in no group: it is compiled for the alignment of a group's members."""

OTHER_NAMES = {
    "A_log": ("a_log", "rate"), "dt_bias": ("bias",), "cu_seqlens": ("cu", "offsets"), "state_indices": ("indices",),
    "has_initial_state": ("filled",), "write_indices": ("goals",), "num_accepted_tokens": ("accepted",),
    "checkpoint_offsets": ("offsets",), "checkpoint_indices": ("kept",), "records": ("rec",), "L2NORM": ("NORM",),
    "VP": ("BVP",), "BV": ("BU",), "BETA": ("SIGMOID", "BETA_SIGMOID"), "SCALAR_GATE": ("SCALAR",),
}  # fmt: skip


def all_kernels() -> Iterator[tuple[str, Any]]:
    """Every function of the package that is launched, by name."""
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        for name, value in vars(module).items():
            if name.endswith("_kernel") and value.fn.__module__ == module.__name__:
                yield name, value


KERNELS = dict(all_kernels())


def names_of(kernel: Any) -> list[str]:
    """Its parameters, groups as their members."""
    found = [name for group in group_types(kernel) if group is not None for name in group._fields]
    return [*kernel.arg_names, *found]


def test_finds_the_kernels() -> None:
    assert {"recurrent_kernel", "chunk_forward_scan_kernel", "gate_kernel"} <= set(KERNELS) and len(
        KERNELS
    ) > 20


@pytest.mark.parametrize("name", KERNELS)
def test_one_name_for_a_thing(name: str) -> None:
    names = names_of(KERNELS[name])
    refused = {other for others in OTHER_NAMES.values() for other in others}
    assert [n for n in names if n in refused or n.endswith("_ptr")] == []


@pytest.mark.parametrize("name", KERNELS)
def test_few_run_time_parameters(name: str) -> None:
    assert len(list(group_types(KERNELS[name]))) <= MOST


def test_every_group_is_used() -> None:
    """By a kernel's parameters, or made inside a kernel."""
    declared = {g for _, g in inspect.getmembers(groups, inspect.isclass) if g.__module__ == groups.__name__}
    of_kernels = {g for kernel in KERNELS.values() for g in group_types(kernel) if g is not None}
    inside = {groups.Place, groups.SequencePlace, groups.RecordOffsets, groups.ChosenCheckpoints}
    inside |= {groups.ConvolutionRows}
    assert declared == of_kernels | inside | {groups.CellStrides}


def test_host_and_kernels_agree_on_constants() -> None:
    gates = (common.GATE_LOG, common.GATE_SOFTPLUS, common.GATE_SIGMOID)
    assert (
        dict(zip(("log", "softplus", "sigmoid"), (x.value for x in gates), strict=True))
        == gate_families.GATES
    )
    betas = (common.BETA_GIVEN, common.BETA_SIGMOID, common.BETA_TWICE_SIGMOID)
    assert (
        dict(zip(("given", "sigmoid", "twice sigmoid"), (x.value for x in betas), strict=True))
        == gate_families.BETAS
    )
    families = (common.FAMILY_BOUNDED, common.FAMILY_UNBOUNDED, common.FAMILY_SCALAR)
    assert (
        dict(zip(("bounded", "unbounded", "scalar"), (x.value for x in families), strict=True))
        == gate_families.FAMILIES
    )

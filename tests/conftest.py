"""Two cores are shared by two test workers, so array libraries use one thread each.

The slow tests are named here, in one place: ``pytest -m "not slow"`` is the inner loop.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    # Triton reads this when it is first imported, and torch may import it in any test: so before all of them.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# In these folders kernels are compiled, interpreted or emulated, or whole programs run, in nearly every test: all files
# are slow except those named.
QUICK_FILES = {
    "conformance": {"test_calls.py", "test_docs.py"},
    "cuda": {
        "test_costs.py",
        "test_emulator.py",
        "test_launch.py",
        "test_launch_ops.py",
        "test_packaged_cubins.py",
        "test_verifiers.py",
    },
    "examples": {"test_serving_loop.py"},
    "packaging": {"test_layers.py"},
    "pallas": {"test_verifiers.py"},
    "triton": {"test_configs.py", "test_gate.py", "test_plugin.py"},
}

# Slow tests of the other folders, by function.
SLOW_TESTS = {
    "test_activation_checkpointing",
    "test_adding_a_backend",
    "test_an_eager_grad_compiles_once",
    "test_batch_invariance",
    "test_compiled_autograd_does_not_trace_through_the_backend",
    "test_compiling_may_be_the_first_thing_a_process_does",
    "test_eager_calls_take_any_capable_backend",
    "test_fake_tensors_and_export",
    "test_first_gradient_calls_of_many_threads",
    "test_grad_matches_torch_on_the_reference",
    "test_half_precision_loses_only_the_rounding_of_results",
    "test_later_tokens_in_jax",
    "test_packed_offsets_may_be_traced",
    "test_page",
    "test_saved_tensors_are_unpacked_once",
    "test_stages_in_jax",
    "test_torch_and_jax",
    "test_vmap_and_checkpoint",
    "test_what_is_no_tensor_after_calls_that_are_cached",
    "test_what_no_graph_can_hold_is_named_and_called_eagerly",
    "test_wrong_results",
    "test_wrong_states",
}


def _is_slow(item: pytest.Item) -> bool:
    if item.get_closest_marker("exhaustive"):  # `-m "not slow"` replaces the option that leaves these out
        return True
    if getattr(item, "originalname", item.name) in SLOW_TESTS:
        return True
    folder, file = item.path.parent.name, item.path.name
    quick = QUICK_FILES.get(folder)
    return quick is not None and file not in quick


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests. Tests marked ``gpu`` run where there is one; their record is in benchmarks/results."""
    for item in items:
        if _is_slow(item):
            item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))

"""Two cores are shared by two test workers, so array libraries use one thread each.

The slow tests are named here, in one place: ``pytest -m "not slow"`` is the inner loop.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    # Triton reads this when it is first imported, and torch may import it in any test: so before all of them.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Programs are compiled quickly, for most run once, and for several devices; JAX reads this once, so before all tests.
# On CPUs the compiler's older emitters take half the time of those that go through MLIR. Tests of bits compile as JAX
# does without this (`full_speed` in pallas/pallas_cases.py).
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    " --xla_force_host_platform_device_count=8",
)

# In these folders kernels are compiled, interpreted or emulated, or whole programs run, in nearly every test: all files
# are slow except those named.
QUICK_FILES = {
    "conformance": {"test_calls.py", "test_docs.py"},
    "cuda": {
        "test_emulator.py",
        "test_jax_launches.py",
        "test_launch.py",
        "test_launch_ops.py",
        "test_packaged_cubins.py",
        "test_packaged_handlers.py",
        "test_verifiers.py",
    },
    "examples": {"test_serving_loop.py"},
    "packaging": {"test_layers.py"},
    "parallel": {"test_explain.py", "test_layout.py", "test_model.py", "test_pieces.py", "test_threads.py"},
    "pallas": {"test_verifiers.py"},
    "triton": {"test_configs.py", "test_gate.py", "test_plugin.py"},
    "typing": set(),
}

# Slow tests of the other folders, by function.
SLOW_TESTS = {
    "test_a_pack_of_prompts_from_a_pool",
    "test_a_pool_that_is_only_written",
    "test_a_row_for_each_candidate",
    "test_activation_checkpointing",
    "test_adding_a_backend",
    "test_adding_an_option",
    "test_an_eager_grad_compiles_once",
    "test_arrays_with_values_inside_a_trace",
    "test_batch_invariance",
    "test_checkpoints_change_no_bit_of_the_rest",
    "test_compile_with_changing_lengths",
    "test_compiled_autograd_does_not_trace_through_the_backend",
    "test_compiling_may_be_the_first_thing_a_process_does",
    "test_eager_calls_take_any_capable_backend",
    "test_fake_tensors_and_export",
    "test_first_call_preset_small",
    "test_first_gradient_calls_of_many_threads",
    "test_grad_matches_torch_on_the_reference",
    "test_gradients_of_padding_are_zero",
    "test_half_precision_loses_only_the_rounding_of_results",
    "test_later_tokens_in_jax",
    "test_objects_that_stand_for_arrays",
    "test_only_the_last_state_goes_to_the_rows_written",
    "test_packed_offsets_may_be_traced",
    "test_page",
    "test_plugins_come_and_go_while_others_call",
    "test_saved_tensors_are_unpacked_once",
    "test_stages_and_what_is_no_group_say_why_they_cannot_be_compiled",
    "test_stages_do_not_read_the_padding",
    "test_stages_in_jax",
    "test_states_that_are_returned",
    "test_the_real_command_on_the_real_machine",
    "test_torch_and_jax",
    "test_vmap_and_checkpoint",
    "test_what_is_no_tensor_after_calls_that_are_cached",
    "test_what_no_graph_can_hold_is_named_and_called_eagerly",
    "test_wrong_results",
    "test_wrong_states",
}


# Tests of many cases that take minutes: the README's command runs the first cases, `-m exhaustive` the others.
FIRST_CASES = {
    "test_aot.py::test_representative_cases": 0,
    "test_aot.py::test_the_checks_can_fail": 0,
    "test_byte_lm.py::test_it_starts_at_eight_bits_and_learns": 0,
    "test_chunk_backward.py::test_bf16_inputs_with_bounded_decays": 2,
    "test_chunk_backward.py::test_decays_given": 3,
    "test_chunk_backward.py::test_decays_given_and_promised_bounded": 2,
    "test_chunk_backward.py::test_gates_norms_and_beta_in_the_kernel": 3,
    "test_chunk_backward.py::test_gates_that_close_at_once_get_no_rounding_for_a_gradient": 1,
    "test_chunk_backward.py::test_gradients_of_a_prefix_loss_do_not_see_the_rest": 3,
    "test_chunk_backward.py::test_head_dims": 2,
    "test_chunk_backward.py::test_one_gate_a_head": 2,
    "test_chunk_backward.py::test_packed_sequences": 1,
    "test_chunk_backward.py::test_strong_gates_without_a_bound": 2,
    "test_chunk_backward.py::test_tokens_behind_a_pack": 3,
    "test_chunk_backward.py::test_value_heads_share_q_and_k": 1,
    "test_chunk_backward_prepare.py::test_gates": 3,
    "test_chunk_backward_segments.py::test_pack_of_hard_lengths_with_states": 1,
    "test_chunk_backward_segments.py::test_states": 1,
    "test_chunk_forward.py::test_bounded_gates": 6,
    "test_chunk_forward.py::test_many_short_sequences": 6,
    "test_chunk_forward.py::test_many_short_sequences_with_states": 6,
    "test_chunk_forward.py::test_other_architectures": 4,
    "test_chunk_forward.py::test_segments": 1,
    "test_chunk_forward.py::test_segments_change_no_bit_when_tokens_are_appended": 1,
    "test_chunk_forward.py::test_the_slowest_gates_decay": 4,
    "test_chunk_forward.py::test_unbounded_gates": 8,
    "test_chunk_forward_segments.py::test_longer_segments_behind": 1,
    "test_chunk_forward_segments.py::test_output": 8,
    "test_chunk_forward_segments.py::test_output_that_composes_start_states": 3,
    "test_chunk_forward_segments.py::test_products_overlap": 3,
    "test_chunk_forward_segments.py::test_shorter_segments_later": 1,
    "test_chunk_kept_segments.py::test_cached_calls_give_the_same_bits": 1,
    "test_chunk_kept_segments.py::test_gradients": 3,
    "test_chunk_kept_segments.py::test_output_that_finds_start_states_keeps_them": 1,
    "test_compiled.py::test_portable_kernels": 2,
    "test_compiler.py::test_other_architectures": 1,
    "test_context_parallel.py::test_other_lengths_in_the_same_program": 0,
    "test_context_parallel.py::test_pack": 0,
    "test_driver_version.py::test_doctor_says_why_not": 0,
    "test_features.py::test_it_says_what_the_verifiers_say": 8,
    "test_fuzz.py::test_processes_give_what_one_gives": 0,
    "test_jax.py::test_an_eager_grad_compiles_once": 0,
    "test_jax.py::test_grad_matches_torch_on_the_reference": 1,
    "test_jax.py::test_objects_that_stand_for_arrays": 0,
    "test_jax.py::test_vmap_and_checkpoint": 0,
    "test_jax_byte_lm.py::test_devices_learn_together_and_go_on_from_a_checkpoint": 0,
    "test_jax_partitioning.py::test_one_head_under_many_value_heads": 0,
    "test_jax_partitioning.py::test_ranks_of_shard_map": 0,
    "test_jax_partitioning.py::test_rows_and_heads_are_split": 0,
    "test_jax_ranks.py::test_slices_are_those_of_the_row": 0,
    "test_jax_slices.py::test_bits_are_those_of_torch": 1,
    "test_processes.py::test_what_is_no_tensor_after_calls_that_are_cached": 1,
    "test_program_cache.py::test_dropped_programs_leave_the_process": 0,
    "test_recurrent.py::test_any_strides": 3,
    "test_recurrent.py::test_every_mode_gives_the_same_bits": 4,
    "test_recurrent.py::test_gates_norms_and_sigmoids": 8,
    "test_recurrent.py::test_head_sizes": 6,
    "test_recurrent.py::test_later_tokens_change_no_earlier_bit": 2,
    "test_recurrent.py::test_lengths_and_layouts": 5,
    "test_recurrent.py::test_pool_in_place": 4,
    "test_roundings.py::test_errors_are_those_an_h200_recorded": 0,
    "test_roundings.py::test_gradients_of_A_log_whose_parts_nearly_cancel": 1,
    "test_servers.py::test_candidates_written_to_rows_of_their_own": 4,
    "test_servers.py::test_checkpoints_at_chosen_tokens": 5,
    "test_servers.py::test_checkpoints_change_no_other_bit_and_mind_no_later_token": 2,
    "test_servers.py::test_one_token_each": 2,
    "test_servers.py::test_pool_in_place_with_null_slots": 4,
    "test_servers.py::test_states_that_are_returned": 3,
    "test_servers.py::test_tokens_behind_a_pack": 5,
    "test_slices.py::test_against_the_oracle": 2,
    "test_slices.py::test_blocks_that_share_states_give_the_same_bits": 1,
    "test_slices.py::test_compiles_without_spills": 0,
    "test_slices.py::test_forward": 1,
    "test_slices.py::test_gates": 1,
    "test_slices.py::test_gradients": 2,
    "test_slices.py::test_longer_than_two_rings": 0,
    "test_stages.py::test_stages_in_jax": 0,
    "test_stages_recompute_hopper.py::test_it_gives_the_bits_of_the_other_kernel": 12,
    "test_tokamax_tolerance.py::test_shares_of_the_limits": 2,
    "test_torch.py::test_activation_checkpointing": 2,
    "test_torch.py::test_saved_tensors_are_unpacked_once": 2,
    "test_torch.py::test_what_no_graph_can_hold_is_named_and_called_eagerly": 2,
    "test_tpu_kept_starts.py::test_slices_of_a_row": 1,
    "test_tpu_kept_starts.py::test_split_over_devices": 0,
    "test_tpu_kept_starts.py::test_the_same_bits": 1,
    "test_tpu_kernels.py::test_forward_and_backward": 1,
    "test_tpu_kernels.py::test_hard_gates": 2,
    "test_tpu_kernels.py::test_later_tokens_change_no_bit": 0,
    "test_tpu_kernels.py::test_recurrent_on_a_pool": 3,
    "test_tpu_lowering.py::test_chunk": 3,
    "test_tpu_lowering.py::test_chunk_with_kept_start_states": 2,
    "test_tpu_lowering.py::test_ranks": 1,
    "test_tpu_partitioning.py::test_batch_and_heads": 0,
    "test_tpu_partitioning.py::test_results_may_be_split_along_their_tokens": 0,
    "test_tpu_races.py::test_chunk": 0,
    "test_tpu_server_calls.py::test_gradients_of_a_padded_pack": 0,
    "test_tpu_server_calls.py::test_recurrent": 5,
    "test_verify.py::test_several_processes_find_the_same": 0,
    "test_warp_sums.py::test_decode": 0,
    "test_xla_bitwise.py::test_later_tokens_change_no_bit": 0,
    "test_xla_bitwise.py::test_twice_gives_the_same_bits": 0,
    "test_xla_chunk.py::test_backward_without_what_the_forward_saved": 0,
    "test_xla_chunk.py::test_checkpoints": 1,
    "test_xla_chunk.py::test_forward_and_backward": 1,
    "test_xla_chunk.py::test_hard_gates": 1,
    "test_xla_chunk_forward_gpu.py::test_hard_gates": 1,
    "test_xla_chunk_forward_gpu.py::test_inside_shard_map_and_vmap": 0,
    "test_xla_chunk_forward_gpu.py::test_later_tokens_change_no_bit": 0,
    "test_xla_chunk_forward_gpu.py::test_lengths": 1,
    "test_xla_chunk_forward_gpu.py::test_options": 1,
    "test_xla_chunk_forward_threads.py::test_public_calls_use_threads": 0,
    "test_xla_chunk_forward_threads.py::test_same_as_one_program": 1,
    "test_xla_host_arrays.py::test_a_process_that_ends_right_after_a_torch_call": 0,
    "test_xla_on_tpus.py::test_gates_without_a_bound": 1,
    "test_xla_on_tpus.py::test_later_tokens_change_no_bits": 0,
    "test_xla_saved_layout.py::test_gradients_take_no_memory_that_grows_but_their_own": 0,
    "test_xla_saved_layout.py::test_saved_arrays_are_intact_until_gradients_are_written": 4,
    "test_xla_server_calls.py::test_chunk": 2,
    "test_xla_server_calls.py::test_recurrent": 7,
    "test_xla_stages.py::test_each_stage": 1,
}
# Of these the cases with JAX arrays run later too: JAX compiles each operation of the reference for itself.
LATER_WITH_JAX = {
    "test_a_pack_of_prompts_from_a_pool",
    "test_a_pool_that_is_only_written",
    "test_a_row_for_each_candidate",
    "test_batch_invariance",
    "test_gate",
    "test_gradients_of_padding_are_zero",
    "test_half_precision_loses_only_the_rounding_of_results",
    "test_in_place_pool_with_indices",
    "test_quick_suite",
    "test_stages_do_not_read_the_padding",
    "test_torch_and_jax",
}


@pytest.fixture(autouse=True)
def _configuration_of_this_test_alone() -> Iterator[None]:
    """What a test read from the variables that it set goes with them: they are put back before this fixture ends."""
    yield
    config = sys.modules.get("kdacore.config")
    if config is not None and config._config not in (None, config.parse(os.environ)):
        config.refresh()


def pytest_collection_finish() -> None:
    """What was imported lives until the end, so the garbage collector need not look through it again and again, nor
    look as often as by default at what tracing makes: that took a tenth of the time of tests with JAX."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


_MEMORY_MAPS = Path("/proc/self/maps")
_MANY_MAPS = 20_000


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Each program that XLA compiles for the CPU takes some hundred memory maps of the process, of which Linux allows
    65,530; beyond that its compiler crashes. So programs are dropped long before."""
    if "jax" not in sys.modules or not _MEMORY_MAPS.exists():
        return
    if _MEMORY_MAPS.read_bytes().count(b"\n") > _MANY_MAPS:
        sys.modules["jax"].clear_caches()
        gc.collect()


def _mark_later_cases(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        if name in FIRST_CASES:
            seen[name] += 1
            if seen[name] > FIRST_CASES[name]:
                item.add_marker(pytest.mark.exhaustive)
        elif getattr(item, "originalname", "") in LATER_WITH_JAX and "jax" in item.name:
            item.add_marker(pytest.mark.exhaustive)


def _is_slow(item: pytest.Item) -> bool:
    if item.get_closest_marker("exhaustive"):  # `-m "not slow"` replaces the option that leaves these out
        return True
    if getattr(item, "originalname", item.name) in SLOW_TESTS:
        return True
    folder, file = item.path.parent.name, item.path.name
    quick = QUICK_FILES.get(folder)
    return quick is not None and file not in quick


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the exhaustive and the slow tests, and skip those for a GPU where there is none.

    What the latter found on the hardware is in benchmarks/results.
    """
    _mark_later_cases(items)
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

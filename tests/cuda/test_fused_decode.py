"""The fused decode step of the CUDA backend, emulated, against the oracle."""

from __future__ import annotations

from decode_calls import check, decode_inputs


def test_one_token(emulated: list[str], poison: None) -> None:
    """As models are served: into the pool, with a slot for each sequence."""
    check(decode_inputs(), inplace_state=True)
    (name,) = set(emulated)
    assert name.startswith("decode-K_DIM128") and "MODE2" in name

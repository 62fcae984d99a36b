"""The byte-level language model learns, and decodes what it would have predicted in one pass."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


@pytest.mark.exhaustive
def test_it_starts_at_eight_bits_and_learns(byte_lm: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    after = byte_lm.main(["--seconds", "8", "--batch", "8", "--length", "64", "--sample", "5"])
    printed = capsys.readouterr().out
    assert "held-out before training: 8.000" in printed
    assert "chunk_kda on reference, fused_recurrent_kda on reference" in printed
    assert after < 7.5


def test_decoding_token_by_token_equals_one_pass(byte_lm: ModuleType) -> None:
    torch.manual_seed(0)
    model = byte_lm.ByteLM(width=32, layers=2, heads=2)
    torch.nn.init.normal_(model.head.weight)
    tokens = torch.randint(256, (1, 40))
    with torch.no_grad():
        whole = model(tokens)
        caches = [mixer.empty_cache() for mixer in model.mixers]
        parts = [model(tokens[:, :10], caches)]
        parts += [model(tokens[:, t : t + 1], caches) for t in range(10, 40)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_missing_the_goal_is_an_exit_status(byte_lm: ModuleType) -> None:
    with pytest.raises(SystemExit, match="wanted less than 1.0"):
        byte_lm.main(["--seconds", "0.1", "--sample", "1", "--batch", "2", "--length", "32", "--goal", "1"])

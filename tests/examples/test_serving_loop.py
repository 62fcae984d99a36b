"""The serving loop gives each request what it gets alone, whatever shares the batch with it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kdacore

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("arguments", [[], ["--requests", "5", "--slots", "7", "--drafts", "0"]])
def test_each_request_gets_what_it_gets_alone(
    serving_loop: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serving_loop.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "each request got the bytes it gets alone" in printed


@pytest.mark.parametrize("words", [["--slots", "0"], ["--requests", "0"], ["--drafts", "16"]])
def test_what_makes_no_server(
    serving_loop: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        serving_loop.main(words)
    assert done.value.code == 2
    assert "--drafts is 0 to 15" in capsys.readouterr().err


def test_a_shared_prefix_is_computed_once(serving_loop: ModuleType) -> None:
    server = serving_loop.Server(serving_loop.Model(), slots=1, drafts=1)
    server.serve([serving_loop.Request(b"x" * 130 + end, wanted=2) for end in (b"a", b"b")])
    assert server.reused == 128


@pytest.mark.parametrize("cached", [1, 3])
def test_prompts_in_pieces_in_a_pool_of_garbage(serving_loop: ModuleType, cached: int) -> None:
    """Nothing is read that was not written, row 0 never is, and a small cache gives up its oldest states."""
    model = serving_loop.Model()
    prompts = [b"p" * 250, b"q" * 70 + b"r" * 30, b"p" * 129, b"q" * 80, b"s" * 17]
    server = serving_loop.Server(model, slots=2, drafts=1, cached=cached)
    for a in (server.pool, server.windows, *server.records):
        a[...] = np.nan
    requests = [serving_loop.Request(prompt, wanted=4) for prompt in prompts]
    server.serve(requests)
    for request in requests:
        assert request.written[:4] == serving_loop.alone(model, request.prompt, 4)
    assert all(np.isnan(a[0]).all() for a in (server.pool, server.windows, *server.records))
    assert len(server.prefixes) == cached
    assert server.calls >= 5 and server.reused >= 64 * (cached > 1)


def test_right_drafts_are_kept_and_wrong_ones_leave_no_trace(serving_loop: ModuleType) -> None:
    model = serving_loop.Model()
    right = serving_loop.alone(model, b"a prompt", 12)
    for drafts in (right, [0] * 12):
        server = serving_loop.Server(model, slots=2, drafts=3)
        assert server.pool.shape[0] == 1 + 2 + 16  # one state a slot, whatever is drafted
        server.draft = lambda request, drafts=drafts: (
            drafts[len(request.written) :][:3] + [0] * (3 - len(drafts[len(request.written) :][:3]))
        )
        request = serving_loop.Request(b"a prompt", wanted=12)
        server.serve([request])
        assert request.written[:12] == right
        if drafts == right:
            assert server.kept / server.steps > 3


def test_it_decodes_with_one_op_by_records(serving_loop: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is one call of the fused op, with the records of the step before replayed."""
    steps = []
    fused = kdacore.fused_decode_kda

    def recorded(**arguments: Any) -> Any:
        steps.append(arguments["num_replayed"].copy())
        return fused(**arguments)

    server = serving_loop.Server(serving_loop.Model(), slots=2, drafts=2)
    monkeypatch.setattr(kdacore, "fused_decode_kda", recorded)
    with kdacore.record_selections() as ran:
        server.serve([serving_loop.Request(b"one", wanted=5), serving_loop.Request(b"another", wanted=9)])
    assert {s.op for s in ran} == {"chunk_kda", "fused_decode_kda"}
    assert not steps[0].any() and all(s.max() >= 1 for s in steps[1:])
    assert sum(s.op == "fused_decode_kda" for s in ran) == len(steps) >= 3

"""Verdicts on calls of a host whose lengths are new at every step: right for each, and made once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdacore.compat.call import Call
from kdacore.integrations.handover import Handover, Unread
from kdacore.integrations.hooks import Hook

H, K, LONGEST = 2, 8, 40


class Host:
    """A function of a host that is handed over up to ``LONGEST`` tokens, and how often its calls were translated."""

    def __init__(self) -> None:
        self.translated = 0

        def function(q: torch.Tensor, k: torch.Tensor, norm: bool = False, beside: Unread = None) -> Call:
            self.translated += 1
            g = beta = q[..., 0]
            arguments = {"q": q, "k": k, "v": q, "g": -g.abs(), "beta": beta, "use_qk_l2norm_in_kernel": norm}
            return Call("chunk_gated_delta_rule", arguments)

        function.__annotations__ = {"q": "Tensor", "k": "Tensor", "norm": "bool", "beside": "Unread"}
        self.handover = Handover(function, Hook("function"), lambda: True, self.why_left)

    def why_left(self, selection: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return "too long" if selection.request.T > LONGEST else ""

    def verdict(self, T: int, *, heads: int = H, **options: Any) -> Any:
        q = torch.randn(1, T, heads, K)
        return self.handover.verdict((q, q.clone()), options)


def test_each_length_has_its_own_verdict() -> None:
    host = Host()
    for T in (10, 20, 50, 30, 60, 20, 50, LONGEST, LONGEST + 1, 10) * 2:
        assert host.verdict(T) == ((True, None) if T <= LONGEST else (False, "too long"))


def test_new_lengths_are_translated_once() -> None:
    host = Host()
    for T in (10, 11):  # calls of a new kind, to be seen twice
        host.verdict(T)
    host.translated = 0
    for T in (12, 13, 50, 12, 13, 50, 14):
        host.verdict(T, beside=torch.zeros(T))
    assert host.translated == 4


def test_other_options_dtypes_and_sizes_are_judged_anew() -> None:
    host = Host()
    for T in (10, 11, 12):
        host.verdict(T)
    host.translated = 0
    host.verdict(12, norm=True)
    host.verdict(12, heads=H + 1)
    q = torch.randn(1, 12, H, K)
    assert host.handover.verdict((q.double(), q), {})[0] is False
    assert host.translated == 3
    assert host.verdict(12)[0] is True and host.translated == 3


def test_the_verdicts_are_forgotten_with_the_configuration() -> None:
    host = Host()
    for T in (10, 11, 12):
        host.verdict(T)
    host.handover.forget()
    host.translated = 0
    host.verdict(12)
    assert host.translated == 1


@pytest.mark.parametrize("wrong", [None, [1.0], "q"])
def test_what_is_no_array_is_declined(wrong: Any) -> None:
    host = Host()
    for _ in range(3):
        taken, reason = host.handover.verdict((torch.randn(1, 9, H, K), wrong), {})
        assert not taken and "k" in str(reason)

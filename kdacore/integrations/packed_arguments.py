"""Parts of arguments as serving engines hand them over: columns of packed projections, arrays longer than the batch."""

from __future__ import annotations

from torch import Tensor

from kdacore.errors import ContractError


def packed_heads(mixed_qkv: Tensor, HV: int, V: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the columns of ``mixed_qkv`` ``[B, 2*H*K + HV*V]``: q and k ``[B, 1, H, K]``, v ``[B, 1, HV, V]``.

    Raises:
        ContractError: the columns are of no whole number of key heads.
    """
    B, columns = mixed_qkv.shape
    H, rest = divmod(columns - HV * V, 2 * K)
    if rest or H < 1:
        want = f"those of {HV} value heads of {V} and key heads of {K} for q and for k"
        raise ContractError("packed_decode", "mixed_qkv", f"{columns} columns", want)
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], dim=-1)
    return q.view(B, 1, H, K), k.view(B, 1, H, K), v.view(B, 1, HV, V)


def of_each_sequence(x: Tensor, N: int) -> Tensor:
    """The first N entries of an array, which may have more."""
    return x if x.shape[0] == N else x[:N]

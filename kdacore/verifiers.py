"""Common verifiers, ready to list in :attr:`kdacore.types.OpImpl.verifiers`.

Each function here returns a verifier: a function of a :class:`~kdacore.types.Request` that returns
None, or the :class:`~kdacore.types.Reason` why the backend cannot serve it. Options and features
need no verifier: list those that are served in :attr:`kdacore.types.OpImpl.serves`.

Examples:
    >>> from kdacore import verifiers
    >>> from kdacore.types import OpImpl
    >>> checks = (verifiers.dtypes("bfloat16"), verifiers.head_dims((64, 128), equal=True))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kdacore.config import device_arch as device_arch
from kdacore.types import Reason, Request, Verifier
from kdacore.types import reads_no_lengths as reads_no_lengths


def dtypes(*allowed: str, arrays: Iterable[str] = ()) -> Verifier:
    """q, k and v (g of a gate op), and the named ``arrays`` where they are given, have one of these dtypes.

    Args:
        *allowed: canonical names, for example ``"bfloat16"``.
        arrays: further argument names, for example ``("g", "beta", "dt_bias")``.

    Reason code: ``dtype``.
    """
    names, want = tuple(arrays), " or ".join(allowed)

    @reads_no_lengths
    def verify_dtypes(request: Request) -> Reason | None:
        if request.dtype not in allowed:
            return Reason("dtype", "takes inputs of other dtypes", request.dtype, want)
        for name in names:
            if request.has(name) and (got := request.spec(name).dtype) not in allowed:
                return Reason("dtype", f"takes {name} of other dtypes", f"{name}: {got}", want)
        return None

    return verify_dtypes


def state_dtypes(*allowed: str) -> Verifier:
    """States read or returned have one of these dtypes.

    Reason code: ``state_dtype``.
    """

    @reads_no_lengths
    def verify_state_dtypes(request: Request) -> Reason | None:
        if request.state_dtype in allowed:
            return None
        return Reason(
            "state_dtype", "keeps states of other dtypes", request.state_dtype, " or ".join(allowed)
        )

    return verify_state_dtypes


def head_dims(K: Collection[int], V: Collection[int] | None = None, *, equal: bool = False) -> Verifier:
    """K and V are among these sizes.

    Args:
        K: sizes of a head of q and k: a tuple, or a range such as ``range(16, 257)``.
        V: sizes of a head of v; those of K when None.
        equal: K and V must also be equal.

    Reason code: ``head_dim``.
    """
    values = K if V is None else V
    want = f"K = V = {_sizes(K)}" if equal else f"K {_sizes(K)}, V {_sizes(values)}"

    @reads_no_lengths
    def verify_head_dims(request: Request) -> Reason | None:
        if request.K in K and request.V in values and (not equal or request.K == request.V):
            return None
        got = f"K={request.K}, V={request.V}"
        return Reason("head_dim", "has kernels for other head dims", got, want)

    return verify_head_dims


def key_dims(K: Collection[int]) -> Verifier:
    """K is among these sizes; for the ops that have no V.

    Reason code: ``head_dim``.
    """

    @reads_no_lengths
    def verify_key_dims(request: Request) -> Reason | None:
        if request.K in K:
            return None
        return Reason("head_dim", "has kernels for other head dims", f"K={request.K}", f"K {_sizes(K)}")

    return verify_key_dims


def _sizes(sizes: Collection[int]) -> str:
    if isinstance(sizes, range) and sizes.step == 1:
        return f"{sizes[0]} to {sizes[-1]}"
    return " or ".join(map(str, sizes))


def compute_capability(minimum: int) -> Verifier:
    """The device is an NVIDIA GPU of at least this architecture number, for example 80 for ``sm_80``.

    Reason code: ``hardware``.
    """

    @reads_no_lengths
    def verify_compute_capability(request: Request) -> Reason | None:
        if sm_number(request.device.arch) >= minimum:
            return None
        got = request.device.arch or "an unknown architecture"
        return Reason("hardware", "runs on other GPUs", got, f"sm_{minimum} or later")

    return verify_compute_capability


def architectures(*names: str) -> Verifier:
    """The device's architecture is one of these, for example ``"sm_90"`` (or ``"sm_90a"``) or ``"v5e"``.

    Reason code: ``hardware``.
    """
    served = tuple([device_arch(name) for name in names])

    @reads_no_lengths
    def verify_architectures(request: Request) -> Reason | None:
        if request.device.arch in served:
            return None
        got = request.device.arch or "an unknown architecture"
        return Reason("hardware", "has kernels for other architectures", got, " or ".join(served))

    return verify_architectures


def sm_number(arch: str) -> int:
    """The number of an NVIDIA architecture: 90 of ``sm_90`` and ``sm_90a``; 0 of anything else."""
    number = arch.removeprefix("sm_").rstrip("af")
    return int(number) if arch.startswith("sm_") and number.isdecimal() else 0


def grouped_heads(largest: int) -> Verifier:
    """At most this many value heads share a head of q and k.

    Reason code: ``gva``.
    """

    @reads_no_lengths
    def verify_grouped_heads(request: Request) -> Reason | None:
        if largest * request.H >= request.HV:
            return None
        got = f"H={request.H}, HV={request.HV}"
        return Reason("gva", "serves smaller groups of value heads", got, f"HV <= {largest} * H")

    return verify_grouped_heads


def bounded_gates(bound: float = -5.0) -> Verifier:
    """Every log decay is promised, or made, to lie in ``[bound, 0]``.

    Reason code: ``gate``.
    """

    @reads_no_lengths
    def verify_bounded_gates(request: Request) -> Reason | None:
        promised = request.gate == "sigmoid" or (request.gate == "log" and request.safe_gate)
        if promised and request.lower_bound is not None and request.lower_bound >= bound:
            return None
        got = f"gate {request.gate!r}, lower_bound={request.lower_bound}"
        want = f"safe_gate=True or the bounded gate, with lower_bound >= {bound:g}"
        return Reason("gate", "needs bounded log decays", got, want)

    return verify_bounded_gates


def lengths(largest: int, multiple: int = 1) -> Verifier:
    """T is at most ``largest`` and a multiple of ``multiple``.

    Reason codes: ``too_large``; ``length``.
    """

    def verify_lengths(request: Request) -> Reason | None:
        if largest < request.T:
            return Reason("too_large", "serves shorter calls", f"T={request.T}", f"T <= {largest}")
        if request.T % multiple:
            return Reason("length", "serves whole blocks", f"T={request.T}", f"a multiple of {multiple}")
        return None

    return verify_lengths

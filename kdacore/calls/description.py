"""One call described as data: sizes, dtypes, optional arrays, options, and what its numbers are drawn from.

The command line, the doctor's feature matrix, the self-check, the conformance suite and the benchmarks
all describe their calls this way. :func:`specs` has the shape and dtype of each array,
:func:`kdacore.calls.requests.request_of` the validated request, and
:func:`kdacore.calls.arrays.make_arrays` the arrays themselves.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kdacore.arrays.specs import ShapeDtype
from kdacore.calls.pools import POOLS, SPARE_ROWS
from kdacore.calls.values import Shape
from kdacore.errors import ContractError
from kdacore.ops import HOST_ARGUMENTS, INDEX_ARGUMENTS, OPS
from kdacore.ops.shapes import Axis, shape_of
from kdacore.types import ArrayKind, TensorSpec

if TYPE_CHECKING:
    from typing_extensions import Self

Options = tuple[tuple[str, Any], ...]
BiasForm = Literal["", "matrix", "flat"]
STAGE_CHUNK = 64
"""``chunk_size`` of the stage ops when a call does not say."""

_DEFAULT_SHAPE = Shape()
_STAGE_ARRAYS = frozenset({"Aqk", "Akk", "kg", "w", "u", "v_new", "h"})
_WIDE = frozenset({"A_log", "gc"})
"""Arguments in float32, or in float64 where q, k and v are."""
_LEARNED = ("q", "k", "v", "g", "beta")
"""Arguments that ask for a gradient when the call does."""


def options(**values: Any) -> Options:
    """Keyword options of the public call as a hashable, ordered tuple."""
    return tuple(sorted(values.items()))


@dataclass(frozen=True, kw_only=True)
class CallDescription:
    """One call. Sizes and options mean what they mean in :func:`kdacore.chunk_kda`."""

    op: str = "chunk_kda"
    kind: ArrayKind = "numpy"
    device: str = "cpu"
    arch: str = ""
    """Architecture of the device; only for arrays without values."""
    shape: Shape = _DEFAULT_SHAPE
    dtype: str = "float32"
    """of q, k, v; of g for the gate ops."""
    gate_dtype: str = "float32"
    beta_dtype: str = "float32"
    bias_dtype: str = "float32"
    state_dtype: str = "float32"
    index_dtype: str = "int64"
    stage_dtype: str = ""
    """of the intermediates a stage reads; that of q, k, v when empty."""
    requires_grad: bool = False
    traced: bool = False
    """JAX traces the call."""
    A_log: bool = True
    """Give ``A_log`` when the gate is computed in the kernel (the bounded gate may do without)."""
    dt_bias: BiasForm = "matrix"
    initial_state: bool = False
    q_given: bool = True
    """Give ``q`` to the stage ``kda_recompute_w_u``, which does without it too."""
    host_offsets: bool = False
    """Give ``cu_seqlens_cpu`` too."""
    pool: str = ""
    """How the state pool is used; a key of :data:`kdacore.calls.pools.POOLS`. Empty: no pool."""
    pool_rows: int = 0
    """Rows of the pool; 0 for as many as its use needs and a few to spare."""
    out: bool = False
    options: Options = ()
    """Options of the public call by name; those left out have their defaults."""
    gates: str = "random"
    """A distribution of :data:`kdacore.calls.values.GATES`."""
    collinear: bool = False
    """Neighbouring keys nearly parallel."""
    tiny_rows: bool = False
    """Rows of q and k that are zero, as padding has them, or so small that the l2norm's epsilon decides."""
    seed: int = 0

    @property
    def family(self) -> str:
        return OPS[self.op].family

    @property
    def scalar_gate(self) -> bool:
        return OPS[self.op].scalar_gate or self.shape.K == 0

    def option(self, name: str, default: Any = None) -> Any:
        """The value of one option of the public call."""
        return dict(self.options).get(name, default)

    def having(self, **changes: Any) -> Self:
        """The same with some options of the public call changed; None takes an option away."""
        merged = {**dict(self.options), **changes}
        return replace(self, options=options(**{k: v for k, v in merged.items() if v is not None}))

    def changed(self, **changes: Any) -> Self:
        """The same with fields, sizes and options changed, each by its own name."""
        fields = {n: v for n, v in changes.items() if n in _FIELDS}
        sizes = {n: v for n, v in changes.items() if n in _SIZES}
        rest = {n: v for n, v in changes.items() if n not in _FIELDS and n not in _SIZES}
        return replace(self, shape=replace(fields.pop("shape", self.shape), **sizes), **fields).having(**rest)

    @property
    def raw_gate(self) -> bool:
        """Is g a raw gate input?"""
        if self.family == "gate" or self.op == "kda_chunk_gate":
            return self.A_log or self.option("lower_bound") is not None
        return bool(self.option("use_gate_in_kernel", False))

    @property
    def raw_beta(self) -> bool:
        return bool(self.option("use_beta_sigmoid_in_kernel", False))

    @property
    def state_tail(self) -> tuple[int, int]:
        K, V = self.shape.K, self.shape.V
        return (V, K) if self.option("state_v_first", False) else (K, V)

    @property
    def chunk_size(self) -> int:
        size: int = self.option("chunk_size", STAGE_CHUNK)
        return size

    @property
    def pool_width(self) -> int:
        """Columns of two-dimensional ``state_indices``: one for each candidate token, and one to spare."""
        return max(self.shape.lengths, default=self.shape.T) + 1

    @property
    def state_rows(self) -> int:
        """Rows of ``initial_state``."""
        N = self.shape.N
        if not self.pool or POOLS[self.pool].indices == 0:
            return N
        named = N * (self.pool_width if POOLS[self.pool].indices == 2 else 1)
        return self.pool_rows or named + SPARE_ROWS

    def gives(self, argument: str) -> bool:
        """Does the call give this array, as far as its op has one?"""
        indices = POOLS[self.pool].indices if self.pool else 0
        optional = {
            "q": self.q_given or self.op != "kda_recompute_w_u",
            "A_log": self.raw_gate and self.A_log,
            "dt_bias": self.raw_gate and bool(self.dt_bias),
            "initial_state": self.initial_state or bool(self.pool),
            "cu_seqlens": bool(self.shape.lengths),
            "cu_seqlens_cpu": self.host_offsets and bool(self.shape.lengths),
            "state_indices": indices > 0,
            "num_accepted_tokens": indices == 2,
            "out": self.out,
        }
        return optional.get(argument, True)


_FIELDS = frozenset(f.name for f in dataclasses.fields(CallDescription))
_SIZES = frozenset(f.name for f in dataclasses.fields(Shape))
OPTIONAL_ARRAYS = ("A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu", "state_indices",
                   "num_accepted_tokens", "out")  # fmt: skip
"""Arrays that the whole ops do without."""


def specs(call: CallDescription) -> dict[str, TensorSpec]:
    """Shape and dtype of every array argument that the call gives, by name."""
    sizes = _sizes(call)
    found = {}
    for name in OPS[call.op].arrays:
        if call.gives(name):
            shape = shape_of(name, sizes)
            if name == "dt_bias" and call.dt_bias == "flat":
                shape = (math.prod(shape),)
            found[name] = TensorSpec(shape, _dtype(call, name))
    return found


def _sizes(call: CallDescription) -> dict[Axis, tuple[int, ...]]:
    s, C = call.shape, call.chunk_size
    two = bool(call.pool) and POOLS[call.pool].indices == 2
    return {
        "B": (s.B,),
        "T": (s.T,),
        "H": (s.H,),
        "HV": (s.HV,),
        "K": (s.K,),
        "V": (s.V,),
        "N": (s.N,),
        "C": (C,),
        "gate": () if call.scalar_gate else (s.K,),
        "state": call.state_tail,
        "rows": (call.state_rows,),
        "slots": (call.pool_width,) if two else (),
        "chunks": (s.T // C + s.N if s.lengths else -(-s.T // C),),
        "offsets": (s.N + 1,),
    }


def _dtype(call: CallDescription, name: str) -> str:
    if name in INDEX_ARGUMENTS:
        return call.index_dtype
    if name in _WIDE:
        return "float64" if call.dtype == "float64" else "float32"
    if name in _STAGE_ARRAYS:
        return call.stage_dtype or call.dtype
    own = {"beta": call.beta_dtype, "dt_bias": call.bias_dtype, "initial_state": call.state_dtype}
    if name == "g" and call.family in ("chunk", "recurrent"):
        return call.gate_dtype
    return own.get(name, call.dtype)


def shape_dtypes(call: CallDescription) -> dict[str, ShapeDtype]:
    """The arrays of the call without their values."""
    return {
        name: ShapeDtype(
            spec.shape,
            spec.dtype,
            "cpu" if name in HOST_ARGUMENTS else call.device,
            call.kind,
            call.arch,
            call.requires_grad and name in _LEARNED,
        )
        for name, spec in specs(call).items()
    }


def arguments(call: CallDescription) -> dict[str, Any]:
    """The keyword arguments of the call, with :class:`~kdacore.ShapeDtype` in place of arrays.

    Raises:
        ContractError: the call asks for something that its op has no argument for.
    """
    refuse_unknown(call)
    return {**shape_dtypes(call), **dict(call.options)}


def refuse_unknown(call: CallDescription) -> None:
    """Raises ContractError when the op has no argument for something that the call asks for."""
    opdef = OPS[call.op]
    asked = {name: repr(value) for name, value in call.options if name not in opdef.options}
    for name in OPTIONAL_ARRAYS:
        if name not in opdef.arrays and name not in ("A_log", "dt_bias") and call.gives(name):
            asked[name] = "given"
    for name, value in asked.items():
        raise ContractError(call.op, name, value, "nothing: the op has no such argument")

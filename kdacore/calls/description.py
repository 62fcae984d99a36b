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
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from kdacore.arrays.specs import ShapeDtype
from kdacore.calls.pools import POOLS, SPARE_ROWS, Pool, checkpoints_of
from kdacore.calls.values import Shape
from kdacore.errors import ContractError
from kdacore.ops import HOST_ARGUMENTS, INDEX_ARGUMENTS, MASK_ARGUMENTS, OPS
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
_WIDE = frozenset({"A_log", "gc", "record_update", "record_key", "record_decay"})
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
    conv_state_given: bool = False
    """``commit_records``: give ``conv_state`` too."""
    one_decay: bool = False
    """``commit_records``: the records have one decay for each head."""
    conv_width: int = 4
    """Fused decode ops: taps of the convolution; 0 for x that comes convolved."""
    conv_bias: bool = False
    conv_indices: bool = False
    """Give ``conv_indices``."""
    conv_windows: bool = False
    """Give ``conv_windows``, where the call keeps windows of candidates."""
    z: bool = False
    norm: Literal["", "vector", "heads"] = ""
    """Fused decode ops: ``norm_weight`` for all heads, or for each."""
    weight_dtype: str = "float32"
    """of the weights of the convolution and the norm."""
    q_given: bool = True
    """Give ``q`` to the stage ``kda_recompute_w_u``, which does without it too."""
    host_offsets: bool = False
    """Give ``cu_seqlens_cpu`` too."""
    pool: str | Pool = ""
    """How pools of states are used: a :class:`~kdacore.calls.pools.Pool`, or a key of
    :data:`kdacore.calls.pools.POOLS`. Empty: no pool, or ``records`` where an op is about nothing else."""
    pool_rows: int = 0
    """Rows of the pool that is read; 0 for as many as its use needs and a few to spare."""
    write_pool_rows: int = 0
    """Rows of ``write_pool``; 0 for as many as its use needs and a few to spare."""
    checkpoint_count: int = 0
    """Checkpoints at chosen tokens; 0 for as many as there are in the tables of the pool."""
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
        return OPS[self.op].scalar_gate or self.shape.K == 0 or self.one_decay

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
    def pool_use(self) -> Pool | None:
        """How pools are used; None where none is."""
        if isinstance(self.pool, str):
            name = self.pool or _POOL_OF_FAMILY.get(self.family, "")
            return POOLS[name] if name else None
        return self.pool

    @property
    def checkpoints(self) -> int:
        """Length of ``checkpoint_offsets``."""
        return self.checkpoint_count or checkpoints_of(self.shape.N)

    @property
    def state_rows(self) -> int:
        """Rows of ``initial_state``."""
        pool = self.pool_use
        if pool is None or pool.indices == 0:
            return self.shape.N
        named = self._rows(pool.indices) + (0 if pool.separate else self._written_rows)
        return self.pool_rows or named + SPARE_ROWS + pool.null

    @property
    def write_rows(self) -> int:
        """Rows of ``write_pool``."""
        pool = self.pool_use
        first = self.state_rows if pool is not None and not pool.writes else 0
        return self.write_pool_rows or first + self._written_rows + SPARE_ROWS + bool(pool and pool.null)

    @property
    def record_rows(self) -> int:
        """Rows of the records of candidates; each has :attr:`pool_width` of them."""
        pool = self.pool_use
        return self.shape.N + SPARE_ROWS + bool(pool and pool.null)

    @property
    def keeps_windows(self) -> bool:
        """Does the call leave windows of candidates: does it write a state after each, or records?"""
        pool = self.pool_use
        if pool is None or not pool.inplace or not self.conv_width:
            return False
        return pool.records or (pool.writes or pool.indices) == 2

    @property
    def conv_rows(self) -> int:
        """Rows of ``conv_state``."""
        pool = self.pool_use
        spare = SPARE_ROWS + bool(pool and pool.null)
        return self.shape.N + spare if self.conv_indices else self.state_rows

    def _rows(self, dimensions: int) -> int:
        """Rows named by a table of so many dimensions."""
        return self.shape.N * (0, 1, self.pool_width)[dimensions]

    @property
    def _written_rows(self) -> int:
        """Rows that are written and that ``state_indices`` does not name."""
        pool = self.pool_use
        if pool is None:
            return 0
        return self._rows(pool.writes) + (self.checkpoints if pool.checkpoints else 0)

    def gives(self, argument: str) -> bool:
        """Does the call give this array, as far as its op has one?"""
        return self._optional.get(argument, True)

    @cached_property
    def _optional(self) -> dict[str, bool]:
        """Of the arrays that some call does without: is it given?"""
        pool = self.pool_use
        used = pool or Pool(indices=0, reads=False)
        conv = self.conv_width > 0 and (self.family != "commit" or self.conv_state_given)
        return {
            "q": self.q_given or self.op != "kda_recompute_w_u",
            "A_log": self.raw_gate and self.A_log,
            "dt_bias": self.raw_gate and bool(self.dt_bias),
            "initial_state": (self.initial_state or self.family == "decode") if pool is None else pool.reads,
            "cu_seqlens": bool(self.shape.lengths),
            "cu_seqlens_cpu": self.host_offsets and bool(self.shape.lengths),
            "state_indices": used.indices > 0,
            "num_accepted_tokens": used.indices == 2,
            "has_initial_state": used.has_state,
            "write_indices": used.writes > 0,
            "write_pool": used.separate,
            "checkpoint_offsets": used.checkpoints,
            "checkpoint_indices": used.checkpoints,
            **dict.fromkeys(_RECORDS, used.records),
            "conv_weight": conv,
            "conv_bias": conv and self.conv_bias,
            "conv_state": conv,
            "conv_indices": conv and self.conv_indices,
            "conv_windows": conv and self.conv_windows and self.keeps_windows,
            "z": self.z,
            "norm_weight": bool(self.norm),
            "out": self.out,
        }


_FIELDS = frozenset(f.name for f in dataclasses.fields(CallDescription))
_SIZES = frozenset(f.name for f in dataclasses.fields(Shape))
_POOL_OF_FAMILY = {"commit": "records"}
_RECORDS = ("record_update", "record_key", "record_decay", "record_indices", "num_replayed")
OPTIONAL_ARRAYS = ("A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu", "state_indices",
                   "num_accepted_tokens", "has_initial_state", "write_indices", "write_pool",
                   "checkpoint_offsets", "checkpoint_indices", *_RECORDS, "out", "conv_indices", "conv_windows",
                   "z", "norm_weight")  # fmt: skip
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
    pool = call.pool_use or Pool()
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
        "slots": (call.pool_width,) if pool.indices == 2 else (),
        "write_slots": (call.pool_width,) if pool.writes == 2 else (),
        "write_rows": (call.write_rows,),
        "checkpoints": (call.checkpoints,),
        "record_rows": (call.record_rows,),
        "records": (call.pool_width,),
        "channels": (2 * s.H * s.K + s.HV * s.V,),
        "taps": (call.conv_width,),
        "history": (call.conv_width - 1,),
        "conv_rows": (call.conv_rows,),
        "conv_columns": (max(call.conv_width, call.conv_width + call.pool_width - 2),),
        "window_rows": (call.record_rows,),
        "windows": (call.pool_width,),
        "norm_heads": (s.HV,) if call.norm == "heads" else (),
        "chunks": (s.T // C + s.N if s.lengths else -(-s.T // C),),
        "offsets": (s.N + 1,),
    }


def _dtype(call: CallDescription, name: str) -> str:
    if name in INDEX_ARGUMENTS:
        return call.index_dtype
    if name in MASK_ARGUMENTS:
        return "bool"
    if name in _WIDE:
        return "float64" if call.dtype == "float64" else "float32"
    if name in _STAGE_ARRAYS:
        return call.stage_dtype or call.dtype
    own = {
        "beta": call.beta_dtype,
        "dt_bias": call.bias_dtype,
        "initial_state": call.state_dtype,
        "write_pool": call.state_dtype,
        **dict.fromkeys(("conv_weight", "conv_bias", "norm_weight"), call.weight_dtype),
    }
    if name == "g" and call.family in ("chunk", "recurrent", "decode"):
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

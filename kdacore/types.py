"""The frozen vocabulary the front end and the backends share. No kernels, no frameworks.

A call becomes a :class:`Request` (shapes, dtypes, flags; never values) plus one of the ``*Inputs`` tuples
(the caller's own arrays). A backend is data plus functions: a :class:`Backend` holding one :class:`OpImpl`
for each op it implements.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

API_VERSION = 2
"""Version of the plugin interface in this file. A backend declares the one it was written for."""

Array = Any
"""A NumPy array, torch.Tensor or jax.Array; one call uses one kind."""

ArrayKind = Literal["numpy", "torch", "jax"]
Gate = Literal["log", "softplus", "sigmoid"]
"""How ``g`` becomes a log decay: given as such; ``-exp(A_log) softplus(x)``; ``lower_bound sigmoid(exp(A_log) x)``."""


# --- data that no code can change: what one plugin is handed, others see too ---------------------------------------

_T = TypeVar("_T")


def sealed(cls: type[_T]) -> type[_T]:
    """Decorates a frozen dataclass (without ``slots``, whose fields have no default factories).

    Such a class refuses ``x.field = value`` only, not ``object.__setattr__``. Here the fields become those of a tuple,
    which has no memory that Python code could write. The class keeps its fields, defaults, methods and name.
    ``dataclasses.replace``, ``fields`` and ``asdict``, copying and pickling work as before, and instances of different
    classes are never equal.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [f.name for f in fields]
    defaults = [f.default for f in fields if f.default is not dataclasses.MISSING]
    storage: Any = collections.namedtuple(cls.__name__, names, defaults=defaults, module=cls.__module__)  # type: ignore[misc]
    members = {name: value for name, value in vars(cls).items() if name not in (*_OF_DATACLASS, *names)}
    members |= {"__slots__": (), "__eq__": _equals, "__ne__": _differs, "__hash__": tuple.__hash__}
    bases = tuple(base for base in cls.__bases__ if base is not object)
    made: type[_T] = type(cls.__name__, (storage, *bases), members)
    return made


_OF_DATACLASS = (
    "__dict__",
    "__weakref__",
    "__init__",
    "__repr__",
    "__eq__",
    "__hash__",
    "__setattr__",
    "__delattr__",
)
"""Members of a dataclass that hold or write its fields, or that a tuple has in a form of its own."""


def _equals(self: Any, other: object) -> bool:
    return type(self) is type(other) and _tuple_equals(self, other)


def _differs(self: Any, other: object) -> bool:
    return not _equals(self, other)


_tuple_equals: Any = tuple.__eq__


# --- calls --------------------------------------------------------------------------------------------------------


@sealed
@dataclass(frozen=True)
class TensorSpec:
    """Shape and canonical dtype name (``"float32"``, ``"bfloat16"``, ``"int64"``, ...) of one array."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@sealed
@dataclass(frozen=True)
class Device:
    """Where the arrays live. ``type``: ``cpu``, ``cuda``, ``rocm``, ``tpu``, ``meta``, ...

    ``arch`` is the architecture kernels are built for (``sm_90``, ``gfx942``, ``v5e``), ``""`` for a CPU.
    """

    type: str
    index: int = 0
    arch: str = ""

    def __str__(self) -> str:
        name = self.type if self.type == "cpu" else f"{self.type}:{self.index}"
        return f"{name} ({self.arch})" if self.arch else name


@sealed
@dataclass(frozen=True)
class Request:
    """One validated call without its values: what a verifier sees, and the key selections are cached on.

    Every field is hashable and nothing here reads tensor contents. Sizes follow the contract:
    ``B`` batch, ``T`` tokens (of the whole pack when packed), ``H`` query/key heads, ``HV`` value heads,
    ``K`` and ``V`` head dims, ``N`` sequences (``B`` unless packed).
    """

    op: str
    kind: ArrayKind
    device: Device
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    dtype: str
    """dtype of q, k, v; of x for the fused decode ops, of g for ``kda_gate`` and ``kda_chunk_gate``."""
    state_dtype: str
    """dtype of every state this call reads or returns: ``float32``, ``bfloat16``, ``float16``, or ``float64`` for
    float64 inputs."""
    tensors: tuple[tuple[str, TensorSpec], ...] = ()
    """Every array argument that was given, by name."""
    traced: bool = False
    """True inside ``jax.jit`` and friends, and for torch fake tensors: values do not exist."""
    needs_grad: bool = False
    scalar_gate: bool = False
    """Gated delta rule: ``g`` is ``[B, T, HV]`` (one decay per head), ``dt_bias`` is ``[HV]``."""
    gate: Gate = "log"
    lower_bound: float | None = None
    safe_gate: bool = False
    scale: float = 1.0
    qk_l2norm: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    state_v_first: bool = False
    output_final_state: bool = False
    packed: bool = False
    """``cu_seqlens`` was given."""
    disable_recompute: bool = False
    checkpoint_every: int = 0
    """0 when checkpoints were not asked for."""
    pool_size: int = 0
    """Rows of the state pool; 0 when ``state_indices`` was not given."""
    state_indices_ndim: int = 0
    null_index: int = -1
    """A row number that names no slot, besides the negative ones; -1 when there is none."""
    write_indices_ndim: int = 0
    """Dimensions of ``write_indices``; 0 when it was not given: states are then written to the rows read."""
    write_pool_size: int = 0
    """Rows of ``write_pool``; 0 when it was not given: states are then written to the pool read."""
    checkpoint_count: int = 0
    """Length of ``checkpoint_offsets``; 0 when it was not given."""
    inplace_state: bool = False
    read_only_state: bool = False
    norm_eps: float = 0.0
    """Fused decode ops: what the norm of the output adds to the mean square; 0 without ``norm_weight``."""
    norm_activation: str = ""
    """Fused decode ops: ``sigmoid`` or ``silu`` of ``z``; empty without."""
    chunk_size: int = 64
    """Stage ops only."""
    batch_invariant: bool = False
    """A sequence must give the same bits alone, in a batch and in a pack: nothing that its results depend on may be
    chosen by the number of sequences or the tokens of others."""
    features: frozenset[str] = frozenset()
    """Names of the features this call uses; dispatch compares them with :attr:`OpImpl.serves`."""
    options: tuple[tuple[str, Any], ...] = ()
    """Options that have no field above and differ from their defaults, by public name."""

    def option(self, name: str, default: Any = None) -> Any:
        """The value of an option that has no field of its own; ``default`` where it was left at its default."""
        return dict(self.options).get(name, default)

    def has(self, name: str) -> bool:
        """Was this array argument given?"""
        return name in [given for given, _ in self.tensors]

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a given array argument. KeyError when it was not given."""
        for n, s in self.tensors:
            if n == name:
                return s
        raise KeyError(name)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of ``final_state``: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with ``state_v_first``."""
        return (self.N, self.HV, *self.state_tail)

    @property
    def state_tail(self) -> tuple[int, int]:
        """``(K, V)``, or ``(V, K)`` with ``state_v_first``."""
        return (self.V, self.K) if self.state_v_first else (self.K, self.V)

    @property
    def written_pool(self) -> str:
        """The array that ``inplace_state`` writes states into."""
        return "write_pool" if self.write_pool_size else "initial_state"

    @property
    def written_indices(self) -> str:
        """The array with the rows that ``inplace_state`` writes; ``""`` where sequence n writes row n."""
        if self.write_indices_ndim:
            return "write_indices"
        return "state_indices" if self.state_indices_ndim else ""

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoints: ``[B, ceil(T / every), HV, K, V]`` (last two swapped with ``state_v_first``).

        Packed: ``[T // every + N, HV, K, V]``, the sequences' blocks one after another and the unused rows
        at the end zero; the bound depends on shapes alone, so nothing is read from the device.
        """
        every = self.checkpoint_every
        if self.packed:
            return (self.T // every + self.N, self.HV, *self.state_tail)
        return (self.B, -(-self.T // every), self.HV, *self.state_tail)

    @property
    def num_chunks(self) -> int:
        """``NT`` of the stage ops: ``ceil(T / C)``, or the bound ``T // C + N`` when packed."""
        return self.T // self.chunk_size + self.N if self.packed else -(-self.T // self.chunk_size)


# --- calls that differ in lengths alone ---------------------------------------------------------------------------

_LENGTHS = ("B", "T", "N", "pool_size", "write_pool_size", "checkpoint_count")
LENGTH_FIELDS: tuple[int, ...] = tuple([Request._fields.index(name) for name in _LENGTHS])  # type: ignore[attr-defined]
"""The places of the fields of a request that are lengths; ``tensors`` has the same in the shapes."""
TENSORS_FIELD: int = Request._fields.index("tensors")  # type: ignore[attr-defined]
_TABLES = frozenset({"state_indices", "write_indices"})
"""Arrays whose second axis, where they have one, is a length of its own."""
_WHOLE = frozenset(
    {
        "record_update",
        "record_key",
        "record_decay",
        "conv_weight",
        "conv_state",
        "conv_windows",
        "norm_weight",
    }
)
"""Arrays with sizes that are neither lengths nor fields of a request."""


def lengths_of(request: Request) -> Hashable:
    """All that tells a request from others of its family. The shapes of its arrays follow from this."""
    r = request
    found = r.B, r.T, r.N, r.pool_size, r.write_pool_size, r.checkpoint_count
    if r.state_indices_ndim < 2 and r.write_indices_ndim < 2:
        return found
    tables = [spec.shape for name, spec in r.tensors if name in _TABLES]
    return found, *[shape[1] for shape in tables if len(shape) == 2]


class Family:
    """The calls that differ in lengths alone. Compared by identity: equal families are one object."""

    __slots__ = ()


_MAX_FAMILIES, _MAX_REQUESTS = 1024, 8192
_families: dict[Hashable, Family] = {}
_family_of: dict[int, tuple[Request, Family]] = {}
"""By the identity of a request: making and hashing its key takes longer than many a launch."""


def family_of(request: Request) -> Family:
    """The family of a request: the same object for requests that differ in lengths alone.

    A server's calls have other lengths at every step, and most of what a backend works out for a call does not depend
    on those. It may keep that by family, in a dictionary with a limit. Lengths are those that
    :func:`reads_no_lengths` names. Heads, head dims, dtypes, options and the device are the family's.

    Examples:
        >>> from kdacore.types import Device, Request, family_of
        >>> def request(T):
        ...     return Request("chunk_kda", "numpy", Device("cpu"), 1, T, 2, 2, 64, 64, 1, "float32", "float32")
        >>> family_of(request(T=5)) is family_of(request(T=7))
        True
    """
    known = _family_of.get(id(request))
    if known is not None and known[0] is request:
        return known[1]
    fields: list[Any] = list(request)  # type: ignore[call-overload]
    for i in LENGTH_FIELDS:
        fields[i] = 0
    # Sizes of arrays that are none (heads, head dims) are fields, too.
    fields[TENSORS_FIELD] = tuple(
        [
            (name, spec.dtype, spec.shape if name in _WHOLE else len(spec.shape))
            for name, spec in request.tensors
        ]
    )
    if len(_families) >= _MAX_FAMILIES:
        _families.clear()
    family = _families.setdefault(tuple(fields), Family())
    note_family(request, family)
    return family


def note_family(request: Request, family: Family) -> None:
    """Make it known that a request, made from another one's, is of the same family."""
    if len(_family_of) >= _MAX_REQUESTS:
        _family_of.clear()
    _family_of[id(request)] = request, family


# --- what an op receives: the caller's arrays, absent ones None -------------------------------------------------


class ChunkInputs(NamedTuple):
    """Arrays of ``chunk_kda`` and ``chunk_gated_delta_rule``."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    A_log: Array | None = None
    dt_bias: Array | None = None
    initial_state: Array | None = None
    cu_seqlens: Array | None = None
    cu_seqlens_cpu: Array | None = None
    state_indices: Array | None = None
    has_initial_state: Array | None = None
    write_indices: Array | None = None
    write_pool: Array | None = None
    checkpoint_offsets: Array | None = None
    checkpoint_indices: Array | None = None
    out: Array | None = None


class RecurrentInputs(NamedTuple):
    """Arrays of ``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule``."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    A_log: Array | None = None
    dt_bias: Array | None = None
    initial_state: Array | None = None
    cu_seqlens: Array | None = None
    cu_seqlens_cpu: Array | None = None
    state_indices: Array | None = None
    num_accepted_tokens: Array | None = None
    out: Array | None = None
    has_initial_state: Array | None = None
    write_indices: Array | None = None
    write_pool: Array | None = None
    record_update: Array | None = None
    record_key: Array | None = None
    record_decay: Array | None = None
    record_indices: Array | None = None
    num_replayed: Array | None = None


class DecodeInputs(NamedTuple):
    """Arrays of ``fused_decode_kda`` and ``fused_decode_gated_delta_rule``."""

    x: Array
    g: Array
    beta: Array
    initial_state: Array
    A_log: Array | None = None
    dt_bias: Array | None = None
    conv_weight: Array | None = None
    conv_bias: Array | None = None
    conv_state: Array | None = None
    conv_indices: Array | None = None
    conv_windows: Array | None = None
    z: Array | None = None
    norm_weight: Array | None = None
    cu_seqlens: Array | None = None
    cu_seqlens_cpu: Array | None = None
    state_indices: Array | None = None
    num_accepted_tokens: Array | None = None
    out: Array | None = None
    has_initial_state: Array | None = None
    write_indices: Array | None = None
    write_pool: Array | None = None
    record_update: Array | None = None
    record_key: Array | None = None
    record_decay: Array | None = None
    record_indices: Array | None = None
    num_replayed: Array | None = None


class CommitInputs(NamedTuple):
    """Arrays of ``commit_records``."""

    initial_state: Array
    state_indices: Array
    record_update: Array
    record_key: Array
    record_decay: Array
    record_indices: Array
    num_replayed: Array
    write_indices: Array | None = None
    conv_state: Array | None = None
    conv_indices: Array | None = None
    conv_windows: Array | None = None


class GateInputs(NamedTuple):
    """Arrays of ``kda_gate``."""

    g: Array
    A_log: Array | None = None
    dt_bias: Array | None = None


class ChunkGateInputs(NamedTuple):
    """Arrays of the stage ``kda_chunk_gate``."""

    g: Array
    A_log: Array | None = None
    dt_bias: Array | None = None
    cu_seqlens: Array | None = None
    cu_seqlens_cpu: Array | None = None


class IntraInputs(NamedTuple):
    """Arrays of the stage ``kda_chunk_intra``."""

    q: Array
    k: Array
    gc: Array
    beta: Array
    cu_seqlens: Array | None = None
    cu_seqlens_cpu: Array | None = None


class RecomputeInputs(NamedTuple):
    """Arrays of the stage ``kda_recompute_w_u``."""

    k: Array
    v: Array
    beta: Array
    gc: Array
    Akk: Array
    q: Array | None = None
    cu_seqlens: Array | None = None
    cu_seqlens_cpu: Array | None = None


class ChunkStateInputs(NamedTuple):
    """Arrays of the stage ``delta_rule_chunk_state``."""

    kg: Array
    w: Array
    u: Array
    gc: Array
    initial_state: Array | None = None
    cu_seqlens: Array | None = None
    cu_seqlens_cpu: Array | None = None


class ChunkOutputInputs(NamedTuple):
    """Arrays of the stage ``kda_chunk_output``."""

    q: Array
    v_new: Array
    gc: Array
    Aqk: Array
    h: Array
    cu_seqlens: Array | None = None
    cu_seqlens_cpu: Array | None = None


# --- what an op returns ----------------------------------------------------------------------------------------


class Outputs(NamedTuple):
    """What ``forward`` returns for the four whole ops.

    ``final_state`` exactly when ``request.output_final_state``; ``checkpoints`` exactly when
    ``request.checkpoint_every``. ``saved`` is handed to ``backward`` unchanged (eager calls only; a backward
    must also work from ``()`` by recomputing, which is what compiled graphs pass).
    """

    o: Array
    final_state: Array | None = None
    checkpoints: Array | None = None
    saved: tuple[Array, ...] = ()
    written: tuple[Array, ...] = ()
    """Of JAX arrays, which cannot be written: the new ones in place of all that the call writes beside the pool, in the
    order of the op's inputs. Of others nothing."""


class CommitOutputs(NamedTuple):
    """What ``forward`` of ``commit_records`` returns: the arrays that were written, or for JAX new ones."""

    pool: Array
    conv_state: Array | None = None


class OutputGrads(NamedTuple):
    """Gradients reaching ``backward``; None where nothing flowed. Checkpoints are not differentiable."""

    o: Array | None
    final_state: Array | None = None


class InputGrads(NamedTuple):
    """What ``backward`` returns: each shaped and typed like its input, None where the input is None."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    A_log: Array | None = None
    dt_bias: Array | None = None
    initial_state: Array | None = None


class GateGrads(NamedTuple):
    """What the backward of ``kda_gate`` returns."""

    g: Array
    A_log: Array | None = None
    dt_bias: Array | None = None


class IntraOutputs(NamedTuple):
    Aqk: Array
    Akk: Array


class RecomputeOutputs(NamedTuple):
    w: Array
    u: Array
    kg: Array
    qg: Array | None = None


class ChunkStateOutputs(NamedTuple):
    h: Array
    v_new: Array
    final_state: Array


# --- verifiers and backends ------------------------------------------------------------------------------------


@sealed
@dataclass(frozen=True)
class Reason:
    """Why a backend cannot serve a call. ``code`` is stable and documented in docs/guide/writing-a-backend.md."""

    code: str
    message: str
    got: str = ""
    want: str = ""

    def __str__(self) -> str:
        named = (("got", self.got), ("wanted", self.want))
        detail = "; ".join([f"{word} {said}" for word, said in named if said and said not in self.message])
        return f"[{self.code}] {self.message}" + (f" ({detail})" if detail else "")


Verifier = Callable[[Request], "Reason | None"]
"""Reads a Request, allocates nothing, never syncs; returns None when it has no objection."""
_V = TypeVar("_V", bound=Callable[..., Any])


def reads_no_lengths(verifier: _V) -> _V:
    """Declares of a verifier that its answer does not depend on lengths, so that it is asked less often.

    Calls of a server differ from step to step in their tokens and sequences. A verifier with this mark is asked once
    for all calls that differ in nothing else; one without it at each of them. Its answer may depend on everything in
    the request but ``B``, ``T``, ``N``, ``pool_size``, ``write_pool_size`` and ``checkpoint_count``, what is computed
    of these, and the same sizes in the shapes of arrays; and on nothing that changes while the process runs.

    Args:
        verifier: a function written with ``def``.

    Examples:
        >>> from kdacore import verifiers
        >>> from kdacore.types import Reason
        >>> @verifiers.reads_no_lengths
        ... def even_heads(request):
        ...     if request.H % 2:
        ...         return Reason("heads", "serves pairs of heads", f"H={request.H}", "an even number")
    """
    vars(verifier)["reads_no_lengths"] = True
    return verifier


Forward = Callable[..., Any]
"""``forward(request, inputs) -> Outputs`` (or the array of ``kda_gate``, or a stage's outputs)."""

Backward = Callable[..., Any]
"""``backward(request, inputs, saved, grads: OutputGrads) -> InputGrads``.

For ``kda_gate``: ``backward(request, inputs, dlog) -> GateGrads``.
"""

Cost = Callable[[Request], "float | None"]
"""Predicted seconds for this request, not negative; None when unknown."""

FastCall = Callable[[tuple[Any, ...]], "tuple[Any, ...] | None"]
"""A call that was made before, with other values: arrays in the order of the op's inputs to results in the order of its
outputs, without ``saved``. None, with nothing done, sends the call through ``forward``."""


class FastGradients(NamedTuple):
    """A call that needs gradients and was made before, with other values."""

    forward: Callable[[tuple[Any, ...]], tuple[Any, ...] | None]
    """As a :data:`FastCall`; behind the three results follow the arrays that ``forward`` would leave in
    ``Outputs.saved``, if any."""
    backward: Callable[[tuple[Any, ...], tuple[Any, ...], Any, Any], tuple[Any, ...] | None]
    """``backward(arrays, saved, do, dstate)``: the call's arrays, what was saved, and gradients of ``o`` and of
    ``final_state`` (either may be None, and have any strides), to gradients in the order of :class:`InputGrads`, None
    where none is wanted. None, with nothing done, sends it through the op's ``backward``."""


class SliceForward(NamedTuple):
    """What ``begin`` of :class:`SliceFunctions` returns. ``G`` is ``B``; 1 of a pack."""

    M: Array
    """``[G, HV, K, K]`` float32: the transition of the leaving part of each row, ``S_end = M @ S_start + C``, on states
    ``S [K, V]`` whatever ``state_v_first`` says."""
    C: Array
    """``[G, HV, K, V]`` float32: the state that the leaving part ends in from a start of zeros."""
    pending: Any = None
    """The backend's own, handed to ``finish``: workspaces, prepared operands."""


class SliceFunctions(NamedTuple):
    """A call of the chunk ops on one slice of a row that continues on other ranks, cut where ranks exchange states.

    ``request`` is the slice's own call: the local rows; packed, all N sequences of the whole row with local offsets, of
    which many are empty and the last may end before T. Its states are K-first and float32 (float64 of float64 inputs),
    it has an ``initial_state``, and neither pools nor ``out``; ``inputs.initial_state`` is None, since starts are given
    apart. ``output_final_state`` and ``checkpoint_every`` are the caller's.

    The *leaving* part of a row is that of the sequence that holds the last local token; the *entering* part, of the one
    that holds the first. Both may be one. Packed, either is given as its sequence's number, an int32 array ``[1]`` on
    the device (never read on the host); dense, None: every row is one part, leaving and entering. Where a rank has no
    such part (padding), the number is that of some sequence, and what is returned for it is not used.

    All indices and states stay on the device: nothing may synchronise with the host. No function sees other ranks.
    """

    begin: Callable[[Request, Any, Any], SliceForward]
    """``begin(request, inputs, leaving)``: the map of the leaving part. M of an empty part is the identity, C zero."""
    finish: Callable[[Request, Any, Any, Any], Outputs]
    """``finish(request, inputs, pending, starts)``: the results, from ``starts [N, HV, K, V]``, the state that each
    sequence's local part starts from. ``Outputs.saved`` is handed to the two below."""
    backward_begin: Callable[[Request, Any, tuple[Array, ...], OutputGrads, Any, Any], tuple[Array, Any]]
    """``backward_begin(request, inputs, saved, grads, starts, entering)``: the gradient ``[G, HV, K, V]`` with respect
    to the state at the start of the entering part, as far as it comes from this slice, and something pending.
    ``grads.final_state [N, HV, K, V]`` (or None) is zero for sequences that do not end here. ``saved`` may be ``()``,
    as for every backward."""
    backward_finish: Callable[[Request, Any, tuple[Array, ...], Any, OutputGrads, Any, Any], InputGrads]
    """``backward_finish(request, inputs, saved, pending, grads, starts, ends)``: the gradients, with
    ``ends [N, HV, K, V]`` (in place of ``grads.final_state``) the gradient of the state that each local part ends in.
    ``InputGrads.initial_state`` is that of ``starts``."""
    seconds: float | None = None
    """Predicted seconds of the slice's work: of the first two, and of all four where the request needs gradients. None
    where unknown."""
    form: Callable[[Request], str] | None = None
    """As :attr:`OpImpl.form`, of the slice."""


@dataclass(frozen=True, slots=True)
class OpImpl:
    """One op of one backend."""

    forward: Forward
    backward: Backward | None = None
    serves: frozenset[str] = frozenset()
    """Features this implementation serves beyond the plain call: ``packed``, ``initial_state``, ``gate.bounded``, ...
    The page for authors lists them. A call that uses a feature not listed here is declined by the front end with reason
    code ``option``; so is one that uses an option that did not exist when the backend was written."""
    verifiers: tuple[Verifier, ...] = ()
    """What else has to hold: shapes, hardware, dtype pairs, memory. :mod:`kdacore.verifiers` has the common ones."""
    cost: Cost | None = None
    """``cost(request)``: predicted seconds of one call on ``request.device``, or None where it cannot say. Reads what a
    verifier may read, and is asked at every new length, so it is to take microseconds. Without it the cost tables of
    ``kdacore tune`` count."""
    verified_archs: frozenset[str] = frozenset()
    """Architectures this op's tests have run on for real; ``"*"`` for portable code. Others are *compiled only*."""
    batch_invariant: bool = False
    """Declared: a sequence gives the same bits, of results and gradients, alone, in a batch and in a pack whenever
    :attr:`Request.batch_invariant` asks for it. Other implementations are declined then, reason code
    ``batch_invariance``."""
    compiles: bool = False
    """Declared, JAX only: ``forward`` compiles what it runs, so an eager call's concrete arrays are handed to it as
    they are. Otherwise it is traced into a program of its own."""
    fast_path: Callable[[Request, Any], FastCall | None] | None = None
    """Optional, to save host time. ``fast_path(request, inputs)`` may return a :data:`FastCall`
    that does what ``forward`` would do, for calls without gradients whose arrays have the shapes,
    dtypes, device and *strides* of these; addresses and their alignment may differ. It must not
    keep the arrays. For torch it may be called under ``autocast``, which ``forward`` never is: it
    launches kernels, and does no arithmetic with torch's own ops."""
    fast_gradients: Callable[[Request, Any, tuple[bool, ...]], FastGradients | None] | None = None
    """Optional, torch only, for the four whole ops: the same for calls that need gradients.
    ``fast_gradients(request, inputs, wanted)`` may return :class:`FastGradients` that do what
    ``forward`` and ``backward`` would do; ``wanted`` says for each field of :class:`InputGrads`
    whether its gradient is asked for. A backward may come through ``backward`` where the forward
    came through this, and the other way round."""
    slices: Callable[[Request], SliceFunctions | None] | None = None
    """Optional, for ``chunk_kda`` and ``chunk_gated_delta_rule``: ``slices(request)`` may return the functions that
    serve a slice of a row under ``cp=``. Without them, or where it returns None, the front end composes them of calls
    of ``forward`` and ``backward``. It reads no values, like a verifier, and does not depend on the slice's place:
    every rank must get the same answer."""
    form: Callable[[Request], str] | None = None
    """Optional, for a backend with several ways to compute an op: the one that serves a request, and the numbers that
    decide, in a line such as ``"segments: 8 heads, 9 segments"``. It is called where somebody asks (``explain``,
    ``doctor``, :func:`kdacore.record_selections`), never on the way of a call. It allocates nothing and never syncs,
    and the request's device need not be here."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """Something that must be present before a backend can run at all."""

    name: str
    probe: Callable[[], str | None]
    """Cheap and side-effect free: None when present, else what is missing, in words."""
    remedy: str
    """The line that would make it so, for example a pip command."""
    hardware: bool = False
    """It is part of the machine (a driver, say), not of a package. ``explain`` leaves it out of the choice where
    hardware is assumed, and says so."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend: data plus functions. Yielded by the ``kdacore_backends`` hook."""

    name: str
    """At most 64 letters, digits, ``.``, ``_`` and ``-``, beginning with a letter or digit: it
    becomes part of file names."""
    version: str
    kinds: tuple[ArrayKind, ...]
    ops: Mapping[str, OpImpl] = field(hash=False)
    summary: str = ""
    requirements: tuple[Requirement, ...] = ()
    rank: int = 0
    """Orders the backends that can serve a call and whose cost for it is not known; higher comes
    first. Those whose cost is known come before them, the lowest cost first."""
    api_version: int = API_VERSION
    device_types: tuple[str, ...] = ("*",)
    """Device types this backend can ever serve; doctor and the reasons use it."""
    auto_kinds: tuple[ArrayKind, ...] | None = None
    """Array kinds auto may choose it for; None for all of ``kinds``. The others are served only when asked for."""
    auto_device_types: tuple[str, ...] | None = None
    """Device types auto may choose it for; None for all. An interpreter on a CPU is for those who ask for it."""
    traceable: bool = False
    """JAX only: ``forward`` and ``backward`` may be traced (jit, vmap, shard_map)."""
    capturable: bool = False
    """CUDA only: forward and backward may be captured into a graph (no host sync)."""


@sealed
@dataclass(frozen=True)
class Candidate:
    """How one backend answered one request."""

    backend: str
    reasons: tuple[Reason, ...]
    cost: float | None
    rank: int
    verified: bool
    lacking: tuple[str, ...] = ()
    """Hardware and packages it needs that are not here, packages with the line that installs them, where the choice was
    asked for assumed hardware."""
    cost_source: str = ""
    """Where ``cost`` comes from, in words; empty where it is not known."""
    form: str = ""
    """The form in which it would serve the call, and the numbers that decide (:attr:`OpImpl.form`). Empty where the
    backend has one form, where it cannot serve the call, and in selections of calls that nobody asked about."""
    remedies: tuple[str, ...] = ()
    """The lines that install the packages it needs, where ``lacking`` is not empty: the machine that has the hardware
    may have none of them."""

    @property
    def supported(self) -> bool:
        return not self.reasons


@sealed
@dataclass(frozen=True)
class Selection:
    """The outcome of dispatch for one request. ``print(selection)`` shows the whole reasoning."""

    request: Request
    backend: str
    """The chosen backend; ``""`` when nothing can serve (only from ``explain``)."""
    why: str
    candidates: tuple[Candidate, ...]

    @property
    def op(self) -> str:
        return self.request.op

    def candidate(self, name: str) -> Candidate:
        """The answer of one backend. KeyError for an unknown name."""
        for c in self.candidates:
            if c.backend == name:
                return c
        raise KeyError(name)

    def __str__(self) -> str:
        """:attr:`text` in lines of 100 columns."""
        from kdacore.folding import fold  # here: few calls print a selection

        return fold(self.text)

    @property
    def text(self) -> str:
        """The call, every backend's answer, and the choice: each fact on one line."""
        r = self.request
        what = [
            f"{r.kind} arrays",
            r.dtype,
            *["gradients"] * r.needs_grad,
            *["pool"] * (r.state_indices_ndim > 0),
        ]
        sizes = f"B={r.B} T={r.T} H={r.H} HV={r.HV} K={r.K} V={r.V}"
        lines = [f"{r.op} on {r.device}, {', '.join(what)}, {sizes}"]
        for c in self.candidates:
            mark = "->" if c.backend == self.backend else "  "
            if c.supported:
                verified = "" if c.verified else ", compiled only"
                lines.append(f"{mark} {c.backend}: supported, {_time(c)}{verified}")
                lines += [f"     form {c.form}"] if c.form else []
                lines += [f"     cost {c.cost_source}"] if c.cost_source else []
                lines += [f"     assumed, not here: {what}" for what in c.lacking]
            else:
                lines.append(f"{mark} {c.backend}: not supported")
                lines += [f"     {reason}" for reason in c.reasons]
        chosen = next((c for c in self.candidates if c.backend == self.backend), None)
        form = "" if chosen is None else chosen.form
        lines.append(f"chosen: {self.backend or 'none'}{form and f', {form}'} ({self.why})")
        if chosen is not None and r.device.type != "cpu":
            lines.append(_summary(chosen, r.device.arch or r.device.type))
        return "\n".join(lines)


_EXTRA = re.compile(r"'(?:kdacore|\.)\[(\w+)\]'")
"""In the line that installs kdacore with an extra (:func:`kdacore.lazy.install_line`)."""


def _summary(chosen: Candidate, hardware: str) -> str:
    """What runs on the hardware, which need not be here, how long that takes, and the lines that install it."""
    extras = sorted({f"kdacore[{name}]" for text in chosen.remedies for name in _EXTRA.findall(text)})
    needs = f"on {hardware}" + f" with {' and '.join(extras)}" * bool(extras)
    how = chosen.cost_source.partition(" (")[0]
    time = "no time measured" if chosen.cost is None else f"{_time(chosen)} {how}".rstrip()
    ran = [chosen.backend, chosen.form.partition(":")[0], time]
    remedies = dict.fromkeys(chosen.remedies)  # a verifier's may begin with what a requirement says too
    own = [text for text in remedies if not any(text != r and text.startswith(r) for r in remedies)]
    install = "".join([f"\nto get it: {text}" for text in own])
    return f"{needs}: {', '.join(filter(None, ran))}{install}"


def _time(c: Candidate) -> str:
    return "cost unknown" if c.cost is None else f"{c.cost * 1e3:.3g} ms"


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One row of :func:`kdacore.backends`."""

    name: str
    version: str
    distribution: str
    kinds: tuple[str, ...]
    ops: tuple[str, ...]
    available: bool
    missing: tuple[str, ...]
    """What is missing, one line each, with its remedy."""
    summary: str = ""

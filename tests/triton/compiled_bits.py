"""Candidates by records against decoding one token at a time, as compiled: ``python compiled_bits.py CASES``.

``CASES`` is a list in JSON of what :class:`Case` takes. Prints what is wrong with each, a list a line. Kernels are
compiled for an architecture that need not be there, and their PTX is run by :mod:`ptx_interpreter`. Triton must not
interpret its kernels in this process.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import decode_inputs
import numpy as np
import torch
import triton
from decode_inputs import GDN, KDA, MODEL, PARTS, UNBOUNDED, check, copied, draw, request_of, same_bits
from ptx_interpreter import Block, Memory, Program, left_to_contract, parse
from test_candidate_records import recurrent_call

from kdacore.types import Device, Request
from kdacore_triton import aot, configs, decode, recurrent
from kdacore_triton.launch import RecordedLaunch, group_types

UNTRANSFORMED = {"use_beta_sigmoid_in_kernel": True}
"""No norms, and the gates are log decays."""


class Case(NamedTuple):
    """Tokens of one sequence."""

    op: str
    K: int
    v_first: bool = False
    V: int = 0
    """K if 0."""
    HV: int = 1
    state: str = "float32"
    dtype: str = "bfloat16"
    tokens: int = 2
    config: dict[str, int] | None = None
    """Of the recurrent kernel: its tile; what is shipped for the call without."""
    records_config: dict[str, int] | None = None
    """Another one for calls with records."""
    packed: bool = False
    raw: bool = True
    """Norms and gates are computed in the kernel."""
    arch: str = "sm_90"

    @property
    def fused(self) -> bool:
        return self.op in (KDA, GDN)

    @property
    def options(self) -> dict[str, Any]:
        whole = MODEL if self.op in (KDA, "fused_recurrent_kda") else UNBOUNDED
        return (whole if self.raw else UNTRANSFORMED) | {"state_v_first": self.v_first, "inplace_state": True}

    def draw(self) -> Any:
        sizes: dict[str, Any] = {
            "H": 1, "HV": self.HV, "K": self.K, "V": self.V or self.K, "records": self.tokens, "raw": self.raw,
            "dtype": getattr(torch, self.dtype), "state": getattr(torch, self.state), "v_first": self.v_first,
        }  # fmt: skip
        if self.fused:
            return draw(self.op, 1, T=self.tokens, columns=2 + self.tokens, **sizes)
        return recurrent_call(self.op, 1, T=self.tokens, **sizes)


class Runner:
    """Runs calls of one case and collects what its kernels leave open."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.problems: list[str] = []

    def forward(self, request: Request, x: Any) -> Any:
        """What a GPU would return. ``x`` is written."""
        request = replace(request, device=Device("cuda", 0, self.case.arch))
        config = self.case.config
        if request.has("record_update"):
            config = self.case.records_config or config
        run = decode.forward if self.case.fused else recurrent.forward
        with ExitStack() as stack:
            if config:
                stack.enter_context(configs.override("recurrent", config))
            launches = stack.enter_context(aot.recording())
            got = run(request, x)
        (launch,) = launches
        program = execute(launch, self.case.arch)
        self.problems += [f"ptxas may contract {x}" for x in left_to_contract(program)[:1]]
        return got

    def call(self, x: Any) -> torch.Tensor:
        return self.forward(request_of(self.case.op, x, **self.case.options), x).o

    def expect(self, right: bool, problem: str) -> None:
        if not right:
            self.problems.append(problem)


_programs: dict[str, tuple[Program, int]] = {}


def execute(launch: RecordedLaunch, arch: str) -> Program:
    """All programs of a launch, one after another, on the arrays that it names."""
    source, options = aot._source(launch)
    key = f"{source.hash()} {sorted(options.items())} {arch}"
    if key not in _programs:
        compiled = triton.compile(source, target=aot._target(arch), options=options)
        _programs[key] = parse(compiled.asm["ptx"]), compiled.metadata.shared
    program, shared = _programs[key]
    values = list(_values(launch))
    values += [0] * (
        len(program.parameters) - len(values)
    )  # memory of the compiler's own, of which it needs none
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage() for x in launch.args if torch.is_tensor(x)
    }
    memory = Memory([(at, _bytes(at, storage.nbytes())) for at, storage in storages.items()])
    columns, rows, _ = launch.grid
    for y in range(rows):
        for x in range(columns):
            Block(program, values, memory, shared, (x, y, 0), launch.grid).run()
    return program


def _values(launch: RecordedLaunch) -> Iterator[int]:
    """The arguments that the compiled kernel still has: addresses, integers, and floats by their bits."""
    arguments, groups = iter(launch.args), group_types(launch.kernel)
    for parameter in launch.kernel.params:
        if parameter.is_constexpr:
            continue
        group = next(groups)
        for _ in range(1 if group is None else len(group._fields)):
            value = next(arguments)
            if aot._kind(value, parameter)[0] == "constexpr":
                continue
            if torch.is_tensor(value):
                yield value.data_ptr()
            else:
                yield int(np.float32(value).view(np.uint32)) if isinstance(value, float) else int(value)


def _bytes(address: int, size: int) -> Any:
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def problems(case: Case) -> list[str]:
    """What is wrong with candidates by records: by the oracle, and by the bits of the calls that they replace."""
    run = Runner(case)
    x = case.draw()
    vars(decode_inputs)["run"] = run.forward
    check(case.op, copied(x), null_index=None, **case.options)

    speculating = copied(x)._replace(num_replayed=torch.zeros_like(x.num_replayed))
    o = run.call(_packed(speculating) if case.packed else speculating).view(1, case.tokens, case.HV, -1)
    replayed = torch.full_like(x.num_replayed, case.tokens)
    run.call(speculating._replace(num_replayed=replayed))
    state = speculating.initial_state[speculating.state_indices.long()]

    plain = copied(x)._replace(**dict.fromkeys((*PARTS, "record_indices", "num_replayed")))
    if case.state == "float32":
        for t in range(case.tokens):
            got = run.call(_token(plain, t))
            run.expect(same_bits(got, o[:, t : t + 1]), f"output of token {t}")
        run.expect(same_bits(plain.initial_state[plain.state_indices.long()], state), "state")
    else:
        pool, each = _writing_each(plain)
        run.expect(same_bits(run.call(each), o), "outputs of writing each state")
        run.expect(same_bits(pool[-1:], state), "state of writing each")
    return list(dict.fromkeys(run.problems))


@cache
def _tokens_of(kind: type) -> tuple[str, ...]:
    return tuple(name for name in ("x", "q", "k", "v", "g", "beta", "z") if name in kind._fields)


def _token(x: Any, t: int) -> Any:
    names = [name for name in _tokens_of(type(x)) if getattr(x, name) is not None]
    return x._replace(**{name: getattr(x, name)[:, t : t + 1].contiguous() for name in names})


def _packed(x: Any) -> Any:
    """The same tokens as a pack of one sequence."""
    return x._replace(cu_seqlens=torch.tensor([0, x.beta.shape[1]], dtype=torch.int32))


def _writing_each(x: Any) -> tuple[torch.Tensor, Any]:
    """The call with a row for the state after each token: the pool, whose last row the last one is, and the call."""
    T, rows = x.beta.shape[1], len(x.initial_state)
    pool = torch.zeros(rows + T, *x.initial_state.shape[1:], dtype=x.initial_state.dtype)
    pool[:rows] = x.initial_state
    goals = torch.arange(rows, rows + T, dtype=torch.int32)[None]
    reads = goals.clone()
    reads[:, 0] = x.state_indices
    more = {"conv_indices": x.state_indices} if "conv_state" in x._fields else {}
    return pool, x._replace(
        initial_state=pool, state_indices=reads, write_indices=goals,
        num_accepted_tokens=torch.ones(1, dtype=torch.int32), **more,
    )  # fmt: skip


if __name__ == "__main__":
    for given in json.loads(sys.argv[1]):
        print(json.dumps(problems(Case(**given))), flush=True)

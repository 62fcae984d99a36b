"""Write kdacore/api.py and kdacore/api.pyi: ``python -m codegen.public_api``.

The signatures, what stands under ``Args:`` and the bodies come from the ops' definitions
(kdacore/ops/arguments_and_options.py), all else from api.py.in.
The stub, which type checkers read in place of the source, has one overload for each array
library: torch tensors come out where torch tensors went in. A test fails when either file is not what this program
would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kdacore.ops import OPS, SEQUENCE_FEATURES, ArrayArgument, OpDef, Option

HERE = Path(__file__).parent
SOURCE = HERE.parent / "kdacore" / "api.py"
STUB = SOURCE.with_suffix(".pyi")
TEMPLATE, STUB_TEMPLATE = HERE / "api.py.in", HERE / "api.pyi.in"


@dataclass(frozen=True)
class Arrays:
    """An argument that is a tuple of arrays."""

    name: str
    parts: tuple[ArrayArgument, ...]

    @property
    def feature(self) -> str | None:
        return self.parts[0].feature

    @property
    def doc(self) -> str:
        return self.parts[-1].doc

    def annotation(self, kind: str) -> str:
        return f"tuple[{', '.join([kind] * len(self.parts))}]"


Argument = ArrayArgument | Arrays | Option

WIDTH = 110
ORDER = (
    "conv_weight", "conv_bias", "conv_state", "conv_indices", "conv_windows", "A_log", "dt_bias", "scale",
    "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound", "state_v_first", "cu_seqlens",
    "cu_seqlens_cpu", "state_indices", "num_accepted_tokens", "has_initial_state", "inplace_state", "null_index",
    "write_indices", "write_pool", "checkpoint_offsets", "checkpoint_indices", "read_only_state", "records",
    "record_indices", "num_replayed", "z", "norm_weight", "norm_eps", "norm_activation", "out", "disable_recompute",
    "checkpoint_every", "cp",
)  # fmt: skip
"""Keywords in the order of the signatures. Those that are not named here follow, as the definitions have them."""
ANNOTATIONS = {
    "flag": "bool",
    "number": "float | None",
    "count": "int | None",
    "choice": "str",
    "ranks": "Any",
}
CONSTANTS = {
    "chunk_kda": "_CHUNK_KDA",
    "chunk_gated_delta_rule": "_CHUNK_GDN",
    "fused_recurrent_kda": "_RECURRENT_KDA",
    "fused_recurrent_gated_delta_rule": "_RECURRENT_GDN",
    "fused_decode_kda": "_DECODE_KDA",
    "fused_decode_gated_delta_rule": "_DECODE_GDN",
    "commit_records": "_COMMIT",
    "kda_gate": "_GATE",
}
CALLS = {
    "chunk": "_chunk",
    "recurrent": "_recurrent",
    "decode": "_recurrent",
    "commit": "_commit",
    "gate": "dispatch.call",
}
KINDS = ("Tensor", "NDArray[Any]", "jax.Array")


def source() -> str:
    """The text of kdacore/api.py."""
    text = TEMPLATE.read_text(encoding="utf-8")
    for name in CONSTANTS:
        head, own, rest = _function(text, name)
        text = head + _filled(own, OPS[name]) + rest
    return text


def _filled(function: str, op: OpDef) -> str:
    """A function of the template with its signature, descriptions and body."""
    function = function.replace("(<signature>)", f"({_signature(op)})")
    pattern = r" *<arguments(?: (\w+) (\w+))?>\n"
    function = re.sub(pattern, lambda m: _documented(op, m[1] or "", m[2] or ""), function)
    return function.replace("    <call>\n", _body(op))


def stub() -> str:
    """The text of kdacore/api.pyi."""
    overloads = []
    for name in CONSTANTS:
        op = OPS[name]
        for kind in KINDS:
            if op.family == "gate":
                overloads.append(_overload(op, kind, kind, {}))
                continue
            if op.family == "commit":
                overloads.append(_overload(op, kind, kind, {"conv_state": "None = None"}))
                overloads.append(_overload(op, kind, f"tuple[{kind}, {kind}]", {"conv_state": kind}))
                continue
            if op.family == "decode" and "jax" in kind:  # as many results as arrays would be written
                overloads.append(_overload(op, kind, "Any", {}))
                continue
            results = f"{kind}, {kind} | None"
            more = _more_results(op, kind)
            if more is None:
                overloads.append(_overload(op, kind, f"tuple[{results}]", {}))
                continue
            argument, given, result = more
            overloads.append(_overload(op, kind, f"tuple[{results}]", {argument: "None = None"}))
            overloads.append(_overload(op, kind, f"tuple[{results}, {result}]", {argument: given}))
    return STUB_TEMPLATE.read_text(encoding="utf-8").replace("<overloads>\n", "".join(overloads))


def _more_results(op: OpDef, kind: str) -> tuple[str, str, str] | None:
    """An argument with which a call has one more result, its type then, and the type of the result."""
    if "checkpoint_every" in op.options:
        return "checkpoint_every", "int", kind
    if "records" in op.tuples and "jax" in kind:
        records = f"tuple[{kind}, {kind}, {kind}]"
        return "records", records, records
    return None


def _function(text: str, name: str) -> tuple[str, str, str]:
    """What stands before a function of the template, the function, and the rest."""
    start = text.index(f"def {name}(<signature>)")
    end = text.index("    <call>\n", start) + len("    <call>\n")
    return text[:start], text[start:end], text[end:]


# --- signatures ----------------------------------------------------------------------------------------------------


def _keywords(op: OpDef) -> list[Argument]:
    """The arguments that have a default, in the order of the signature."""
    arguments = [*_joined(op, [a for a in op.array_arguments if not a.required]), *op.option_arguments]
    place = {name: i for i, name in enumerate(ORDER)}
    return sorted(arguments, key=lambda a: place.get(a.name, len(ORDER)))


def _required(op: OpDef) -> list[Argument]:
    return _joined(op, [a for a in op.array_arguments if a.required])


def _joined(op: OpDef, arrays: Iterable[ArrayArgument]) -> list[Argument]:
    """Array arguments of the public function: the parts of a tuple are one."""
    found: list[Argument] = []
    for a in arrays:
        if not a.part_of:
            found.append(a)
        elif a.name == op.tuples[a.part_of][0]:
            parts = tuple([x for x in op.array_arguments if x.part_of == a.part_of])
            found.append(Arrays(a.part_of, parts))
    return found


def _by_name(op: OpDef) -> dict[str, Argument]:
    return {a.name: a for a in _required(op) + _keywords(op)}


def _signature(op: OpDef) -> str:
    lines = [f"{a.name}: {_annotation(a, 'Array')}," for a in _required(op)]
    lines.append("*extra: object,")
    for a in _keywords(op):
        if isinstance(a, Option):
            lines.append(f"{a.name}: {ANNOTATIONS[a.kind]} = {_default(a)},")
        else:
            lines.append(f"{a.name}: {_annotation(a, 'Array')} | None = None,")
    lines += ["backend: str | None = None,", "**unknown: object,"]
    return "\n" + "".join(f"    {line}\n" for line in lines)


def _default(option: Option) -> str:
    return f'"{option.default}"' if isinstance(option.default, str) else repr(option.default)


def _annotation(argument: Argument, kind: str) -> str:
    """The type of an array argument, of arrays of a kind."""
    return argument.annotation(kind) if isinstance(argument, Arrays) else kind


def _overload(op: OpDef, kind: str, result: str, changed: dict[str, str]) -> str:
    lines = ["@overload", f"def {op.name}("]
    lines += [f"    {a.name}: {_annotation(a, kind)}," for a in _required(op)] + ["    *,"]
    for a in _keywords(op):
        if isinstance(a, Option):
            given = f"{ANNOTATIONS[a.kind]} = {_default(a)}"
        else:  # what lives on the host may be NumPy's beside arrays of any library
            on_host = isinstance(a, ArrayArgument) and a.host
            host = " | NDArray[Any]" if on_host and "NDArray" not in kind else ""
            given = f"{_annotation(a, kind)}{host} | None = None"
        lines.append(f"    {a.name}: {changed.get(a.name, given)},")
    return "\n".join([*lines, "    backend: str | None = None,", f") -> {result}: ...", ""])


# --- descriptions --------------------------------------------------------------------------------------------------


def _documented(op: OpDef, relation: str, other: str) -> str:
    """The lines under ``Args:``. ``unlike`` another op: what it describes otherwise; ``beyond``: besides what it
    describes and every whole op has."""
    known = _by_name(OPS[other]) if other else {}
    lines: list[str] = []
    names: list[str] = []
    for a in _required(op) + _keywords(op):
        names.append(a.name)
        if a.doc:
            if not (a.name in known and known[a.name].doc == a.doc and _left_out(a, relation)):
                lines += _wrapped(f"{', '.join(names)}: {a.doc}")
            names = []
    if names:
        raise ValueError(f"{op.name}: nothing describes {', '.join(names)}")
    if not other:
        lines += _wrapped("backend: force one backend; see :func:`kdacore.explain` for what each can serve.")
    return "".join(f"        {line}\n" for line in lines)


def _left_out(argument: Argument, relation: str) -> bool:
    return relation == "unlike" or argument.feature is None or argument.feature in SEQUENCE_FEATURES


def _wrapped(text: str) -> Iterator[str]:
    """Lines of a description, the later ones indented; code is not broken."""
    line, indent = "", ""
    for word in re.findall(r"(?:``.*?``|\S)+", text):
        if line.strip() and len(line) + 1 + len(word) > WIDTH - 8:
            yield line
            indent = "    "
            line = indent + word
        else:
            line = f"{line} {word}" if line.strip() else indent + word
    yield line


# --- bodies --------------------------------------------------------------------------------------------------------


def _body(op: OpDef) -> str:
    arrays, options = _tuple(op.arrays), _tuple(op.options)
    more = ", cp" if "cp" in op.options else ""
    constant, called = CONSTANTS[op.name], CALLS[op.family]
    call = f"    return {called}({constant}, {arrays}, {options}, backend{more})\n"
    if len(call) > WIDTH:
        parts = [constant, _tuple(op.arrays, True), _tuple(op.options, True), *f"backend{more}".split(", ")]
        call = f"    return {called}(\n" + "".join(f"        {part},\n" for part in parts) + "    )\n"
    unpacked = "".join([_unpacked(op, name, parts) for name, parts in op.tuples.items()])
    refusal = f'    if extra or unknown:\n        raise _unknown_arguments("{op.name}", extra, unknown)\n'
    return refusal + unpacked + call


def _unpacked(op: OpDef, name: str, parts: tuple[str, ...]) -> str:
    """The lines that take an argument apart that is a tuple of arrays."""
    given = f'"{op.name}", "{name}", {name}, {len(parts)}'
    line = f"    {', '.join(parts)} = _arrays_of({given})\n"
    return line if len(line) <= WIDTH + 1 else line.replace(f"({given})", f"(\n        {given}\n    )")


def _tuple(names: tuple[str, ...], lines: bool = False) -> str:
    if lines:
        return "(\n" + "".join(f"            {name},\n" for name in names) + "        )"
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def main() -> int:
    for path, text in ((SOURCE, source()), (STUB, stub())):
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"written: {path.relative_to(HERE.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

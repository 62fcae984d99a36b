"""One function of a host that kdacore takes over: whether it takes a call, and the call.

Whether it does is decided on shapes, dtypes, devices and options alone, so it is remembered: calls like earlier ones
are recognised by a test that is generated from the host's own arguments, before they are translated. A server's calls
have other lengths at every step, so calls that differ in lengths alone share a test, and verdicts are kept by shapes.
"""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kdacore.arrays.torch.eager import TORCH
from kdacore.compat.call import Call, run
from kdacore.dispatch.plan import PREFERENCE, is_plain, key_of
from kdacore.dispatch.recognition import Matcher, ShapesOf, matcher, shapes_of
from kdacore.dispatch.selection_queries import Answer, answer
from kdacore.errors import ContractError, UnsupportedError
from kdacore.integrations.hooks import Hook
from kdacore.ops import OPS
from kdacore.ops.binding import binder
from kdacore.registry import REGISTRY

if TYPE_CHECKING:
    from kdacore.ops import OpDef
    from kdacore.types import Selection

Verdict = tuple[bool, "str | None"]
"""Whether kdacore takes a call, and if not, why."""

Unread = Any
"""Annotates an argument of a host that its results do not depend on."""

_TAKEN: Verdict = True, None
_MAX_SEEN = 8
_MAX_KINDS = 1024
_MAX_FAMILIES = 4
"""Families of calls that differ in lengths alone."""
_MAX_LENGTHS = 4096
"""Verdicts kept of one family."""
_MAX_OVER_RANKS = 256


class Handover:
    """A function of a host.

    Args:
        translate: has the host's signature and returns the call of kdacore that does the same. Parameters annotated
            as tensors are arrays, the others options; those annotated as ``torch.dtype`` or :data:`Unread` decide
            nothing here.
        hook: its counts.
        is_active: whether the integration takes any call at present.
        why_left: asked of a call that kdacore would serve, with its selection and the host's arguments: why it is left
            to the host all the same; empty where it is not. The answer is remembered with the verdict.
    """

    def __init__(
        self,
        translate: Callable[..., Call],
        hook: Hook,
        is_active: Callable[[], bool],
        why_left: Callable[[Selection, tuple[Any, ...], dict[str, Any]], str] | None = None,
    ) -> None:
        self.hook = hook
        self.why_left = why_left
        self.is_active = is_active
        self.translate = translate
        self._split, self._arrays = _splitter(translate)
        self.parameters = frozenset(inspect.signature(translate).parameters)
        """Names of the host's arguments."""
        self._seen: tuple[tuple[object, Matcher, Verdict], ...] = ()
        self._refused: set[Any] = set()
        self._families: tuple[tuple[object, ShapesOf, dict[Any, Verdict]], ...] = ()
        self._kinds: dict[Any, int] = {}
        self._over_ranks: dict[Any, Verdict] = {}
        REGISTRY.on_change(self.forget)

    def forget(self) -> None:
        """Forget every verdict (the set of backends or the configuration changed)."""
        self._seen = ()
        self._refused = set()
        self._families = ()
        self._kinds = {}
        self._over_ranks = {}

    def may_take(self) -> bool:
        """May a call be taken by its verdict? Not in a traced graph, where none is made."""
        return self.is_active() and not torch.compiler.is_compiling()

    def verdict(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict:
        """Does kdacore take the call of these arguments? The reason it gives is kdacore's own."""
        try:
            arrays, options = self._split(*args, **kwargs)
        except TypeError as error:
            return self._declined(str(error))
        asked = PREFERENCE.get()
        for of, matches, known in self._seen:
            if of == asked and matches(arrays, options):
                verdict = known
                break
        else:
            verdict = self._by_lengths(asked, arrays, options, args, kwargs)
        return verdict if verdict is _TAKEN else self._declined(verdict[1] or "")

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Make a call that was taken."""
        self.hook.served += 1
        return run(self.translate(*args, **kwargs))

    def _declined(self, reason: str) -> Verdict:
        self.hook.decline(reason)
        return False, reason

    def _by_lengths(self, asked: object, arrays: Any, options: Any, args: Any, kwargs: Any) -> Verdict:
        """The verdict that is remembered for these shapes, else a new one."""
        for of, shapes, known in self._families:
            if of == asked and (found := shapes(arrays, options)) is not None:
                verdict = known.get(found)
                if verdict is None:
                    verdict = self._judge(asked, arrays, options, args, kwargs)
                    if len(known) >= _MAX_LENGTHS:
                        known.clear()
                    known[found] = verdict
                return verdict
        self._note_kind(asked, arrays, options)
        return self._judge(asked, arrays, options, args, kwargs)

    def _note_kind(self, asked: object, arrays: Any, options: Any) -> None:
        """Make a family of a call whose like came once before, with these lengths or others."""
        if not all(is_plain(x) for x in options):
            return
        kind = (
            asked,
            options,
            tuple([(type(x), getattr(x, "dtype", None), getattr(x, "ndim", 0)) for x in arrays]),
        )
        times = self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.clear()
        if times != 2:
            return
        test = shapes_of(TORCH, self._arrays(*arrays), options)
        if test is not None:
            self._families = ((asked, test, {}), *self._families[: _MAX_FAMILIES - 1])

    def _judge(self, asked: object, arrays: Any, options: Any, args: Any, kwargs: Any) -> Verdict:
        try:
            call = self.translate(*args, **kwargs)
        except (ContractError, TypeError) as error:
            return self._keep(asked, arrays, options, (False, str(error)), self._refused_before(options))
        opdef = OPS[call.op]
        if call.arguments.get("cp") is not None:
            return self._verdict_over_ranks(asked, opdef, call.arguments)
        found = answer(opdef, *binder(opdef)(**call.arguments))
        verdict = _verdict_on(found)
        if verdict is _TAKEN and self.why_left is not None and found.selection is not None:
            reason = self.why_left(found.selection, args, kwargs)
            verdict = (False, reason) if reason else _TAKEN
        return self._keep(asked, arrays, options, verdict, found.repeated)

    def _verdict_over_ranks(self, asked: object, opdef: OpDef, arguments: dict[str, Any]) -> Verdict:
        """On a call with ``cp``, which is the same on every rank. Remembered by shapes and the number of ranks."""
        from kdacore.parallel import explain, local_call, torch_ranks  # here: few calls are spread over ranks

        arrays, options, backend = binder(opdef)(**arguments)
        inputs = opdef.inputs(*arrays)
        cp, alone = local_call.without_cp(opdef, options)
        try:
            key = key_of(TORCH, opdef, inputs, alone, (asked, torch_ranks.ranks_of(opdef.name, cp).size))
            known = self._over_ranks.get(key)
            if known is None:
                known = _verdict_on_spread(explain.explain(opdef, inputs, options, backend))
        except (ContractError, UnsupportedError) as error:
            return False, str(error)
        if key is not None:
            if len(self._over_ranks) >= _MAX_OVER_RANKS:
                self._over_ranks.clear()
            self._over_ranks[key] = known
        return known

    def _refused_before(self, options: tuple[Any, ...]) -> bool:
        """Were options like these refused by the translation before?"""
        if not all(is_plain(x) for x in options):
            return False
        if options in self._refused:
            return True
        if len(self._refused) >= _MAX_KINDS:
            self._refused.clear()
        self._refused.add(options)
        return False

    def _keep(self, asked: object, arrays: Any, options: Any, verdict: Verdict, repeated: bool) -> Verdict:
        """Recognise calls like this one from now on, if it has come twice."""
        test = matcher(TORCH, self._arrays(*arrays), options) if repeated else None
        if test is not None:
            self._seen = ((asked, test, verdict), *self._seen[: _MAX_SEEN - 1])
        return verdict


def _verdict_on(found: Answer) -> Verdict:
    return (False, str(found.error)) if found.selection is None else _verdict_on_backend(found.selection)


def _verdict_on_spread(selection: Selection) -> Verdict:
    return _verdict_on_backend(selection) if selection.backend else (False, selection.why)


def _verdict_on_backend(selection: Selection) -> Verdict:
    if left_to_the_reference(selection):
        return False, _why_the_reference(selection)
    return _TAKEN


def left_to_the_reference(selection: Selection) -> bool:
    """On an accelerator, only the reference backend would serve, and nobody asked for it.

    Every host has something faster there. On a CPU the hosts' Triton kernels do not run, so kdacore's reference serves;
    and under ``batch_invariant()`` it does, because the hosts do not promise as much.
    """
    request = selection.request
    if selection.backend != "reference" or request.device.type == "cpu" or request.batch_invariant:
        return False
    return not was_asked_for(selection)


def was_asked_for(selection: Selection) -> bool:
    """Was the backend named by the caller or by the environment?"""
    return selection.why.startswith(("forced", "preferred"))


def _why_the_reference(selection: Selection) -> str:
    where = selection.request.device
    lines = [f"only kdacore's slow reference backend would serve this call on {where}"]
    for candidate in selection.candidates:
        reasons = [r for r in candidate.reasons if r.code not in ("array_kind", "device")]
        if candidate.backend != "reference" and len(reasons) == len(candidate.reasons):
            lines += [f"{candidate.backend}: {reason}" for reason in reasons]
    return "; ".join(lines)


def compute_or_leave(
    handover: Handover, args: tuple[Any, ...], kwargs: dict[str, Any], leave: Callable[[], Any]
) -> Any:
    """Compute a call with kdacore where it takes it, else return what ``leave`` does.

    In a traced graph every call is kdacore's, and none is counted: a verdict is made of what is not known there.
    """
    if not handover.is_active():
        return leave()
    if torch.compiler.is_compiling():
        return run(handover.translate(*args, **kwargs))
    if handover.verdict(args, kwargs)[0]:
        return handover.compute(*args, **kwargs)
    return leave()


def handed_over(handover: Handover, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kdacore computes where it takes the call, and ``original`` where it does not."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return compute_or_leave(handover, args, kwargs, lambda: original(*args, **kwargs))

    return function


def _splitter(translate: Callable[..., Any]) -> tuple[Callable[..., tuple[Any, Any]], Any]:
    """A generated function with the signature of ``translate`` that returns its arrays and its options; and a named
    tuple of the arrays."""
    parameters = inspect.signature(translate).parameters.values()
    arrays = [p.name for p in parameters if "Tensor" in str(p.annotation)]
    options = []
    for p in parameters:
        if p.name not in arrays and p.annotation not in ("torch.dtype", "Unread"):
            # What must be None is anything else otherwise: its presence decides.
            options.append(f"{p.name} is not None" if p.annotation == "None" else p.name)
    declared = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and "*" not in declared:
            declared.append("*")
        declared.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    source = [
        f"def {translate.__name__}({', '.join(declared)}):",
        f"    return ({', '.join(arrays)},), ({''.join(f'{o}, ' for o in options)})",
    ]
    made: dict[str, Any] = {"torch": torch}
    exec("\n".join(source), made)
    return made[translate.__name__], namedtuple("Arrays", arrays)

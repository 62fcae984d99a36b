"""Which form of a backend serves a call (``OpImpl.form``), evaluated where somebody asks and nowhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import SupportsIndex, TypeVar, overload

from kdacore import plugin_faults
from kdacore.registry import REGISTRY
from kdacore.types import Candidate, Request, Selection

S = TypeVar("S", bound=Selection)
Form = Callable[[Request], str]


def with_forms(selected: S, *, chosen_only: bool = False) -> S:
    """The selection, its candidates that can serve the call with the forms they would take.

    Args:
        selected: the selection.
        chosen_only: of the chosen backend alone.
    """
    asked = [c for c in selected.candidates if c.supported and not c.form]
    if chosen_only:
        asked = [c for c in asked if c.backend == selected.backend]
    forms = {c.backend: form_of(c.backend, selected.request) for c in asked}
    if not any(forms.values()):
        return selected
    candidates = tuple([_with_form(c, forms.get(c.backend, "")) for c in selected.candidates])
    return dataclasses.replace(selected, candidates=candidates)


def _with_form(candidate: Candidate, form: str) -> Candidate:
    return dataclasses.replace(candidate, form=form) if form else candidate


def of_slice(selected: S, form: Form | None) -> S:
    """The selection of a slice's request, its chosen backend with the form of the slice, not of a whole call.

    Args:
        selected: the selection.
        form: that of the functions that serve the slice.
    """
    name, request = selected.backend, selected.request
    text = _asked(name, "form of a slice", form, request)
    candidates = [dataclasses.replace(c, form=text) if c.backend == name else c for c in selected.candidates]
    return dataclasses.replace(selected, candidates=tuple(candidates))


def form_of(backend: str, request: Request) -> str:
    """What a backend says of its form; empty where it says nothing, or what is no text. That is reported."""
    registered = REGISTRY.backends().get(backend)
    impl = None if registered is None else registered.backend.ops.get(request.op)
    return "" if impl is None else _asked(backend, f"form of {request.op}", impl.form, request)


def _asked(backend: str, what: str, form: Form | None, request: Request) -> str:
    if form is None:
        return ""
    answer, error = answered(form, request)
    if error is not None:  # the call does not depend on it
        plugin_faults.report(f"backend {backend}", what, error)
    return answer


def answered(form: Form, request: Request) -> tuple[str, BaseException | None]:
    """What a plugin's form says, or nothing and the error: its own, or a TypeError for what is no line of text."""
    answer, error = plugin_faults.attempt(form, request)
    if error is None and not (isinstance(answer, str) and answer.isprintable() and answer):
        error = TypeError(f"a form is a line of text; got {plugin_faults.shown(answer)}")
    return ("" if error is not None else str(answer)), error


class Recorded(list[Selection]):
    """The list of :func:`kdacore.record_selections`. The form of a call's backend is asked for when its selection is
    first read: recording costs an append."""

    @overload
    def __getitem__(self, at: SupportsIndex, /) -> Selection: ...
    @overload
    def __getitem__(self, at: slice, /) -> list[Selection]: ...
    def __getitem__(self, at: SupportsIndex | slice, /) -> Selection | list[Selection]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        read = with_forms(super().__getitem__(at), chosen_only=True)
        super().__setitem__(at, read)
        return read

    def __iter__(self) -> Iterator[Selection]:
        return (self[i] for i in range(len(self)))

    def __reversed__(self) -> Iterator[Selection]:
        return (self[i] for i in reversed(range(len(self))))

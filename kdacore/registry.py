"""Loads plugins and keeps their backends: failures while loading, name conflicts, missing requirements."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kdacore import config, plugin_faults
from kdacore.errors import ContractError, PluginError, did_you_mean, list_names, shown
from kdacore.types import API_VERSION, Backend, BackendInfo, OpImpl, Requirement

if TYPE_CHECKING:
    import importlib.metadata

    import pluggy

T = TypeVar("T")
ENTRY_POINT_GROUP = "kdacore"
BUILTIN_PLUGINS = (
    "kdacore_reference",
    "kdacore_triton",
    "kdacore_cuda",
    "kdacore_pallas",
)
OWN_DISTRIBUTION = "kdacore"
_FLA_NAMES = ("fla", "flash-linear-attention", "flash_linear_attention", "fla-core")
"""Names of another library, which callers ask for as for a backend."""
BY_HAND = "(registered by hand)"
MOST_BACKENDS = 1000
"""The most backends of one plugin; more come from a generator that has no end."""


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one plugin: a row of ``kdacore plugins`` and ``kdacore doctor``."""

    name: str
    distribution: str
    seconds: float
    backends: tuple[str, ...]
    problem: str = ""
    """Empty when all is well; else what is wrong, in a line."""
    detail: str = ""
    """The traceback, when there is one."""
    disabled: bool = False


@dataclass(frozen=True, slots=True)
class Registered:
    """A backend and where it came from."""

    backend: Backend
    plugin: str
    distribution: str


class Registry:
    """Loads plugins once, on first use; thread-safe; rebuilt by :meth:`reset`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listeners: list[Callable[[], None]] = []
        self._skipped: frozenset[str] = frozenset()
        self._clear()

    def renew_lock(self) -> None:
        """Make a new lock in a forked child: the old one may be held by a thread that the child does not have."""
        self._lock = threading.RLock()

    def _clear(self) -> None:
        self._loaded = False
        self._manager: pluggy.PluginManager
        self._backends: dict[str, Registered] = {}
        self._plugins: list[PluginRecord] = []
        self._distributions: dict[str, str] = {}
        """The distribution of each plugin that pluggy holds, by the plugin's name."""

    # --- what there is ---

    def backends(self) -> dict[str, Registered]:
        """Every usable backend by name, in the order of loading."""
        self._load()
        found = self._backends
        while not self._loaded:  # reset() came between, and what was read may be empty
            self._load()
            found = self._backends
        return found

    def plugins(self) -> tuple[PluginRecord, ...]:
        """Every plugin found, the failed and disabled ones too."""
        self._load()
        return tuple(self._plugins)

    def get(self, name: str, op: str = "kdacore", argument: str = "backend") -> Registered:
        """One backend. :class:`ContractError` naming the known ones when there is none of that name."""
        found = self.backends().get(name)
        if found is None:
            broken = [p.name for p in self._plugins if p.problem]
            known = f"one of {list_names(self._backends)}"
            hint = f" (plugins with problems: {list_names(broken)}; see kdacore doctor)" if broken else ""
            raise ContractError(op, argument, shown(name), known + hint + self._meant(name))
        return found

    def _meant(self, name: object) -> str:
        """What the name of a backend that is not there may have meant, for the end of a message."""
        if type(name) is str and name in _FLA_NAMES:
            return "; kdacore.compat.fla has flash-linear-attention's functions, kdacore.integrations.fla its layers"
        return f"; a plugin is found once its package is installed{did_you_mean(name, self._backends)}"

    def hooks(self) -> Any:
        """pluggy's hook callers."""
        self._load()
        return self._manager.hook

    def ask_each(self, hook: str, **arguments: Any) -> Iterator[Any]:
        """What each plugin answers to a hook, newest first; one that raises is reported and silences no other."""
        caller = getattr(self.hooks(), hook)
        found = caller.get_hookimpls()
        if any(i.wrapper or i.hookwrapper for i in found):
            # A wrapper only works around all of the others at once.
            answer, error = plugin_faults.attempt(functools.partial(caller, **arguments))
            if error is not None:
                plugin_faults.report(f"plugins {list_names(i.plugin_name for i in found)}", hook, error)
                return
            yield from answer if isinstance(answer, list) else [answer]
            return
        for implementation in reversed(found):
            given = [arguments[name] for name in implementation.argnames]
            answer, error = plugin_faults.attempt(implementation.function, *given)
            if error is not None:
                plugin_faults.report(f"plugin {implementation.plugin_name}", hook, error)
                continue
            yield answer

    def listed(self, hook: str, wanted: type[T]) -> list[T]:
        """What all plugins list in answer to a hook, in the order of loading.

        Raises:
            PluginError: something else than ``wanted`` is among it.
        """
        found = []
        for answer in reversed(list(self.ask_each(hook))):
            for item in answer:
                if not isinstance(item, wanted):
                    whole = f"{wanted.__module__}.{wanted.__name__}"
                    raise PluginError(f"a plugin lists a {type(item).__name__}, not a {whole}, in {hook}")
                found.append(item)
        return found

    def infos(self) -> tuple[BackendInfo, ...]:
        """The public listing."""
        return tuple(self._info(r) for r in self.backends().values())

    @staticmethod
    def _info(registered: Registered) -> BackendInfo:
        b = registered.backend
        gone = missing(b, again=True)
        return BackendInfo(
            name=b.name,
            version=b.version,
            distribution=registered.distribution,
            kinds=tuple(b.kinds),
            ops=tuple(b.ops),
            available=not gone,
            missing=tuple(f"{what}; to get it: {remedy}" for _, what, remedy in gone),
            summary=b.summary,
        )

    # --- changing what there is ---

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the set of backends, or what they are known to miss, changes."""
        self._listeners.append(listener)

    def reset(self) -> None:
        """Forget everything; plugins are found and loaded again at the next use."""
        with self._lock:
            self._clear()
        self.changed()

    @contextlib.contextmanager
    def without(self, names: Iterable[str]) -> Iterator[None]:
        """Inside the ``with`` block, plugins of these names are not loaded: plugins are found again without them."""
        before = self._skipped
        self._skipped = before | frozenset(names)
        try:
            if self._skipped != before:
                self.reset()
            yield
        finally:
            self._skipped = before

    def register(self, plugin: Any, name: str) -> None:
        """Add a plugin object by hand, for tests and notebooks. Raises :class:`PluginError` if it is unusable."""
        with self._lock:
            self._load()
            record = self._adopt(plugin, name, BY_HAND, 0.0)
            self._plugins.append(record)
        self.changed()
        if record.problem:
            raise PluginError(f"plugin {name}: {record.problem}\n{record.detail}".rstrip())

    def unregister(self, name: str) -> None:
        """Take a plugin out again; of one that was rejected, the row that says so."""
        with self._lock:
            self._load()
            if name in self._distributions:
                self._forget(name)
            elif not any(p.name == name and p.distribution == BY_HAND for p in self._plugins):
                raise PluginError(f"no plugin named {name!r} is registered")
            self._backends = {k: r for k, r in self._backends.items() if r.plugin != name}
            self._plugins = [p for p in self._plugins if p.name != name]
        self.changed()

    def changed(self) -> None:
        """Tell every listener that the set of backends, or what they miss, has changed."""
        for listener in tuple(self._listeners):
            listener()

    # --- loading ---

    def _load(self) -> None:
        if self._loaded:
            return
        with self._lock:
            if self._loaded:
                return
            self._clear()  # an interrupt may have left an earlier attempt half done
            self._manager = _manager()
            disabled = config.get().disabled_plugins | self._skipped
            for module in BUILTIN_PLUGINS:
                self._load_one(module, OWN_DISTRIBUTION, functools.partial(importlib.import_module, module))
            entries, unreadable = third_parties()
            self._plugins += unreadable
            for distribution, entry in entries:
                if entry.name in disabled or "all" in disabled:
                    self._plugins.append(PluginRecord(entry.name, distribution, 0.0, (), disabled=True))
                else:
                    self._load_one(entry.name, distribution, entry.load)
            self._loaded = True

    def _load_one(self, name: str, distribution: str, load: Callable[[], Any]) -> None:
        start = time.perf_counter()
        with _stdout_to_stderr(), _named_when_slow(name, distribution):
            plugin, error = plugin_faults.attempt(load)
        seconds = time.perf_counter() - start
        if error is not None:  # the doctor shows it whole
            self._plugins.append(_failed(name, distribution, seconds, "failed to import", error))
            return
        self._plugins.append(self._adopt(plugin, name, distribution, seconds))

    def _adopt(self, plugin: Any, name: str, distribution: str, seconds: float) -> PluginRecord:
        """Register a loaded plugin and its backends."""
        if name in self._distributions:
            text = f"plugin name conflict: {name!r} comes from both {self._distributions[name]} and {distribution}"
            return PluginRecord(name, distribution, seconds, (), text)
        found, error = plugin_faults.attempt(self._declared, plugin, name, distribution)
        if error is not None:
            self._forget(name)
            return _failed(name, distribution, seconds, "failed to list its backends", error)
        if isinstance(found, str):
            return PluginRecord(name, distribution, seconds, (), found)
        accepted, problems, usable = found
        if not usable:
            self._forget(name)  # hooks of a rejected plugin must not be called
        # A new dictionary: other threads may be going through the old one.
        taken = {backend.name: Registered(backend, name, distribution) for backend in accepted}
        self._backends = {**self._backends, **taken}
        limit = config.get().plugin_import_limit
        if seconds > limit and distribution != OWN_DISTRIBUTION:
            problems.append(f"slow import: {seconds:.1f} s, more than the limit of {limit:g} s")
        return PluginRecord(name, distribution, seconds, tuple(b.name for b in accepted), "; ".join(problems))

    def _declared(
        self, plugin: Any, name: str, distribution: str
    ) -> str | tuple[list[Backend], list[str], bool]:
        """Register a plugin with pluggy and look at what it declares.

        Returns:
            Its usable backends, its problems, and whether its hooks may be called; or why it is no plugin of its own.
        """
        if (other := self._manager.get_name(plugin)) is not None:
            return f"is the same object as plugin {other!r} of {self._distributions[other]}"
        self._manager.register(plugin, name=name)
        self._distributions[name] = distribution
        with _stdout_to_stderr():
            backends = self._backends_of(name)
        problems, more = self._hook_problems(plugin, backends)
        accepted: list[Backend] = []
        for backend in backends:
            if objection := self._objection(backend, distribution, accepted):
                problems.append(objection)
            else:
                accepted.append(backend)
        return accepted, problems, bool(accepted) or (more and not backends)

    def _forget(self, name: str) -> None:
        """Take a plugin out of pluggy, however far it had come."""
        self._distributions.pop(name, None)
        if self._manager.has_plugin(name):
            self._manager.unregister(name=name)

    def _hook_problems(self, plugin: Any, backends: list[Backend]) -> tuple[list[str], bool]:
        """Find hooks of unknown names, and plugins that do nothing: most likely misspellings.

        Returns:
            What is wrong, and whether there are hooks beside ``kdacore_backends``.
        """
        callers = self._manager.get_hookcallers(plugin) or []
        known = [c.name for c in callers if c.has_spec()]
        unknown = [
            c.name
            for c in callers
            if not c.has_spec() and any(i.plugin is plugin and not i.optionalhook for i in c.get_hookimpls())
        ]
        hooks = list_names(name for name, c in vars(self._manager.hook).items() if c.has_spec())
        more = any(name != "kdacore_backends" for name in known)
        problems = []
        if unknown:
            problems.append(f"implements {list_names(unknown)}; kdacore's hooks are {hooks}")
        elif not known:
            problems.append(
                f"implements no hook of kdacore ({hooks}), marked with kdacore.hookspecs.hookimpl"
            )
        elif not backends and not more:
            problems.append("brings no backend and no other hook")
        return problems, more

    def _backends_of(self, plugin_name: str) -> list[Backend]:
        """Ask one plugin alone, so that one that raises does not silence the others."""
        found: list[Backend] = []
        for implementation in self._manager.hook.kdacore_backends.get_hookimpls():
            if implementation.plugin_name == plugin_name:
                given = cast(Iterable[Backend], implementation.function())
                found.extend(itertools.islice(given, MOST_BACKENDS + 1))
        if len(found) > MOST_BACKENDS:
            raise PluginError(f"lists more than {MOST_BACKENDS} backends")
        return found

    def _objection(self, backend: Backend, distribution: str, accepted: list[Backend]) -> str:
        """Why a backend cannot be registered next to those ``accepted`` from its plugin; empty when it can."""
        if not isinstance(backend, Backend):
            return f"declares a {type(backend).__name__}, not a kdacore.types.Backend"
        if backend.api_version != API_VERSION:
            return (
                f"backend {backend.name!r} was written for plugin API {backend.api_version}; "
                f"this kdacore has {API_VERSION}"
            )
        if distribution != OWN_DISTRIBUTION:  # a test holds our own to it
            from kdacore import plugin_validation

            if wrong := plugin_validation.objection(backend):
                return wrong
        if backend.name in self._backends:
            other = self._backends[backend.name].distribution
            return f"name conflict: backend {backend.name!r} comes from both {other} and {distribution}"
        if any(b.name == backend.name for b in accepted):
            return f"name conflict: declares two backends named {backend.name!r}; the first is used"
        return ""


def _stdout_to_stderr() -> contextlib.AbstractContextManager[Any]:
    """Send what a plugin prints while it is loaded to stderr: stdout may carry JSON."""
    return contextlib.redirect_stdout(sys.stderr)


def _manager() -> pluggy.PluginManager:
    import pluggy  # with the first use of the registry: `import kdacore` stays light

    from kdacore import hookspecs

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


@contextlib.contextmanager
def _named_when_slow(name: str, distribution: str) -> Iterator[None]:
    """Say which plugin is being imported once that takes longer than the limit: it may never end."""
    if distribution == OWN_DISTRIBUTION:
        yield
        return
    limit = config.get().plugin_import_limit
    timer = threading.Timer(min(limit, threading.TIMEOUT_MAX), _say_slow, (name, distribution, limit))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_slow(name: str, distribution: str, limit: float) -> None:
    import logging

    said = "plugin %s of %s is still being imported after %g s; KDACORE_DISABLE_PLUGINS=%s leaves it out"
    logging.getLogger("kdacore").warning(said, name, distribution, limit, name)


Entries = list[tuple[str, "importlib.metadata.EntryPoint"]]


def third_parties() -> tuple[Entries, list[PluginRecord]]:
    """Entry points with the distributions they come from, in a stable order; and those that cannot be read."""
    import importlib.metadata

    unreadable: list[PluginRecord] = []
    try:
        entries = list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
    except ValueError:  # one file is no UTF-8, or no entry points: ask each distribution by itself
        entries = []
        for distribution in importlib.metadata.distributions():
            try:
                entries += distribution.entry_points.select(group=ENTRY_POINT_GROUP)
            except ValueError as error:
                text = f"its entry_points.txt cannot be read: {error!r}"
                name = distribution.metadata["Name"] or "(unknown distribution)"
                unreadable.append(PluginRecord("(entry points)", name, 0.0, (), text))
    # Metadata may be broken: then there is no name, whatever the type says.
    named = [((e.dist.name if e.dist is not None else "") or "(unknown distribution)", e) for e in entries]
    return sorted(named, key=lambda pair: (pair[0], pair[1].name)), unreadable


def _failed(name: str, distribution: str, seconds: float, problem: str, error: BaseException) -> PluginRecord:
    problem = f"{problem}: {plugin_faults.shown(error)}"
    return PluginRecord(name, distribution, seconds, (), problem, plugin_faults.traceback_of(error))


_answers: dict[int, tuple[Requirement, str | None]] = {}
"""What probes have answered since the set of backends last changed, by the requirement's identity: a plugin's probe
need not be hashable. The requirement is kept alive, so its identity stays its own."""


def _forget_answers() -> None:
    """Ask every probe again. A new dictionary: a probe that is being asked may answer into the old one."""
    global _answers
    _answers = {}


def missing(
    backend: Backend, *, hardware: bool | None = None, again: bool = False
) -> list[tuple[str, str, str]]:
    """What a backend misses on this machine: requirement, what is missing, remedy.

    A probe is asked once and its answer kept until the set of backends changes, as :func:`kdacore.config.refresh` makes
    it do: every call of a new kind wants to know. One that raised is asked again.

    Args:
        backend: the backend.
        hardware: only what belongs to the machine (True) or to its software (False).
        again: ask all the same. Where something has been installed since, or removed, calls find out as well.
    """
    found, changed, kept = [], False, _answers
    for requirement in backend.requirements:
        if hardware is not None and requirement.hardware is not hardware:
            continue
        known = None if again else kept.get(id(requirement))
        if known is None:
            what, fault = probe(requirement)
            before = kept.get(id(requirement))
            changed = changed or (before is not None and before[1] != what)
            if not fault:
                kept[id(requirement)] = requirement, what
        else:
            what = known[1]
        if what is not None:
            found.append((requirement.name, what, requirement.remedy))
    if changed:
        REGISTRY.changed()
    return found


def all_answered(backend: Backend) -> bool:
    """Whether :func:`missing` asks none of the backend's probes again until the set of backends changes."""
    return all(id(requirement) in _answers for requirement in backend.requirements)


def probe(requirement: Requirement) -> tuple[str | None, str]:
    """What is missing, None when nothing is; and the traceback of a probe that failed to say. Asked in any case."""
    what, error = plugin_faults.attempt(requirement.probe)
    if error is None and not isinstance(what, str | None):
        error = TypeError(f"a probe answers None or a str, not {plugin_faults.shown(what)}")
    if error is not None:  # what it should have found counts as missing
        raised = plugin_faults.shown(error)
        return f"its probe raised {raised}", f"a probe raised {raised}\n{plugin_faults.traceback_of(error)}"
    return what, ""


def implementation(registered: Registered, op: str) -> OpImpl:
    """A backend's implementation of an op."""
    return registered.backend.ops[op]


REGISTRY = Registry()
REGISTRY.on_change(_forget_answers)
config.on_refresh(REGISTRY.reset)
config.renew_in_child(REGISTRY.renew_lock)

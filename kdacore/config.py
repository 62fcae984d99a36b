"""Every environment variable kdacore reads, parsed and validated in one place.

The environment is read once, at the first use; call :func:`refresh` after changing it in a running process.
docs/guide/environment.md lists the same variables, and a test holds the two together.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kdacore.errors import ConfigError

VARIABLES: dict[str, str] = {
    "KDACORE_BACKEND": "preference order of backends, comma-separated; the first that can serve a call runs it",
    "KDACORE_DISABLE_PLUGINS": "plugins not to load, comma-separated (entry-point names); 'all' for every third party",
    "KDACORE_BATCH_INVARIANT": "'1': only implementations that give a sequence the same bits alone and with others",
    "KDACORE_VALIDATE": "'shapes' (default) or 'values': also read and check tensor contents, which syncs the device",
    "KDACORE_CP_CHECK": "'first' (default) or 'always': which calls with cp= compare their arguments across ranks",
    "KDACORE_CACHE_DIR": "folder for built kernels, self-check records and those of kdacore verify",
    "KDACORE_ARCH": "architecture to assume when none can be probed, for example sm_90 or v5e",
    "KDACORE_SELFCHECK": "'1' (default) or '0': self-check compiled-only kernels before auto may choose them",
    "KDACORE_PLUGIN_IMPORT_LIMIT": "seconds a plugin may take to import before the doctor reports it (default 2)",
    "KDACORE_CUDA_EVERY_LANE": "'1' compiles CUDA kernels whose every lane arrives at barriers, for racecheck",
    "KDACORE_PALLAS_INTERPRET": "'1' lets backend='pallas' run on any device in interpret mode ('0' by default)",
    "KDACORE_INTEGRATIONS": "integrations to activate where their host asks its plugins, comma-separated",
    "FLA_KDACORE": "'1' (default) or '0': whether the integration with flash-linear-attention takes any call",
    "KDACORE_FLA_MODULES": "'1' (default) or '0': FLA's convolution and gated norm in models of transformers",
}

INTEGRATIONS = ("fla", "sglang", "transformers", "vllm")
"""Names that ``KDACORE_INTEGRATIONS`` may hold: modules of ``kdacore.integrations``."""


@dataclass(frozen=True, slots=True)
class Config:
    """The parsed environment."""

    backend: tuple[str, ...]
    disabled_plugins: frozenset[str]
    batch_invariant: bool
    validate_values: bool
    cp_check_always: bool
    cache_dir: Path
    arch: str
    selfcheck: bool
    plugin_import_limit: float
    cuda_every_lane: bool
    pallas_interpret: bool
    integrations: tuple[str, ...]
    fla_kdacore: bool
    fla_modules: bool


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_TARGET = re.compile(r"sm_?([1-9][0-9]{1,2})[af]?", re.IGNORECASE)
GPU_ARCHITECTURES = {
    **dict.fromkeys(("A30", "A100", "A800"), "sm_80"),
    **dict.fromkeys(("L4", "L20", "L40", "L40S"), "sm_89"),
    **dict.fromkeys(("H20", "H100", "H200", "H800", "GH200"), "sm_90"),
    **dict.fromkeys(("B200", "GB200"), "sm_100"),
    **dict.fromkeys(("B300", "GB300"), "sm_103"),
}
"""NVIDIA's data centre GPUs by the name of the model in the driver's name for them. Compute capabilities are those of
https://developer.nvidia.com/cuda-gpus."""


def device_arch(name: str) -> str:
    """The architecture that a name stands for: itself, a compiler's target for it (``sm_90a`` -> ``sm_90``) or a GPU
    (``H200`` -> ``sm_90``). Other names are returned as they are."""
    target = _TARGET.fullmatch(name)
    return f"sm_{target[1]}" if target else GPU_ARCHITECTURES.get(name.upper(), name)


def _flag(env: Mapping[str, str], name: str, default: str) -> bool:
    text = env.get(name, default).strip()
    if text not in ("0", "1"):
        raise ConfigError(name, text, "'0' or '1'")
    return text == "1"


def _integrations(env: Mapping[str, str]) -> tuple[str, ...]:
    text = env.get("KDACORE_INTEGRATIONS", "")
    names = _names(text)
    if not set(names) <= set(INTEGRATIONS):
        raise ConfigError("KDACORE_INTEGRATIONS", text, f"names out of {', '.join(INTEGRATIONS)}")
    return names


_OTHER_FOLDERS = ("darwin", "win32")
"""Systems whose caches are elsewhere than the XDG specification has them."""


def _cache_dir(env: Mapping[str, str]) -> Path:
    if given := env.get("KDACORE_CACHE_DIR", "").strip():
        try:
            return Path(given).expanduser()
        except RuntimeError:
            raise ConfigError("KDACORE_CACHE_DIR", given, "a folder, of a user who exists") from None
    base = env.get("XDG_CACHE_HOME", "").strip()
    if not base and sys.platform in _OTHER_FOLDERS:
        from platformdirs import user_cache_path  # here: it takes milliseconds to import

        return user_cache_path("kdacore", appauthor=False)
    try:
        # The XDG specification has relative folders ignored.
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kdacore"
    except RuntimeError:  # neither HOME nor an entry in the list of users, as in some containers
        import tempfile  # here: it takes 4 ms to import

        # Windows has no numbers for users; its folder for temporary files is the user's own.
        user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
        return Path(tempfile.gettempdir()) / f"kdacore{user}"


def parse(env: Mapping[str, str]) -> Config:
    """Parse an environment. Raises :class:`ConfigError` naming the variable at fault."""
    validate = env.get("KDACORE_VALIDATE", "shapes").strip()
    if validate not in ("shapes", "values"):
        raise ConfigError("KDACORE_VALIDATE", validate, "'shapes' or 'values'")
    cp_check = env.get("KDACORE_CP_CHECK", "first").strip()
    if cp_check not in ("first", "always"):
        raise ConfigError("KDACORE_CP_CHECK", cp_check, "'first' or 'always'")
    limit_text = env.get("KDACORE_PLUGIN_IMPORT_LIMIT", "2").strip()
    try:
        limit = float(limit_text)
    except ValueError:
        raise ConfigError("KDACORE_PLUGIN_IMPORT_LIMIT", limit_text, "a number of seconds") from None
    if not limit > 0:
        raise ConfigError("KDACORE_PLUGIN_IMPORT_LIMIT", limit_text, "a positive number of seconds")
    return Config(
        backend=_names(env.get("KDACORE_BACKEND", "")),
        disabled_plugins=frozenset(_names(env.get("KDACORE_DISABLE_PLUGINS", ""))),
        batch_invariant=_flag(env, "KDACORE_BATCH_INVARIANT", "0"),
        validate_values=validate == "values",
        cp_check_always=cp_check == "always",
        cache_dir=_cache_dir(env),
        arch=device_arch(env.get("KDACORE_ARCH", "").strip()),
        selfcheck=_flag(env, "KDACORE_SELFCHECK", "1"),
        plugin_import_limit=limit,
        cuda_every_lane=_flag(env, "KDACORE_CUDA_EVERY_LANE", "0"),
        pallas_interpret=_flag(env, "KDACORE_PALLAS_INTERPRET", "0"),
        integrations=_integrations(env),
        fla_kdacore=_flag(env, "FLA_KDACORE", "1"),
        fla_modules=_flag(env, "KDACORE_FLA_MODULES", "1"),
    )


def unknown() -> tuple[str, ...]:
    """Variables of the environment that look like ours and are not: a misspelling, most likely."""
    return tuple(sorted(n for n in os.environ if n.startswith("KDACORE_") and n not in VARIABLES))


_lock = threading.Lock()
_config: Config | None = None


def renew_in_child(renew: Callable[[], None]) -> None:
    """Call ``renew``, which replaces a lock by a new one, in every child that is forked from now on.

    A thread that held the lock in the parent is not there to release it.
    """
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=renew)


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


renew_in_child(_renew_lock)
_listeners: list[Callable[[], None]] = []


def get() -> Config:
    """The configuration of this process, read from the environment at the first call."""
    global _config
    config = _config
    if config is None:
        with _lock:
            if _config is None:
                _config = parse(os.environ)
            config = _config
    return config


def refresh() -> Config:
    """Read the environment again and drop everything that was derived from the old one."""
    global _config
    parsed = parse(os.environ)
    with _lock:
        _config = parsed
    for listener in tuple(_listeners):
        listener()
    return parsed


def on_refresh(listener: Callable[[], None]) -> None:
    """Call ``listener`` after every :func:`refresh` (caches register themselves here)."""
    _listeners.append(listener)

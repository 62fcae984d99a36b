"""Packages with vLLM's names, whose functions have the published signatures and say that vLLM computed."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from published_sources import FACTS

from kdacore.integrations import vllm

PUBLISHED: dict[str, Any] = json.loads(FACTS.read_text())["vllm"]
BY_VLLM = "computed by vLLM"


def source(name: str, function: str) -> str:
    """A definition named ``name`` with the signature of a published function, whose name ends so."""
    (rows,) = [rows for full, rows in PUBLISHED["functions"].items() if full.endswith(function)]
    # Defaults may name things of the module, and the results of these functions do not depend on them.
    parameters = [f"**{n}" if kind == "others" else f"{n}={d}" if d else n for kind, n, d in rows]
    return f"def {name}({', '.join(parameters)}):\n    return {BY_VLLM!r}\n"


@contextmanager
def packages(folder: Path, sources: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Modules by name, imported from ``folder`` once vLLM's hooks were activated, and forgotten afterwards."""
    for module, text in sources.items():
        place = folder.joinpath(*module.split("."))
        place.mkdir(parents=True)
        (place / "__init__.py").write_text(text)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    vllm.activate()
    try:
        yield {module: importlib.import_module(module) for module in sources}
    finally:
        vllm.deactivate()
        sys.path.remove(str(folder))
        for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
            del sys.modules[name]


class Counts:
    """Calls of one hooked function that were served and declined since this was made."""

    def __init__(self, function: str) -> None:
        self.function = function
        self._before = self._now()

    def _now(self) -> Any:
        (hook,) = [h for h in vllm.status() if h.function == self.function]
        return hook

    @property
    def served(self) -> int:
        return self._now().served - self._before.served

    @property
    def declined(self) -> int:
        return self._now().declined - self._before.declined

    @property
    def reason(self) -> str:
        return self._now().reason

"""The ``kdacore`` command. Each subcommand's module is imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from kdacore import streams
from kdacore.cli.time_limit import terminated_as_interrupted
from kdacore.errors import (
    BackendBuildError,
    ConfigError,
    ContractError,
    PluginError,
    UnsupportedError,
    did_you_mean,
)
from kdacore.version import __version__

COMMANDS = {
    "demo": ("kdacore.cli.demo", "run KDA over a real text and check it against the oracle"),
    "doctor": ("kdacore.cli.doctor", "say what is installed, what works and what would make the rest work"),
    "bench": ("kdacore.cli.bench", "time the ops, after checking that they are right"),
    "explain": ("kdacore.cli.explain", "say which backend would serve a call, and why not the others"),
    "verify": ("kdacore.cli.verify", "run the conformance suite on this machine and record it"),
    "build": ("kdacore.cli.build", "compile backends' kernels ahead of time"),
    "tune": ("kdacore.cli.tune", "measure which backend and which launch configurations are fastest here"),
    "plugins": ("kdacore.cli.plugins", "list every plugin and the backends it brings"),
}
USAGE, FAILED, INTERRUPTED = 2, 1, 130
WIDTH = 100
_WRAPPING: dict[str, Any] = {
    "subsequent_indent": "  ",
    "break_long_words": False,
    "break_on_hyphens": False,
}


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser; only the chosen subcommand's own arguments are loaded (all of them for None)."""
    parser = _Parser(prog="kdacore", description="Kimi Delta Attention behind one API: look, check, measure.")
    parser.add_argument("--version", action="version", version=f"kdacore {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if chosen in (None, name):
            importlib.import_module(module).add_arguments(sub)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are short and name what an unknown word may have meant. Subcommands have their own."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in few lines: the usage of ``explain`` alone would take fifteen."""
        words = [action.metavar or action.dest for action in self._get_positional_actions()]
        usage = " ".join([self.prog, *[str(word) for word in words if word], "[options]"])
        lines = [f"usage: {usage}; {self.prog} --help lists them", f"{self.prog}: error: {message}"]
        self.exit(USAGE, "".join(f"{textwrap.fill(line, WIDTH, **_WRAPPING)}\n" for line in lines))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            meant = did_you_mean(value, [str(choice) for choice in action.choices or ()])
            raise argparse.ArgumentError(action, error.message + meant) from None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, rest = super().parse_known_args(args, namespace)
        if rest:  # here: by the subcommand's parser, which knows its switches
            words = [word for word in rest if word.startswith("--")]
            switches = [s for action in self._actions for s in action.option_strings]
            meant = did_you_mean(words[0].partition("=")[0], switches) if words else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
        return known, rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: fine; 1: something is broken or wrong; 2: the command makes no sense."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), "")
    name = f"kdacore {chosen}" if chosen in COMMANDS else "kdacore"
    status = FAILED
    try:
        with streams.for_readers():
            status = _run(words, chosen, name)
    except (
        OSError
    ) as error:  # a file or folder that cannot be written or read, a full disk: the error names it
        _say(f"{name}: {error}")
        status = status or FAILED
    return status


def _run(words: list[str], chosen: str, name: str) -> int:
    parser = build_parser(chosen)
    if chosen and chosen not in COMMANDS:
        there = f"there are {', '.join(COMMANDS)}"
        meant = "; did you mean '--version'?" if chosen == "version" else did_you_mean(chosen, COMMANDS)
        parser.error(f"no command {chosen!r}; {there}{meant}")
    args = parser.parse_args(words)
    run = importlib.import_module(COMMANDS[args.command][0]).run
    try:
        with terminated_as_interrupted():
            status: int = run(args)
        return status
    except (ContractError, ConfigError) as error:
        _say(f"{name}: {error}")
        return USAGE
    except (UnsupportedError, BackendBuildError, PluginError) as error:
        _say(f"{name}: {error}")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _say(text: str) -> None:
    if sys.stderr is not None:  # which the shell may have closed
        print(text, file=sys.stderr)

"""A command line as overrides and flags, split by Hydra's own argument parser."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from common.errors import UserError

RERUN_FLAGS = ("--config-path", "--config-name", "--experimental-rerun")  # Hydra's ways to compose from the inside of a run directory


def parse_argv(argv: list[str], settings: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return (overrides, flags). Flags are spelled out, with the value behind `=`: `-cjob` becomes `--cfg=job`.

    Raises UserError for a flag that Hydra does not have; the message for a known name of `settings`, as in `--epochs 3`, gives the override.
    """
    parser = get_args_parser()

    def fail(message: str) -> NoReturn:
        raise UserError(f"invalid flag: {message}", " ".join(argv), "--hydra-help lists the flags and their values, e.g. --cfg=job")

    parser.error = fail  # type: ignore[method-assign]  # the parser would print a usage text
    for index, (arg, following) in enumerate(itertools.pairwise(argv)):
        if arg in ("--info", "-i") and "=" in following:  # the parser would take the override for the topic of --info
            argv = [*argv[:index], "--info=all", *argv[index + 1 :]]
    args, unknown = parser.parse_known_intermixed_args(argv)
    for flag in unknown:
        name, _, value = flag.lstrip("-").partition("=")
        value = value or next((arg for arg in argv[argv.index(flag) + 1 :][:1] if "=" not in arg and not arg.startswith("-")), "")  # --epochs 3
        key = next((key for key in settings if name.replace("-", "_") in (key, key.rsplit(".", 1)[-1])), None)
        if key and flag.startswith("--"):
            raise UserError(f"{flag} is not a flag; settings are given without dashes", flag, f"{key}={value or '<value>'}")
        raise UserError("unknown flag", flag, "--help lists the settings, --hydra-help the flags")
    given = {name: value for name, value in vars(args).items() if name != "overrides" and value not in (None, False)}
    return args.overrides, [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in given.items()]


def flag_value(flags: list[str], name: str) -> str | None:
    """Return the value of a flag of `parse_argv`, "" for a flag without one, None where it is not given."""
    return next((flag.partition("=")[2] for flag in flags if flag.partition("=")[0] == name), None)


def has_flag(flags: list[str], *names: str) -> bool:
    return any(flag_value(flags, name) is not None for name in names)

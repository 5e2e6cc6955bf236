"""Checks of setting values, shared by the settings' dataclasses. Each raises UserError with the setting, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Collection

from common.errors import UserError, did_you_mean


def check_choice(setting: str, value: object, allowed: Collection[str]) -> None:
    if value not in allowed:
        fix = did_you_mean(str(value), allowed, f"e.g. {setting}={next(iter(allowed))}")
        raise UserError(f"{setting} must be one of {', '.join(allowed)}, got {value}", f"{setting}={value}", fix)


def check_at_least(setting: str, value: float, minimum: float, example: object) -> None:
    """`example`: an allowed value, for the fix."""
    if not value >= minimum:  # also refuses NaN
        raise UserError(f"{setting} must be at least {minimum}, got {value}", f"{setting}={value}", f"e.g. {setting}={example}")


def check_fraction(setting: str, value: float, example: float) -> None:
    """Refuse a value outside [0, 1]. `example`: an allowed value, for the fix."""
    if not 0 <= value <= 1:
        raise UserError(f"{setting} must be in [0, 1], got {value}", f"{setting}={value}", f"e.g. {setting}={example}")

"""Errors of wsync as ranks tell them to a test."""

from __future__ import annotations

from collections.abc import Callable

import wsync


def error_of(act: Callable[[], object]) -> str:
    """Class and text of the error that a call raises; "" for none."""
    try:
        act()
    except wsync.WsyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""

"""MLA_OPS_LOG: the logger `mla_ops` on stderr, for whoever has no logging of their own."""

from __future__ import annotations

import logging
import os

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO}

_handler: logging.Handler | None = None


def follow_environment() -> None:
    """Log to stderr as MLA_OPS_LOG says; once, however often it is called.

    Raises ValueError where it says neither debug nor info.
    """
    global _handler
    wanted = os.environ.get("MLA_OPS_LOG")
    if not wanted:
        return
    if wanted not in LEVELS:
        raise ValueError(f"MLA_OPS_LOG must be one of {', '.join(LEVELS)}, got {wanted!r}")
    logger = logging.getLogger("mla_ops")
    logger.setLevel(LEVELS[wanted])
    if _handler is None:
        _handler = logging.StreamHandler()
        _handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
        logger.addHandler(_handler)

from __future__ import annotations

from .command_line import echo2

__all__ = ["echo2"]

"""A daemon may open as many files as the system allows it: each connection is one, also of those
who only knock, and a process without a descriptor left can neither accept nor write.
"""

from __future__ import annotations

import resource
from typing import Final

import structlog

log = structlog.get_logger(__name__)

DESCRIPTORS_WANTED: Final = 8192
"""A fleet of thousands and as many strangers who have not been sent away yet."""


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of open files to the hard one; the limit that holds then.
    Tells when it is below DESCRIPTORS_WANTED."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft != resource.RLIM_INFINITY and soft < DESCRIPTORS_WANTED:
        log.warning(
            "descriptor_limit_low",
            limit=soft,
            reason=f"at most {soft} files and connections can be open at once, and connections "
            f"that say nothing may use them up; allow {DESCRIPTORS_WANTED} (ulimit -Hn, or "
            "LimitNOFILE= of the service)",
        )
    return soft

"""Settings of a running workbench: where it listens, and how much it accepts."""

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from hiddenscope.loading.cache import cache_folder

MEGABYTE = 2**20


@dataclass(frozen=True)
class Settings:
    """Where a workbench listens, which folders it may open, and its limits.

    `ticket` replaces the token for one visit: a browser is started with it, and every
    user of the machine can read the arguments of a process. `root` is the folder below
    which models and states may be opened; without it, none are. `remote` allows another
    address than loopback.

    >>> Settings(token="secret").cookie
    'hiddenscope-8765'
    """

    host: str = "127.0.0.1"
    port: int = 8765
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    ticket: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    root: Path | None = None
    remote: bool = False
    device: str | None = None
    folder: Path = field(default_factory=lambda: cache_folder() / "app")
    request_bytes: int = 4 * MEGABYTE
    upload_bytes: int = 16 * MEGABYTE
    result_bytes: int = 256 * MEGABYTE
    cache_bytes: int = 1024 * MEGABYTE
    queue_length: int = 16
    streams: int = 64
    debug: bool = False

    @property
    def cookie(self) -> str:
        """Return the name of the cookie."""
        # Browsers share cookies between the ports of a machine, so the name has it.
        return f"hiddenscope-{self.port}"

    @property
    def address(self) -> str:
        """Return the address of the page, without the token."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"

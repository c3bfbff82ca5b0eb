"""A lock that one thread may take repeatedly and any thread may release."""

import threading


class PassLock:
    """Lets one thread at a time run passes on a model.

    It may be released by another thread than the one that took it: a generator that
    holds `hs.editing` may be closed by another thread than the one that started it.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock once no other thread holds it; tell whether it was taken."""
        with self._free:
            while self._owner not in (None, threading.get_ident()):
                if not blocking:
                    return False
                self._free.wait()
            self._owner = threading.get_ident()
            self._depth += 1
            return True

    def release(self) -> None:
        """Release the lock, as often as it was taken."""
        with self._free:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._free.notify()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

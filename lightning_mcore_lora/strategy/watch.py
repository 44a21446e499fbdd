"""Failing together: when one process fails, every other ends soon, and says which one it was.

A collective in which one process is missing waits for its time-out, and then names nobody. So each process has a
thread that shows a sign of life in the store through which the processes met, looks at its neighbour's, and at one key
that the first failure is written to.
"""

import contextlib
import os
import re
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

from torch.distributed import PrefixStore, Store

INTERVAL_S = 0.5
#: How long this process may go on by itself after another has failed, most often to raise from a broken collective.
PATIENCE_S = 3.0
_BROKEN_COLLECTIVE = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out", re.IGNORECASE)


class PeerWatch:
    """Watches the other processes of a run from a thread of its own.

    Args:
        store: The store through which the processes met, on a connection that nobody else waits in.
        rank: This process.
        world_size: Number of processes.
        silence: How long a process may show no sign of life.
    """

    def __init__(self, store: Store, rank: int, world_size: int, silence: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._silence_s = silence.total_seconds()
        self._stopped = threading.Event()
        self._failure: str | None = None
        self._set_beat(0)
        self._excepthook_before = sys.excepthook
        sys.excepthook = self._excepthook
        self._at_exit = Finalize(None, self._stop_at_exit, exitpriority=0)
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)
        self._thread.start()

    # -- from the main thread -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Leave in peace: no longer watch, nor be watched."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(2 * INTERVAL_S)  # a sign of life after the farewell would be taken for one
            with contextlib.suppress(RuntimeError):
                self._store.set(f"beat/{self._rank}", "left")
        self._at_exit.cancel()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._excepthook_before

    def _stop_at_exit(self) -> None:
        self.stop()
        if self._rank == 0:
            time.sleep(2 * INTERVAL_S)  # let the others read it, if this process holds the store

    def report(self, error: BaseException) -> None:
        """Tell the others that this process fails with ``error``, and add to it what is known of the cause."""
        if self._stopped.is_set() or getattr(error, "_reported", False):
            return
        error._reported = True  # type: ignore[attr-defined]
        if _BROKEN_COLLECTIVE.search(f"{type(error).__name__}: {error}"):
            cause = self._find_cause()
            error.add_note(cause or "No other process is known to have failed: a collective ran into its time-out.")
            self._write_failure(cause or f"rank {self._rank}: {type(error).__name__}: {_first_line(error)}")
        else:
            self._write_failure(f"rank {self._rank} failed: {type(error).__name__}: {_first_line(error)}")
        self._stopped.set()
        if self._rank == 0:
            time.sleep(2 * INTERVAL_S)  # this process may hold the store: let the others read it

    def _find_cause(self) -> str | None:
        """Who failed: the one that said so, or the ones that show no sign of life for a while."""
        before = self._beats()
        for _ in range(4):
            time.sleep(INTERVAL_S)
            if failure := self._read_failure():
                return failure
        now = self._beats()
        if now is None or before is None:
            return "rank 0, which holds the store, has gone"
        left = [rank for rank, beat in enumerate(now) if beat == b"left"]
        silent = [rank for rank in range(self._world_size) if before[rank] == now[rank] not in (b"", b"left")]
        if silent:
            return f"{_ranks(silent)} stopped without a word (killed, or frozen)"
        return f"{_ranks(left)} had finished already" if left else None

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        self.report(error)
        self._excepthook_before(kind, error, trace)

    # -- from the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        neighbour = (self._rank + 1) % self._world_size
        beats, last, first, heard = 0, b"", b"", time.monotonic()
        while not self._stopped.wait(INTERVAL_S):
            beats += 1
            failure = self._read_failure()
            if failure is None:
                try:
                    self._set_beat(beats)
                    beat = self._read_beat(neighbour)
                    first = self._read_beat(0)
                except RuntimeError:
                    if first == b"left":
                        return  # it had nothing more to do
                    failure = "rank 0, which holds the store, has gone"
                else:
                    if beat != last or beat in (b"", b"left"):
                        last, heard = beat, time.monotonic()
                    elif time.monotonic() - heard > self._silence_s:
                        failure = f"rank {neighbour} showed no sign of life for {self._silence_s:g} s"
                        self._write_failure(failure)
            if failure is not None:
                self._failure = failure
                if self._rank == 0:
                    print(f"[rank 0] {failure}; ending", file=sys.stderr, flush=True)
                if not self._stopped.wait(PATIENCE_S):
                    _end_process(f"[rank {self._rank}] ends because {failure}")
                return

    def _set_beat(self, beat: int) -> None:
        self._store.set(f"beat/{self._rank}", str(beat))

    def _read_beat(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return self._store.get(key) if self._store.check([key]) else b""

    def _beats(self) -> list[bytes] | None:
        try:
            return [self._read_beat(rank) for rank in range(self._world_size)]
        except RuntimeError:
            return None

    def _write_failure(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("failure", "", text)  # the first one stays

    def _read_failure(self) -> str | None:
        try:
            return self._store.get("failure").decode() if self._store.check(["failure"]) else None
        except RuntimeError:
            return self._failure


def watch(store: Store, rank: int, world_size: int, silence: timedelta) -> PeerWatch | None:
    """Start watching; ``None`` in a world of one. Each time that all ranks do is apart from those before."""
    if world_size == 1:
        return None
    entry = store.add(f"mcore_tp/entries/{rank}", 1)
    own = store.clone()  # type: ignore[attr-defined] # a connection that no wait of the main thread blocks
    return PeerWatch(PrefixStore(f"mcore_tp/{entry}", own), rank, world_size, silence)


def _end_process(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

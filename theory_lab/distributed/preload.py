"""What a local worker does before its first batch: it leaves signals to its parent, and imports what batches need."""

from __future__ import annotations

import signal

import theory_lab.distributed.work  # noqa: F401  # now, rather than while a batch waits
from theory_lab.ending import INTERRUPTS, TERMINATIONS

# They may reach the whole process group. Dask ends its workers by SIGKILL, at the latest.
for number in {*INTERRUPTS, *TERMINATIONS}:
    signal.signal(number, signal.SIG_IGN)
# Until here they were blocked: see theory_lab.ending.deferred.
if hasattr(signal, "pthread_sigmask"):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*INTERRUPTS, *TERMINATIONS})

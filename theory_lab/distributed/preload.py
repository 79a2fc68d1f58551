"""What a local worker does before its first batch: it leaves Ctrl-C to its parent, and imports what batches need."""

from __future__ import annotations

import signal

import theory_lab.distributed.work  # noqa: F401  # now, rather than while a batch waits

signal.signal(signal.SIGINT, signal.SIG_IGN)

"""
Commands: `python -m scripts.<name>`. This file runs before torch is imported.

Threads that wait for each other on a CPU spin before they sleep. GNU OpenMP's default, 300,000
rounds, is slow if other processes need the cores. With 30,000, training at depth 4 is as fast on an
idle machine and 1.18 times as fast with one endless loop per core (python -m dev.thread_waits,
medians of 5, 2 cores, 2026-11).
"""

import os
import signal
import sys
from multiprocessing import current_process

os.environ.setdefault("GOMP_SPINCOUNT", "30000")
is_command = sys.argv[0] == "-m" or current_process().name != "MainProcess"  # or started by one
if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the imports, which take seconds, just ends the process; see `config.start`
    signal.signal(signal.SIGINT, signal.SIG_DFL)

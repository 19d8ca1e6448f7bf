"""
How a run ends before its time: exit statuses, and signals turned into a flag.

Knows nothing of what is stopped.
"""

import os
import signal
from typing import Any

PREEMPTED = 75  # exit status of a run that saved and stopped because it was asked to
UNEVALUATED = 76  # of one that trained and saved, but had no memory for its last evaluation
BROKEN = 78  # of a run that its sentinels called broken
HUNG = 77  # of a rank that waited too long for another one


class StoppedWaiting(RuntimeError):
    """What was waited for does not come any more: the run was asked to stop."""


class StopRequest:
    """
    Turns SIGTERM, SIGINT and a lost terminal's SIGHUP into a flag that the loop reads between
    micro-batches.

    A second SIGINT ends the process at once; under nohup SIGHUP goes on meaning nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self.previous[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            os._exit(128 + number)
        self.asked = True

"""Run script command lines in this process, because starting Python takes seconds."""

import runpy
import sys
from typing import NamedTuple

import pytest


class Done(NamedTuple):
    """Exit status and output (stdout, then stderr) of a command."""

    status: int
    text: str


class Command:
    """Runs `python -m scripts.<name> <flags>`, or `dev.<name>`; see the fixture `command`."""

    def __init__(self, patch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
        self.patch, self.capfd = patch, capfd

    def __call__(self, script: str, *flags: str) -> Done:
        self.capfd.readouterr()
        status, module = 0, script if script.startswith("dev.") else f"scripts.{script}"
        with self.patch.context() as patch:
            patch.setattr(sys, "argv", [script, *map(str, flags)])
            patch.setenv("COLUMNS", "1000")  # errors on one line
            patch.delitem(sys.modules, module, raising=False)
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as ended:
                status = int(ended.code or 0)
        captured = self.capfd.readouterr()
        return Done(status, captured.out + captured.err)

    def rejects(self, *command: str) -> str:
        """Return the output of a command that must fail with a user error."""
        status, text = self(*command)
        assert status == 2 and "Traceback" not in text, text[-3000:]
        return text

    def works(self, *command: str) -> str:
        """Return the output of a command that must succeed."""
        status, text = self(*command)
        assert status == 0, text[-3000:]
        return text

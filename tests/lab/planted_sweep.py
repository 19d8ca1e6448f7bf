"""A sweep that starts another Python: python -m tests.lab.planted_sweep <python> <flags>"""

import runpy
import sys

if __name__ == "__main__":
    sys.executable = sys.argv.pop(1)
    runpy.run_module("scripts.lab.sweep", run_name="__main__", alter_sys=True)

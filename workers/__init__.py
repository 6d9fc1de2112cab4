"""The processes, such as ``python -m workers.draft``; ``probe`` measures a machine for a plan."""

import signal
import sys

if sys.argv[0] == "-m":  # one of them starts: Ctrl-C is quiet while it is imported
    signal.signal(signal.SIGINT, signal.SIG_DFL)

"""Signals end a run politely once."""

import os
import signal
import subprocess
import sys

from triax.train.stop import Stop


def test_the_first_signal_is_noted_and_the_second_has_its_usual_meaning():
    before = signal.getsignal(signal.SIGTERM)
    with Stop() as stop:
        assert stop.asked == ""
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal; from triax.train.stop import Stop\n"
        "with Stop():\n"
        "    os.kill(os.getpid(), signal.SIGINT); print('alive', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print('still alive', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert ended.stdout == "alive\n"
    assert ended.returncode == -signal.SIGTERM

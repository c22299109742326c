"""What the machine is told and asked."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from triax import machine

FAULTS = """
import resource, sys
import torch
from triax.machine import keep_freed_memory

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
blocks = [torch.ones(1_000_000) for _ in range(40)]
del blocks
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    blocks = [torch.ones(1_000_000) for _ in range(40)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_the_memory_of_freed_tensors_is_not_faulted_in_again():
    def faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < faults("leave") / 4


def test_f52_the_command_that_installs_an_extra_names_the_checkout_or_else_the_package(monkeypatch, tmp_path):
    root = Path(__file__).parents[1]
    assert machine.install_command("data") == f"pip install -e '{root}[data]'"
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "site-packages" / "triax" / "machine.py"))
    assert machine.install_command("data") == "pip install 'triax[data]'"

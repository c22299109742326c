"""Which implementation of an operation runs."""

import re
from pathlib import Path

import pytest
import torch

import triax
from triax.errors import ConfigError
from triax.kernels.dispatch import VARIABLE, batch_invariant, mode


@pytest.mark.parametrize(("asked", "expected"), [(None, "fast"), ("", "fast"), ("fast", "fast"), ("reference",) * 2])
def test_the_environment_chooses_between_kernels_and_definitions(monkeypatch, asked, expected):
    monkeypatch.delenv(VARIABLE, raising=False)
    if asked is not None:
        monkeypatch.setenv(VARIABLE, asked)
    assert mode() == expected


@pytest.mark.parametrize("asked", ["definition", "1", "REFERENCE", "batch_invariant"])
def test_f68_a_mode_that_is_none_is_refused_with_those_that_are(monkeypatch, asked):
    monkeypatch.setenv(VARIABLE, asked)
    with pytest.raises(ConfigError, match=f"`{asked}`.*`fast` or `reference`"):
        mode()


def test_batch_invariance_holds_inside_its_context_alone_and_puts_threads_and_gradients_back(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with batch_invariant():
            assert mode() == "batch_invariant"
            assert torch.get_num_threads() == 1
            assert not torch.is_grad_enabled()
        assert torch.get_num_threads() == 2
        with batch_invariant(on=False):
            assert mode() == "fast"
            assert torch.is_grad_enabled()
    finally:
        torch.set_num_threads(threads)
    assert mode() == "fast"


def test_operations_choose_and_layers_do_not():
    package = Path(triax.__file__).parent
    sources = {path.relative_to(package): path.read_text() for path in package.rglob("*.py")}
    asking = [path for path, source in sources.items() if re.search(r"\bmode\(\)", source)]
    layers = {path.name for path in asking if path.parts[0] != "kernels"}
    assert layers == {"matrix.py", "memory.py"}  # products laid end to end, and how a memory's sequences advance
    assert not [path for path, source in sources.items() if re.search(r"environ.*TRIAX_KERNELS", source)]

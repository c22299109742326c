"""Miniatures of the released checkpoints."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def miniature():
    """The module `miniature.py` beside this file."""
    spec = importlib.util.spec_from_file_location("miniature", Path(__file__).parent / "miniature.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

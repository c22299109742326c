"""What tests of serving share."""

import jaxtyping
import pytest


@pytest.fixture(scope="module")
def no_shape_checks():
    """Calls that other tests check go by unchecked, which takes a quarter of the time, where there are many of them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)

"""Commands in this process."""

import pytest

from triax.cli.app import main


@pytest.fixture
def triax(capsys):
    """Run one command in this process; give exit status, stdout and stderr."""

    def run(*words):
        try:
            main([str(word) for word in words])
            status = 0
        except SystemExit as end:
            status = end.code or 0
        told = capsys.readouterr()
        return status, told.out, told.err

    return run

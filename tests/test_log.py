import io
import logging
import sys
from pathlib import Path

import pytest

from triax import log


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def quiet_afterwards():
    yield
    for handler in list(logging.getLogger("triax").handlers):
        logging.getLogger("triax").removeHandler(handler)
        handler.close()


def test_words_are_plain_where_there_is_no_terminal():
    stream = io.StringIO()
    log.configure(stream)
    log.logger("train").info("step %d", 3)
    log.logger("train").warning("slow")
    assert stream.getvalue() == "step 3\nwarning: slow\n"


def test_warnings_are_coloured_on_a_terminal_unless_the_user_wants_none(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    log.configure(stream)
    log.logger("data").warning("slow")
    assert stream.getvalue() == "\033[33mwarning:\033[0m slow\n"
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    log.configure(stream)
    log.logger("data").warning("slow")
    assert stream.getvalue() == "warning: slow\n"


def test_configuring_twice_says_things_once(capsys):
    log.configure()
    log.configure()
    log.logger("data").info("once")
    assert capsys.readouterr().err == "once\n"


def test_words_follow_stderr_when_something_takes_it_over(monkeypatch):
    log.configure()
    taken = io.StringIO()
    monkeypatch.setattr(sys, "stderr", taken)
    log.logger("data").info("here")
    assert taken.getvalue() == "here\n"


def test_the_kept_log_has_time_and_room(tmp_path):
    log.configure(io.StringIO(), tmp_path / "log.txt")
    log.logger("data").info("x")
    assert "triax.data INFO x" in (tmp_path / "log.txt").read_text()


def test_a_kept_log_on_a_full_disk_falls_silent_and_disturbs_nothing(capsys):
    log.configure(file=Path("/dev/full"))
    log.logger("data").info("x")
    log.configure()
    assert capsys.readouterr().err == "x\n"


def test_details_are_shown_only_when_asked_for():
    for verbose, expected in ((False, ""), (True, "detail\n")):
        stream = io.StringIO()
        log.configure(stream, verbose=verbose)
        log.logger("data").debug("detail")
        assert stream.getvalue() == expected

"""`triax chat`: a conversation with a server in a terminal, and with a checkpoint in the same process."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from triax.errors import ConfigError
from triax.serve.converse import Conversation
from triax.serve.remote import Remote

from .conftest import called, said


@pytest.fixture
def conversation(server):
    written, thought, told = [], [], []
    one = Conversation(Remote(server.url), written.append, thought.append, told.append)
    one.written, one.thought, one.told = written, thought, told
    yield one
    one.speaker.close()


def test_lines_are_answered_and_remembered(conversation, server):
    first = server.script("c1", said("one", "because"))
    second = server.script("c2", said("two"))
    conversation.hold(["say\\", first, second])
    assert "".join(conversation.written) == "one\ntwo\n"
    assert "".join(conversation.thought).startswith("because")
    words = server.last()["words"]
    assert f"say\n{first}" in words
    assert "because<|close|>think" in words
    assert conversation.told == []


def test_commands_are_not_said(conversation, server):
    name = server.script("c3", said("x"))
    lines = [
        "/help",
        "/effort low",
        "/effort medium",
        "/system be brief",
        "/set temperature=0.5",
        "/set heat=1",
        "/set x",
    ]
    conversation.hold([*lines, "/set", "/nonsense", name, "/new", "/quit", name])
    assert server.last()["temperature"] == 0.5
    assert "thinking_effort=low" in server.last()["words"]
    assert 'role="system"<|sep|>be brief<|close|>' in server.last()["words"]
    assert [line.split()[0] for line in conversation.told] == [
        "TEXT",
        "/effort",
        "/set",
        "/set",
        "temperature=0.5",
        "`/nonsense`",
        "a",
    ]
    assert conversation.messages == []


def test_pictures_go_with_the_next_text(conversation, server, tmp_path):
    from PIL import Image

    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    conversation.hold([f"/image {tmp_path / 'a.png'}", server.script("c4", said("seen")), "/image nowhere.png"])
    assert [item[2] for item in server.last()["media"]] == [1]
    assert "nowhere.png: cannot be read" in conversation.told[0]


def test_calls_are_shown(conversation, server):
    conversation.options["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    conversation.hold([server.script("c5", called(("f", {"a": "1"})))])
    assert 'f {"a": "1"}' in "".join(conversation.thought)
    assert conversation.messages[-1]["tool_calls"][0]["id"] == "functions.f:0"


def test_trouble_is_told_and_the_talk_goes_on(conversation, server):
    broken = server.script("c6", said("words"), break_at=2)
    conversation.hold(["/set temperature=9", "hello", "/set temperature=", broken, server.script("c7", said("fine"))])
    assert "temperature" in conversation.told[0]
    assert "logits" in conversation.told[1]
    assert "fine" in "".join(conversation.written)
    assert len(conversation.messages) == 2


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no.such.host.invalid:80"])
def test_a_server_that_is_not_there_is_told(url):
    with pytest.raises(ConfigError, match="no server answers"):
        Remote(url)


def test_the_command_keeps_its_history(server, tmp_path):
    """In a real terminal: what was typed in one talk comes back with the arrow in the next."""
    name = server.script("c8", said("typed"))
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "dumb", "PYTHON_BASIC_REPL": "1"}

    def hold(keys):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "triax", "chat", server.url]
        seen, end = "", time.monotonic() + 120
        sent = [(re.compile("> $"), keys), (re.compile(r"typed\s+> $"), b"\x04")]
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as child:
            os.close(theirs)
            try:
                while time.monotonic() < end:
                    if select.select([ours], [], [], 0.2)[0]:
                        try:
                            seen += os.read(ours, 4096).decode(errors="replace")
                        except OSError:
                            break
                    if sent and sent[0][0].search(re.sub(r"\x1b\[[\d?]*\w", "", seen)):
                        os.write(ours, sent.pop(0)[1])
                os.close(ours)
                assert child.wait(60) == 0, seen
            finally:
                child.kill()
        return seen

    assert "typed" in hold(f"say {name}\n".encode())
    history = tmp_path / "triax" / "chat_history"
    assert f"say {name}" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    assert "typed" in hold(b"\x1b[A\n")  # the arrow upwards


def test_lines_from_a_pipe_are_answered(server):
    name = server.script("c9", said("piped", "thinking"))
    command = [sys.executable, "-m", "triax", "chat", server.url]
    done = subprocess.run(command, input=f"{name}\n", capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "piped\n")
    assert "thinking" in done.stderr

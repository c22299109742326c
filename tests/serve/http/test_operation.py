"""A server in its surroundings: other users of the machine, half-open connections, signals, stopped engines."""

import asyncio
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import uvicorn

from triax import machine
from triax.serve.http import connection, face
from triax.serve.link import SOCKETS, YOUNG_S, sweep
from triax.serve.request import Sampling

from .conftest import Beside, said


def until(is_so, seconds: float = 60):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


def test_f46_compute_threads_of_server_and_engine_sleep_while_they_wait(start, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    server = start()
    told = Path(f"/proc/{server.engine_pid()}/environ").read_bytes()
    assert b"OMP_WAIT_POLICY=PASSIVE" in told.split(b"\0")


def test_f46_a_policy_of_the_users_own_stays_and_is_told(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    machine.wait_passively()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "OMP_WAIT_POLICY=PASSIVE" in machine.thread_warnings(1, 1)[0]
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert machine.thread_warnings(1, 1) == []
    monkeypatch.delenv("OMP_WAIT_POLICY")
    machine.wait_passively()
    assert machine.waits_passively()


def test_f46_the_policy_is_set_before_torch_is_there():
    words = "import sys, triax.cli.app as app; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", words], check=True)


def told_by(chunks, monkeypatch, patience_s):
    monkeypatch.setattr(face, "SIGN_OF_LIFE_S", patience_s)

    async def source():
        for chunk in chunks:
            yield chunk

    async def read():
        stream = source()
        return [chunk async for chunk in face._with_faults(await anext(stream), stream)]

    return asyncio.run(read())


def test_f47_tokens_that_tell_nothing_are_no_sign_of_life(monkeypatch):
    chunks = [b"a", b"", b"", b"b"]
    assert told_by(chunks, monkeypatch, 0) == [b"a", face.SIGN_OF_LIFE, face.SIGN_OF_LIFE, b"b"]
    assert told_by(chunks, monkeypatch, 1000) == [b"a", b"b"]
    assert told_by([b"", b"b"], monkeypatch, 1000) == [b"b"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_f47_an_answer_past_its_end_streams_on(server, path):
    name = server.script("past", said("x"), per_step=50)
    words = {"input": name} if path.endswith("responses") else {"messages": [{"role": "user", "content": name}]}
    limit = {"max_output_tokens": 500} if path.endswith("responses") else {"max_tokens": 500}
    response = server.post(path, {"model": "m", "stream": True, "ignore_eos": True} | words | limit)
    assert response.status_code == 200
    assert b"\n\n\n\n" not in response.content


def test_f48_a_bias_is_laid_out_once_and_adds_up():
    import torch

    from triax.serve.sampler import Draw, adjusted

    how = Sampling(bias=((1, 2.0), (3, -1.0), (1, 0.5)))
    score, _ = adjusted(torch.zeros(1, 5), [Draw(how, 0.0)])
    assert score[0].tolist() == [0.0, 2.5, 0.0, -1.0, 0.0]
    assert how.bias_columns is how.bias_columns


def test_f48_a_bias_of_the_whole_vocabulary_is_refused(server):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    response = server.post("/v1/chat/completions", body | {"logit_bias": {str(n): 0.5 for n in range(5000)}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")


def test_f49_a_connection_that_never_says_what_it_wants_is_closed(monkeypatch):
    monkeypatch.setattr(connection, "HEADER_S", 0.2)

    async def app(scope, receive, send):
        await asyncio.sleep(0.6)  # a request that is whole may take its time
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def serve():
        config = uvicorn.Config(app, http=connection.HTTP, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        found = []
        for words in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(words)
            found.append(await asyncio.wait_for(reader.read(), 30))
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        found.append(await asyncio.wait_for(reader.readuntil(b"\r\n"), 30))
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        writer.write(b"GET / HTTP/1.1\r\n")  # half of the next one
        found.append(await asyncio.wait_for(reader.read(), 30))
        writer.close()
        server.should_exit = True
        await task
        return found

    assert asyncio.run(serve()) == [b"", b"", b"HTTP/1.1 204 No Content\r\n", b""]


def test_f49_a_lack_of_files_is_one_line(caplog, monkeypatch):
    monkeypatch.setattr(connection, "_told_at", float("-inf"))
    loop = asyncio.new_event_loop()
    for _ in range(100):
        connection.tell_briefly(loop, {"message": "x", "exception": OSError(errno.EMFILE, "too many")})
    assert [record.message.count("ulimit") for record in caplog.records] == [1]
    connection.tell_briefly(loop, {"message": "another fault", "exception": ValueError("x")})
    assert "another fault" in caplog.text
    loop.close()


def test_f49_a_server_opens_as_many_files_as_it_may():
    words = (
        "import resource; from triax.serve.http.connection import *; hard = min(900, resource.getrlimit(7)[1]);"
        "resource.setrlimit(7, (200, hard)); print(most_connections(), resource.getrlimit(7)[0], hard)"
    )
    done = subprocess.run([sys.executable, "-c", words], check=True, capture_output=True, text=True)
    connections, soft, hard = map(int, done.stdout.split())
    assert (connections, soft) == (hard - connection.RESERVED_FILES, hard)


def test_f51_a_client_is_told_that_the_server_shuts_down_and_a_second_signal_is_quiet(start):
    server = start("http.drain_s=60")
    name = server.script("held", said("word " * 50), hold_at=4)
    asked = Beside(server.post, "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": name}]})
    until(lambda: "triax_engine_running 1" in server.get("/metrics").text)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: "got SIGTERM" in server.log.read_text())
    server.process.send_signal(signal.SIGTERM)
    try:
        words = asked.result().text
    except Exception as problem:  # its connection may be closed before it is told
        words = str(problem)
    assert "restarts" not in words
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.log.read_text(), server.log.read_text()


def test_f51_what_still_runs_when_the_time_is_over_is_told_so(start):
    server = start("http.drain_s=0.2")
    name = server.script("held", said("word " * 50), hold_at=4)
    asked = Beside(server.post, "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": name}]})
    until(lambda: "triax_engine_running 1" in server.get("/metrics").text)
    server.process.send_signal(signal.SIGTERM)
    response = asked.result()
    assert response.status_code == 503
    assert "shutting down" in response.json()["error"]["message"]
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.log.read_text(), server.log.read_text()


def test_health_notices_a_stopped_engine(start):
    server = start()
    assert server.get("/health").status_code == 200
    os.kill(server.engine_pid(), signal.SIGSTOP)
    until(lambda: server.get("/health").status_code == 503)
    assert server.get("/health").json()["status"] == "engine stopped"
    os.kill(server.engine_pid(), signal.SIGCONT)
    until(lambda: server.get("/health").status_code == 200)


def test_f52_a_missing_folder_is_called_that():
    done = subprocess.run(
        [sys.executable, "-m", "triax", "serve", "runs/nowhere"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "runs/nowhere: no such folder" in done.stderr


def test_f53_folders_of_killed_servers_are_swept(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = {name: tmp_path / f"{SOCKETS}{name}" for name in ("left", "young", "live")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "0").touch()
    (tmp_path / "triax-other").mkdir()
    old = time.time() - 2 * YOUNG_S
    for name in ("left", "live"):
        os.utime(folders[name], (old, old))
    held = os.open(folders["live"], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        sweep()
    finally:
        os.close(held)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["triax-other", f"{SOCKETS}live", f"{SOCKETS}young"]


def test_f53_a_measurement_that_a_shell_put_into_its_background_can_be_interrupted(server):
    command = [sys.executable, "-m", "triax", "bench", "serve", server.url, "--requests", "1000000", "--prompt", "8"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        until(
            lambda: "SigCgt" in Path(f"/proc/{process.pid}/status").read_text() and catches(process.pid, signal.SIGINT)
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (130, 1, -signal.SIGINT)
    finally:
        process.kill()
        process.wait()


def catches(pid: int, kind: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (kind - 1) & 1)


def test_f53_a_pipe_whose_answers_all_failed_is_told_by_the_exit_status(odd):
    command = [sys.executable, "-m", "triax", "chat", odd.url]
    odd.answer = (500, '{"error": {"message": "broken"}}')
    done = subprocess.run(command, input="hi\nagain\n", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "broken" in done.stderr

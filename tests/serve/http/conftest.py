"""Real servers: `triax serve` in a process of its own, with the scripted engine in another one."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from triax.data.kimi import KimiTokenizer

SCRIPTED = f"{Path(__file__).parent / 'scripted.py'}:scripted"
TEXT = "user system assistant tool message think response tools call argument role type key index string number hello\n"
VISION = {"slot_token": None, "patch": 14, "merge": 2}


def until_ready(log: Path, process: subprocess.Popen, word: str = "ready: ") -> str:
    """Wait until a server says this; returns its address."""
    end = time.monotonic() + 200
    while True:
        is_over = process.poll() is not None or time.monotonic() > end  # before the log, which tells all it said
        if word in (told := log.read_text()):
            return told.split("listening on ")[1].split()[0]
        if is_over:
            raise RuntimeError(f"no server: {told}")
        time.sleep(0.02)


class Beside(threading.Thread):
    """Work beside a test; what goes wrong in it is raised where its result is asked for, never in a later test."""

    def __init__(self, work: Callable, *words) -> None:
        super().__init__(daemon=True)
        self.work, self.words, self.value, self.problem = work, words, None, None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.work(*self.words)
        except BaseException as problem:
            self.problem = problem

    def result(self, timeout_s: float = 120):
        self.join(timeout_s)
        assert not self.is_alive(), f"still at it after {timeout_s} s"
        if self.problem is not None:
            raise self.problem
        return self.value


class Served:
    """A server that runs."""

    def __init__(self, folder: Path, *words: str, engine: str | None = SCRIPTED, wait: bool = True) -> None:
        self.folder = folder
        # certificates take longer to read than most answers; every request has a connection of its own
        self.http = httpx.Client(verify=False, timeout=120, limits=httpx.Limits(max_keepalive_connections=0))
        self.log = folder / "log.txt"
        command = [sys.executable, "-m", "triax", "serve", str(folder), "http.port=0", "http.model_name=m", *words]
        command += ["--engine", engine] if engine else []
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log, env=os.environ | {"NO_COLOR": "1"})
        try:
            self.url = until_ready(self.log, self.process, "ready: " if wait else "listening on ")
        except BaseException:
            self.close()
            raise

    def script(self, name: str, answer: str, **options) -> str:
        """Teach the engine an answer; a prompt that holds what this returns gets it."""
        path = self.folder / "scripts.json"
        scripts = json.loads(path.read_text()) if path.is_file() else {}
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(scripts | {name: {"answer": answer} | options}))
        draft.replace(path)
        return f"@{name}"

    def let_go(self, name: str) -> None:
        """Let a script go on that holds, or the model be loaded (`load`) where `facts` hold that."""
        (self.folder / f"{name}.go").touch()

    def client(self, key: str = "none", **options) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": 120, "http_client": self.http} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def post(self, path: str, tree: object, **options) -> httpx.Response:
        headers = {"content-type": "application/json"} | options.pop("headers", {})
        return self.http.post(f"{self.url}{path}", content=json.dumps(tree), headers=headers, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return self.http.get(f"{self.url}{path}", **options)

    def last(self) -> dict:
        """What the engine got last."""
        return self.get("/v1/cache").json()["last"]

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def stop(self, kind: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(kind)
        try:
            return self.process.wait(100)
        finally:
            self.close()

    def close(self) -> None:
        """End it at once, if it has not ended."""
        self.process.kill()
        self.process.wait()
        self.http.close()


class Kept:
    """A server that many tests share; one that died, or that a failed test may have left in disorder, is replaced."""

    def __init__(self, make: Callable[[], Served]) -> None:
        self.make, self.served = make, None

    def lend(self, item: pytest.Item) -> Iterator[Served]:
        """Lend it to one test."""
        if self.served is not None and self.served.process.poll() is not None:
            self.drop()
        self.served = self.served or self.make()
        yield self.served
        if item.has_failed:
            self.drop()

    def drop(self) -> None:
        if self.served is not None:
            self.served.close()
        self.served = None

    def end(self) -> None:
        """End it as an operator does, and hold it to ending well."""
        if self.served is not None:
            assert self.served.stop() == 0, self.served.log.read_text()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.has_failed = report.failed or (call.when != "setup" and item.has_failed)
    return report


def make_folder(folder: Path, family: str = "k3", **facts) -> Path:
    """Write a tokenizer and what the scripted engine tells of its model."""
    tokenizer = KimiTokenizer.train([TEXT * 40], 300, family=family)
    tokenizer.save(folder)
    if facts.pop("sees", False):
        facts["vision"] = VISION | {"slot_token": tokenizer.control["<|media_pad|>"]}
    (folder / "facts.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="session")
def kept_k3(tmp_path_factory):
    kept = Kept(lambda: Served(make_folder(tmp_path_factory.mktemp("k3"), sees=True)))
    yield kept
    kept.end()


@pytest.fixture(scope="session")
def kept_k2(tmp_path_factory):
    kept = Kept(lambda: Served(make_folder(tmp_path_factory.mktemp("k2"), "k2")))
    yield kept
    kept.end()


@pytest.fixture
def server(kept_k3, request):
    """A server of a K3 model that sees."""
    yield from kept_k3.lend(request.node)


@pytest.fixture
def k2_server(kept_k2, request):
    """A server of a K2 model."""
    yield from kept_k2.lend(request.node)


@pytest.fixture
def start(tmp_path):
    """Start servers with settings of their own; they end with the test."""
    started: list[Served] = []

    def one(*words: str, facts: dict | None = None, folder: Path | None = None, **options) -> Served:
        folder = folder or make_folder(tmp_path / str(len(started)), **(facts or {}))
        started.append(Served(folder, *words, **options))
        return started[-1]

    yield one
    for served in started:
        served.close()


@pytest.fixture
def odd():
    """A server that answers as it is told: `card` to GET, `answer` to POST, each a status and a text."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.tell(*self.server.card)

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.tell(*self.server.answer)

        def tell(self, status, text):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as one:
        one.card, one.answer = (200, json.dumps({"data": [{"id": "x"}]})), (200, "")
        one.url = f"http://127.0.0.1:{one.server_port}"
        thread = threading.Thread(target=one.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def said(answer: str, thought: str = "") -> str:
    """Spell what K3 writes to say this."""
    return (
        f"{thought}<|close|>think<|sep|><|open|>response<|sep|>{answer}<|close|>response<|sep|>"
        "<|close|>message<|sep|><|end_of_msg|>"
    )


def called(*calls: tuple[str, dict], thought: str = "t") -> str:
    """Spell what K3 writes to call tools, all arguments strings."""
    words = f"{thought}<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
    for number, (name, arguments) in enumerate(calls, 1):
        words += f'<|open|>call tool="{name}" index="{number}"<|sep|>'
        for key, value in arguments.items():
            words += f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
        words += "<|close|>call<|sep|>"
    return f"{words}<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"


def tool(name: str, **properties) -> dict:
    """Declare a tool."""
    schema = {"type": "object", "properties": properties or {"a": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


def add_up(stream):
    """Add a stream of chunks up to one message, as a client does."""
    message = {"content": "", "reasoning_content": "", "calls": {}}
    reason, usage, warnings = None, None, []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                told = message["calls"].setdefault(call.index, {"arguments": ""})
                if call.id:
                    told |= {"id": call.id, "name": call.function.name}
                told["arguments"] += call.function.arguments or ""
            reason = choice.finish_reason or reason
            warnings += getattr(choice, "warnings", None) or []
    return message, reason, usage, warnings


@pytest.fixture
def ask(server):
    """Ask the server something that gets a scripted answer."""

    def one(answer: str, text: str = "hi", served: Served = server, **options):
        extra = {name: options.pop(name) for name in ("per_step", "cached") if name in options}
        name = served.script(f"s{abs(hash((answer, str(extra)))) % 10**9}", answer, **extra)
        messages = options.pop("messages", [])
        messages = [*messages, {"role": "user", "content": f"{text} {name}"}]
        return served.client().chat.completions.create(model="m", messages=messages, **options)

    one.said, one.called, one.tool = said, called, tool
    return one

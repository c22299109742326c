"""The real engine behind the server: a small model with random weights, answering as it does in the same process."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from triax.checkpoint.released import save_released
from triax.data.kimi import KimiTokenizer
from triax.model.decoder import Decoder
from triax.serve.open import open_engine

from .conftest import TEXT, Beside, Kept, Served, add_up, tool
from .test_faults import body, figure, until

pytestmark = pytest.mark.slow

SMALL = ("cache.pages=128", "cache.slots=24", "device=cpu")


@pytest.fixture(scope="module")
def folder(t0, tmp_path_factory):
    """A released folder of T0 that speaks K3's format."""
    folder = tmp_path_factory.mktemp("real") / "weights"
    tokenizer = KimiTokenizer.train([TEXT * 40], 300)
    torch.manual_seed(0)
    shape = t0.model_copy(update={"vocab_size": tokenizer.vocab_size, "context_len": 4096})
    save_released(Decoder(shape), folder, dtype=torch.float32)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def kept_real(folder, tmp_path_factory):
    def made():
        pool = tmp_path_factory.mktemp("pool")
        settings = [*SMALL, "is_deterministic=true", f"cache.disk.path={pool}", 'http.admin_keys=["boss"]']
        served = Served(folder, *settings, engine=None)
        served.pool = pool
        return served

    kept = Kept(made)
    yield kept
    kept.end()


@pytest.fixture
def real(kept_real, request):
    """A server of the model, with a pool on disk."""
    yield from kept_real.lend(request.node)


def test_a_stream_is_the_answer_in_one_piece_and_that_of_the_engine(real, folder):
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "logprobs": True, "top_logprobs": 2}
    asked = body("hello", **options, extra_body={"return_token_ids": True, "thinking": {"type": "disabled"}})
    whole = real.client().chat.completions.create(**asked)
    message, reason, _, _ = add_up(real.client().chat.completions.create(**asked, stream=True))
    assert message["content"] == (whole.choices[0].message.content or "")
    assert reason == whole.choices[0].finish_reason
    engine = open_engine(folder, "cpu")
    done = engine.generate([whole.prompt_token_ids], 24, temperature=1.0, top_p=0.95, seed=5)[0]
    assert list(done.tokens) == whole.choices[0].token_ids


def test_the_second_turn_finds_the_first_in_the_cache(real):
    long = "hello there " * 40
    first = real.client().chat.completions.create(**body(long, max_tokens=8))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    again = real.client().chat.completions.create(**body(long, max_tokens=8))
    assert again.usage.prompt_tokens_details.cached_tokens >= 64
    assert real.get("/v1/cache").json()["snapshots"] > 0


def test_answers_keep_to_a_schema_and_calls_to_their_declaration(real):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    asked = {"reasoning_effort": "none", "max_tokens": 200, "seed": 3}
    answer = real.client().chat.completions.create(**body("hi", response_format=form, **asked))
    told = json.loads(answer.choices[0].message.content)
    assert told["b"] in ("x", "y")
    assert 0 <= told["a"] <= 99
    assert "\n" not in answer.choices[0].message.content
    declared = tool("f", a={"enum": ["left", "right"]}) | {}
    declared["function"]["parameters"] |= {"required": ["a"], "additionalProperties": False}
    called = real.client().chat.completions.create(**body("hi", tools=[declared], tool_choice="required", **asked))
    assert called.choices[0].finish_reason == "tool_calls"
    call = called.choices[0].message.tool_calls[0]
    assert (call.function.name, call.id) == ("f", "functions.f:0")
    assert json.loads(call.function.arguments)["a"] in ("left", "right")


def test_a_schema_that_no_answer_fits_is_refused(real):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nonsense"}}}
    response = real.post("/v1/chat/completions", body("hi", response_format=form))
    assert response.status_code == 400
    assert real.post("/v1/chat/completions", body("hi", max_tokens=2)).status_code == 200


def test_a_killed_engine_finds_its_prefixes_on_disk(real):
    long = "user assistant tool " * 60
    real.client().chat.completions.create(**body(long, max_tokens=4))
    until(lambda: not figure(real, "triax_active_requests"))
    until(lambda: len(list(real.pool.glob("*.slot"))) >= real.get("/v1/cache").json()["snapshots"] > 0)
    deaths = figure(real, "triax_engine_deaths")
    os.kill(real.engine_pid(), signal.SIGKILL)
    until(lambda: figure(real, "triax_engine_deaths") == deaths + 1)
    until(lambda: real.get("/health").status_code == 200)
    again = real.client().chat.completions.create(**body(long, max_tokens=4))
    assert again.usage.prompt_tokens_details.cached_tokens >= 64


@pytest.mark.soak
def test_an_engine_killed_under_load_again_and_again_leaves_whole_files_and_wrong_answers_to_nobody(
    start, folder, tmp_path
):
    pool = tmp_path / "pool"
    settings = [*SMALL, "is_deterministic=true", f"cache.disk.path={pool}", "cache.disk.save_s=0.05"]
    served = start(*settings, folder=shutil.copytree(folder, tmp_path / "m"), engine=None)
    texts = [f"{'hello tool ' * (8 + n)} {n}" for n in range(6)]
    told, is_over = [], threading.Event()

    def ask(n):
        """Return an answer; nothing while there is no engine."""
        response = served.post("/v1/chat/completions", body(texts[n], temperature=0, max_tokens=12))
        return response.json()["choices"][0]["message"] if response.status_code != 503 else None

    known = {n: ask(n) for n in range(len(texts))}

    def listen(n):
        while not is_over.is_set():
            answer = ask(n)
            told.append(answer is None or answer == known[n])
            time.sleep(0.1 * (answer is None))

    listeners = [Beside(listen, n) for n in range(len(texts))]
    for deaths in range(1, 5):
        until(lambda: figure(served, "triax_engine_running") > 0)
        time.sleep(0.7 * deaths)
        os.kill(served.engine_pid(), signal.SIGKILL)
        until(lambda deaths=deaths: figure(served, "triax_engine_deaths") == deaths)
        until(lambda: served.get("/health").status_code == 200)
    is_over.set()
    for listener in listeners:
        listener.result()
    assert told
    assert all(told), "what comes from a pool that was killed over and over is what it was"
    assert served.stop() == 0
    files = [path for path in pool.iterdir() if path.suffix in {".page", ".slot"}]
    assert len(files) > 6
    for path in files:
        content = path.read_bytes()
        assert hashlib.sha256(content[:-32]).digest() == content[-32:]


def test_new_weights_answer_from_shared_memory_and_from_a_folder(real, folder):
    boss = {"authorization": "Bearer boss"}
    asked = body("hello", temperature=0, max_tokens=12, extra_body={"return_token_ids": True})
    before = real.client().chat.completions.create(**asked).choices[0].token_ids
    model = open_engine(folder, "cpu").model
    torch.manual_seed(1)
    other = {name: torch.randn_like(tensor) * 0.05 for name, tensor in model.state_dict().items()}
    segment = Path("/dev/shm") / f"triax-test-{os.getpid()}"
    try:
        save_file(other, segment)
        told = real.post("/admin/update_weights", {"shared_memory": segment.name}, headers=boss)
    finally:
        segment.unlink(missing_ok=True)
    assert told.status_code == 200, told.text
    version = told.json()["weight_version"]
    changed = real.client().chat.completions.create(**asked)
    assert changed.choices[0].token_ids != before
    assert changed.system_fingerprint == f"triax-{version}"
    assert real.post("/admin/update_weights", {"path": str(folder)}, headers=boss).status_code == 200
    assert real.client().chat.completions.create(**asked).choices[0].token_ids == before


def test_a_small_model_drafts_for_a_server(start, folder, tmp_path):
    served = start(*SMALL, "--draft", str(folder), folder=shutil.copytree(folder, tmp_path / "m"), engine=None)
    answer = served.client().chat.completions.create(**body("hello", temperature=0, max_tokens=20))
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 5
    assert served.stop() == 0, served.log.read_text()


def test_the_command_talks_to_a_checkpoint_without_a_server(folder):
    command = [sys.executable, "-m", "triax", "chat", str(folder), "--max-tokens", "8", "--effort", "none"]
    done = subprocess.run(command, input="hello\n/help\n", capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "weights listens" in done.stderr
    assert "the answer was cut" in done.stderr

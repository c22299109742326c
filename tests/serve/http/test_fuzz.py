"""Random requests from the description of the API: no fault of the server, nothing left behind, nobody disturbed."""

import threading
import warnings
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from .conftest import Beside, Served, make_folder, said
from .test_faults import body, figure, until

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    """A server, and beside all that is tried a client who must not notice."""
    served = Served(make_folder(tmp_path_factory.mktemp("fuzz"), context=700), 'http.admin_keys=["boss"]')
    name = served.script("beside", said("word " * 80), delay_s=0.002)
    stories, is_over = [], threading.Event()

    def listen():
        while not is_over.is_set():
            stream = served.client("boss").chat.completions.create(**body(name, stream=True))
            stories.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))

    listener = Beside(listen)
    try:
        yield served
        is_over.set()
        listener.result()
        assert set(stories) == {"word " * 80}
        until(lambda: figure(served, "triax_active_requests") == 0)
        text = served.get("/metrics").text
        assert "triax_engine_running 0.0" in text
        assert "triax_engine_deaths 0.0" in text
        assert 'status="500"' not in text
        assert served.stop() == 0, served.log.read_text()
        assert "fault of its own" not in served.log.read_text()
    finally:
        is_over.set()
        served.close()


@pytest.fixture(scope="module")
def description(fuzzed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")

    @schema.hook
    def map_body(context, body):
        """Name the model that is served, so that requests come as far as their own faults."""
        if isinstance(body, dict) and "model" in body:
            body["model"] = "m"
        return body

    return schema.exclude(path="/admin/pause")  # it would hold up all that follows


def fuzz(description, examples, **how):
    """Try every endpoint; half of the requests obey its description, the others do not."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

    checks = [not_a_server_error, status_code_conformance, content_type_conformance]
    tried = 0
    for found in description.get_all_operations():
        operation = found.ok()
        for mode in schemathesis.GenerationMode:
            if mode.is_negative and not operation.body:
                continue

            @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), **how)
            @given(case=operation.as_strategy(generation_mode=mode))
            def one(case):
                nonlocal tried
                tried += 1
                case.call_and_validate(checks=checks, headers={"Authorization": "Bearer boss"}, timeout=120)

            with suppress(*([Unsatisfiable] if mode.is_negative else [])):  # some take whatever comes
                one()
    return tried


def test_random_requests_meet_no_fault(description):
    assert fuzz(description, 6, derandomize=True, database=None) > 60


@pytest.mark.soak
def test_ten_thousand_random_requests_meet_no_fault(description):
    tried = 0
    while tried < 10_000:
        tried += fuzz(description, max(20, (10_000 - tried) // 12))  # some twelve kinds of requests take all of it

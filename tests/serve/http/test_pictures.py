"""Pictures that take long to unpack wait in a queue with an end."""

import asyncio
import threading

import pytest
from fastapi import Request

from triax.config.serve import Http, Serve
from triax.data.kimi import KimiTokenizer
from triax.serve.http.face import MOST_UNPACKING, Face
from triax.serve.http.fault import Fault
from triax.serve.link import Link

from .conftest import make_folder


def test_more_pictures_than_the_queue_are_told_to_come_again(tmp_path):
    settings, go_on = Serve(http=Http(max_queue=2)), threading.Event()
    tokenizer = KimiTokenizer.load(make_folder(tmp_path))

    async def received():
        return {"type": "http.request", "body": b'{"image_url": "data:"}'}

    async def run():
        link = Link(tmp_path, settings)
        face = Face(link, tokenizer, settings)

        def ask():
            return face.prepare(Request({"type": "http", "headers": []}, received), lambda: go_on.wait(20))

        try:
            taken = [asyncio.create_task(ask()) for _ in range(MOST_UNPACKING + 2)]
            for _ in range(20):  # each of them comes as far as it can
                await asyncio.sleep(0)
            with pytest.raises(Fault, match="too many requests wait; found 2 in a queue of 2") as refused:
                await ask()
            go_on.set()
            assert await asyncio.gather(*taken) == [True] * len(taken)
            assert await ask()
        finally:
            go_on.set()
            await link.stop()
        return refused.value.response()

    response = asyncio.run(run())
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1

"""What the server writes is read alike by every client."""

import json

from triax.serve.http.face import event


def test_an_event_is_one_line_also_for_readers_that_know_unicodes_line_ends():
    told = {"text": "a\x85b\u2028c\u2029d\x0b\x0c\x1c\r\n\u00e9"}
    line, *rest = event(told).decode().splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == told

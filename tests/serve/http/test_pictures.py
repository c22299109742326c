"""Pictures that take long to unpack wait in a queue with an end."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from triax.serve.http.face import MOST_UNPACKING


def test_more_pictures_than_the_queue_are_told_to_come_again(start):
    served = start("http.max_queue=1", facts={"sees": True})
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    address = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": address}]}]}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: served.post("/v1/chat/completions", body), range(MOST_UNPACKING + 6)))
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(400) >= MOST_UNPACKING, "too many tokens for this model, once unpacked"
    assert statuses.count(429) >= 1
    assert set(statuses) == {400, 429}
    assert all(answer.headers["retry-after"] for answer in answers if answer.status_code == 429)

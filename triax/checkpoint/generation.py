"""The `generation_config.json` of a release: where a reader of the weights learns when to stop."""

import json
from collections.abc import Mapping
from typing import Any


def generation_config(config: Mapping[str, Any]) -> str | None:
    """Return the file's text, from a published config; none if the config names no end.

    For the released Kimi-K3 it is the published file, byte for byte.
    """
    text = config.get("text_config", config)
    end = config.get("eos_token_id", text.get("eos_token_id"))
    longest = text.get("max_position_embeddings") or text.get("model_max_length")
    if end is None:
        return None
    return json.dumps({"max_length": longest, "eos_token_id": end}, indent=2)

"""What a request must be for a model, and a machine for deterministic mode."""

from triax.config.model import Model
from triax.errors import ConfigError, DataError, UnsupportedError
from triax.kernels.linear import tiled
from triax.model.decoder import Decoder
from triax.serve.request import Request


def check_request(request: Request, model: Model, vocab_size: int, context: int) -> None:
    """Refuse a request that the model cannot answer.

    Args:
        request: Whatever came.
        model: Shape of the model.
        vocab_size: Tokens that the tokenizer has.
        context: Most tokens of prompt and answer together.

    Raises:
        ConfigError: An option is out of range.
        DataError: Its tokens, pictures or length do not fit.
    """
    where = f"request {request.id}"
    if not 0 <= request.seed < 2**64:
        raise ConfigError(f"{where}: seed is out of range; found `{request.seed}`; give a number from 0 to 2^64 - 1")
    if request.max_tokens < 0:
        raise ConfigError(f"{where}: max_tokens is out of range; found `{request.max_tokens}`; give 0 or more")
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= 20:
        raise ConfigError(f"{where}: top_logprobs is out of range; found `{request.top_logprobs}`; give 0 to 20")
    if not request.tokens:
        raise DataError(f"{where}: there is no prompt; found 0 tokens; give at least one")
    said = dict.fromkeys((token for token, _ in request.sampling.bias), vocab_size)
    if request.score_prompt:  # what lies beyond stands for no text and has no logprob
        said |= dict.fromkeys(request.tokens[1:], vocab_size)
    known = dict.fromkeys((*request.tokens, *request.stop_ids), model.vocab_size)
    wrong = [(token, most) for token, most in (*known.items(), *said.items()) if not 0 <= token < most]
    if wrong:
        raise DataError(
            f"{where}: token `{wrong[0][0]}` is not in the vocabulary; the model has `{wrong[0][1]}`; encode with the "
            "model's tokenizer"
        )
    if len(request.tokens) + request.max_tokens > context:
        raise DataError(
            f"{where}: too long; found {len(request.tokens)} tokens of prompt and {request.max_tokens} of answer "
            f"for a context of {context}; shorten the prompt or lower max_tokens"
        )
    _check_media(request, model)


def check_products(model: Decoder) -> None:
    """Refuse deterministic mode where it cannot be promised.

    Raises:
        UnsupportedError: On a GPU, and on a processor whose products do not treat all rows of a tile alike.
    """
    if model.embed.weight.is_cuda:
        raise UnsupportedError(
            "engine: deterministic mode is a promise about processors; found a GPU, whose libraries choose by the "
            "shape of a batch; use the device `cpu`, or run without is_deterministic"
        )
    shapes = {(w.shape[1], w.shape[0], w.dtype, str(w.device)) for w in model.parameters() if w.dim() == 2}
    uneven = [shape for shape in shapes if not shape[0] % tiled.ALIGNED and not tiled.is_even(*shape)]
    if uneven:
        raise UnsupportedError(
            f"engine: deterministic mode needs products that treat all rows alike; found others on this machine for "
            f"{len(uneven)} shapes, such as {uneven[0]}; run without is_deterministic"
        )


def _check_media(request: Request, model: Model) -> None:
    where, vision = f"request {request.id}", model.vision
    if vision is None:
        if request.media:
            raise DataError(f"{where}: this model reads text only; found {len(request.media)} pictures; leave them out")
        return
    slots = {place for place, token in enumerate(request.tokens) if token == vision.slot_token}
    filled: set[int] = set()
    for item in request.media:
        frames, rows, columns = item.grid
        places = set(range(item.start, item.start + item.length))
        wanted = frames * rows * columns * 3 * vision.patch**2 * 4
        if rows % vision.merge or columns % vision.merge or item.length != vision.num_tokens(rows, columns):
            raise DataError(
                f"{where}: a picture does not fit its slots; found {item.length} for a grid of {rows} x {columns}; "
                "render the prompt with the picture's own size"
            )
        if len(item.pixels) != wanted or frames < 1:
            raise DataError(
                f"{where}: a picture has {len(item.pixels)} bytes of pixels; found a grid of {item.grid}; give {wanted}"
            )
        if places & filled:
            raise DataError(f"{where}: two pictures share slots; found both at token {min(places & filled)}; part them")
        filled |= places
    if filled != slots:
        raise DataError(
            f"{where}: slots and pictures do not match; found {len(slots)} slots for {len(filled)} tokens of pictures; "
            "render the prompt with the pictures that go with it"
        )

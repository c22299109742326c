"""The model as the API sees it: its name, its tokenizer, its chat format, and how it takes pictures."""

from dataclasses import dataclass
from pathlib import Path

from triax.checkpoint.preprocessor import FILE, read_preprocessor
from triax.checkpoint.tokenizer import has_tokenizer, load_tokenizer
from triax.config.serve import Serve
from triax.config.vision import Images
from triax.data.chat.family import Format, chat_format
from triax.data.chat.k2 import THINK
from triax.data.kimi import KimiTokenizer
from triax.data.tokenizer import Tokenizer
from triax.errors import CheckpointError, ConfigError, DataError
from triax.serve.wire import Facts

THINKING = (1.0, 0.95)
PLAIN = (0.6, 0.95)
FREE = (1.0, 1.0)


@dataclass(frozen=True)
class Model:
    """What does not change while the server runs."""

    name: str
    tokenizer: Tokenizer | KimiTokenizer
    format: Format
    images: Images
    context: int
    """Most tokens of prompt and answer together."""
    vocab_size: int
    slot_token: int | None
    """Token of a picture's slots; None is a model that does not see."""
    may_think: bool = True
    """Whether requests may ask the model to think."""

    @property
    def thinks(self) -> bool:
        """Whether the model can think before it answers: those of K2's format can if they know the tag for it."""
        return self.may_think and (self.format != "k2" or THINK in getattr(self.tokenizer, "control", {}))

    def sampling(self, *, thinking: bool) -> tuple[float, float]:
        """Return the model's own temperature and top_p.

        Source: the published settings of Kimi K3 and K2.5.
        """
        if self.format == "text":
            return FREE
        return THINKING if thinking or self.format == "k3" else PLAIN

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that the model is to continue.

        Raises:
            DataError: The text is not valid Unicode.
        """
        return [*self.tokenizer.opening, *self.tokenizer.encode(text)]

    def check_tokens(self, tokens: list[int], where: str) -> None:
        """Refuse tokens that the model does not have.

        Raises:
            DataError: One is outside of the vocabulary.
        """
        wrong = next((token for token in tokens if not 0 <= token < self.tokenizer.vocab_size), None)
        if wrong is not None:
            raise DataError(
                f"{where}: not a token of this model; found `{wrong}`; give numbers from 0 to "
                f"{self.tokenizer.vocab_size - 1}"
            )


def open_tokenizer(folder: Path) -> Tokenizer | KimiTokenizer:
    """Read the tokenizer of a run, of one of its checkpoints, or of released weights.

    Raises:
        CheckpointError: There is none.
        DataError: Its files cannot be used.
    """
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder; name a run, one of its checkpoints, or released weights")
    run_dir = folder.resolve().parents[1] if len(folder.resolve().parents) > 1 else folder
    if not has_tokenizer(folder) and has_tokenizer(run_dir):
        return load_tokenizer(run_dir)  # of one checkpoint of a run
    return load_tokenizer(folder)


def open_model(folder: Path, tokenizer: Tokenizer | KimiTokenizer, facts: Facts, settings: Serve) -> Model:
    """Return the model of a folder once the engine has told its facts."""
    if facts.slot_token is not None and (folder / FILE).is_file():
        images = read_preprocessor(folder).images
    else:
        images = Images(patch=facts.patch, merge=facts.merge)
    images = images.model_copy(update={"reading": settings.image_reading})
    name = settings.http.model_name or folder.resolve().name
    form = chat_format(tokenizer)
    may_think = settings.http.thinking != "off"
    return Model(name, tokenizer, form, images, facts.context, facts.vocab_size, facts.slot_token, may_think)


def check_settings(settings: Serve) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: An API key opens the admin endpoints too, or the queue is longer than the engine's.
    """
    if settings.http.max_queue > settings.scheduling.max_waiting:
        raise ConfigError(
            f"http.max_queue: is more than the engine lets wait; found {settings.http.max_queue} where "
            f"scheduling.max_waiting is {settings.scheduling.max_waiting}; raise that too"
        )
    if shared := set(settings.http.api_keys) & set(settings.http.admin_keys):
        raise ConfigError(
            f"http.admin_keys: a client's key must not be an admin's; found {len(shared)} in both lists; use other keys"
        )

"""What a run reads: sources of documents, the tokenizer, the rows."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from triax.config.settings import Settings


class Weighted(Settings):
    """What every source has."""

    weight: float = Field(1.0, gt=0)
    """Share of this source in the mixture, relative to the others."""


class StandardLibrary(Weighted):
    """The embedded default: the sources of the Python standard library that runs this program."""

    kind: Literal["stdlib"] = "stdlib"


class Folder(Weighted):
    """Every matching text file below a folder, one document a file."""

    kind: Literal["folder"] = "folder"
    path: Path
    """The folder."""
    pattern: str = "**/*.txt"
    """Which files below it, as a glob."""


class Jsonl(Weighted):
    """One JSON object a line, one document an object."""

    kind: Literal["jsonl"] = "jsonl"
    path: Path
    """A file or a folder of `*.jsonl` files."""
    field: str = "text"
    """Key that holds the text."""


class Parquet(Weighted):
    """Rows of Parquet files (needs the extra `data`)."""

    kind: Literal["parquet"] = "parquet"
    path: Path
    """A file or a folder of `*.parquet` files."""
    field: str = "text"
    """Column that holds the text."""


class HuggingFace(Weighted):
    """A data set of the Hugging Face `datasets` library (needs the extra `data`), by name or local path."""

    kind: Literal["huggingface"] = "huggingface"
    name: str
    """Name of a data set on the hub, or a folder that `save_to_disk` wrote. Files have kinds of their own."""
    subset: str = ""
    """Configuration name; empty for the default."""
    split: str = "train"
    """Split to read."""
    field: str = "text"
    """Column that holds the text."""


Source = Annotated[StandardLibrary | Folder | Jsonl | Parquet | HuggingFace, Field(discriminator="kind")]


class Tokenizer(Settings):
    """Byte-level BPE, trained inside the run on its own training text."""

    vocab_size: int = Field(4096, ge=257)
    """Tokens in all, the 256 bytes and the document border included."""
    train_bytes: PositiveInt = 20_000_000
    """At most this much of the training text is used to learn merges."""
    path: Path | None = None
    """A tokenizer to use instead of training one: a `tokenizer.json`, a rank file of Kimi's (`tiktoken.model`), or the
    folder of either."""
    border: str = ""
    """With `path`: the special token that begins every document, such as `<|endoftext|>`; empty: the one that the
    tokenizer puts before a text, else `<|border|>`, or `[BOS]` of Kimi's."""


class Data(Settings):
    """Everything between files and rows of tokens."""

    sources: tuple[Source, ...] = Field((StandardLibrary(),), min_length=1)
    """What is read, mixed by weight."""
    tokenizer: Tokenizer = Tokenizer()
    """How text becomes tokens."""
    held_out_share: float = Field(0.06, ge=0, lt=1)
    """Share of the documents kept out of training, chosen by a hash of each document's name."""
    seq_len: int = Field(512, ge=2)
    """Tokens in a packed row; documents longer than a row are cut, shorter ones share it."""

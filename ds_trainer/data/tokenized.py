"""Tokenised samples on disk: written once as Arrow, read through memory mapping, with counts of tokens and labels."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path
from textwrap import indent
from typing import Any

import pyarrow as pa

from ds_trainer.data.encode import Encoded
from ds_trainer.loss import IGNORE_INDEX

ROWS_PER_BATCH = 1024
"""Fixed, so that a division gives the batch and row of a sample."""
SCHEMA = pa.schema([(name, pa.list_(pa.int32())) for name in ("input_ids", "labels")])
PREVIEW_CHARS = 400


@dataclass
class DataStats:
    """Counts of the records of a data set and of the samples made of them.

    Args:
        records: Records read.
        truncated: Samples truncated to the maximum length.
        emptied: Truncated samples without a token to learn.
        dropped: Records left out because they are longer than that.
        empty: Records left out because they hold no text.
        unsupervised: Samples kept, truncated or not, without a token to learn.
        eos_supervised: Samples in which the end-of-sequence token is learned.
        tokens: Tokens of all samples.
        label_tokens: Tokens that the loss counts in one pass over the samples.
    """

    records: int = 0
    truncated: int = 0
    emptied: int = 0
    dropped: int = 0
    empty: int = 0
    unsupervised: int = 0
    eos_supervised: int = 0
    tokens: int = 0
    label_tokens: int = 0

    @property
    def samples(self) -> int:
        """Samples kept."""
        return self.records - self.dropped - self.empty

    @property
    def affected(self) -> int:
        """Records that were truncated, left out or have no token to learn, each counted once."""
        return self.truncated + self.dropped + self.empty + self.unsupervised - self.emptied

    def add_truncated(self, sample: Encoded) -> None:
        """Counts a truncated sample; `add` counts its tokens."""
        self.truncated += 1
        self.emptied += sample.num_label_tokens == 0

    def add(self, sample: Encoded, eos_token_id: int | None) -> None:
        """Counts a sample that is kept."""
        self.tokens += len(sample.input_ids)
        self.label_tokens += sample.num_label_tokens
        self.unsupervised += sample.num_label_tokens == 0
        self.eos_supervised += eos_token_id is not None and eos_token_id in sample.labels

    def __str__(self) -> str:
        return (
            f"{self.samples:,} samples, {self.tokens:,} tokens, {self.label_tokens:,} of them learned; "
            f"{self.truncated:,} truncated ({self.emptied:,} of them to nothing learned), {self.dropped:,} dropped, "
            f"{self.empty:,} empty, {self.unsupervised:,} without a learned token"
        )


class TokenizedDataset:
    """Map-style data set over the Arrow file in `folder`; a row is read from disk when it is indexed.

    Args:
        folder: Folder that `write` has filled.
    """

    def __init__(self, folder: Path) -> None:
        self.stats = DataStats(**json.loads((folder / "stats.json").read_text("utf-8")))
        self._file = pa.ipc.open_file(pa.memory_map(str(folder / "data.arrow")))

    def __len__(self) -> int:
        return self.stats.samples

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        batch, row = divmod(i, ROWS_PER_BATCH)
        columns = self._file.get_batch(batch)
        return {name: columns.column(name)[row].values.to_numpy().tolist() for name in SCHEMA.names}


def write(folder: Path, samples: Iterable[Encoded], stats: DataStats) -> None:
    """Writes samples as they are produced, then `stats`, which producing them fills."""
    samples = iter(samples)
    with pa.ipc.new_file(str(folder / "data.arrow"), SCHEMA) as file:
        while rows := list(islice(samples, ROWS_PER_BATCH)):
            file.write_batch(
                pa.record_batch([[row.input_ids for row in rows], [row.labels for row in rows]], schema=SCHEMA)
            )
    (folder / "stats.json").write_text(json.dumps(asdict(stats)), "utf-8")


def preview(dataset: TokenizedDataset, tokenizer: Any, n: int) -> str:
    """The first `n` samples as text, learned tokens between ⟦ and ⟧, and the number of samples that learn eos."""
    lines = []
    for i in range(min(n, len(dataset))):
        sample = dataset[i]
        lines.append(f"sample {i}, learned between ⟦ ⟧:")
        text = ""
        for learned, run in groupby(
            zip(sample["input_ids"], sample["labels"], strict=True), key=lambda pair: pair[1] != IGNORE_INDEX
        ):
            tokens = [token for token, _ in run]
            run_text = _shorten(tokenizer.decode(tokens) if tokenizer else str(tokens))
            text += f"⟦{run_text}⟧" if learned else run_text
        lines.append(indent(text.rstrip("\n"), "  "))
    lines.append(f"eos supervised in {dataset.stats.eos_supervised} of {len(dataset)} samples")
    return "\n".join(lines)


def _shorten(text: str) -> str:
    if len(text) <= PREVIEW_CHARS:
        return text
    return f"{text[: PREVIEW_CHARS // 2]} … {text[-PREVIEW_CHARS // 2 :]}"

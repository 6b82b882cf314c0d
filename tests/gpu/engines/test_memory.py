"""What a key saves on the device, read from CUDA's allocator."""

import pytest
import torch

from tests.helpers.runs import make_trainer
from tests.helpers.tiny import samples, tiny_llama

pytestmark = pytest.mark.gpu

VOCAB = 65_536
ROWS = samples(4, lengths=(120,), vocab=VOCAB)
LOGITS_BYTES = 4 * 120 * VOCAB * 4


def test_the_chunked_loss_never_holds_the_logits_of_a_micro_batch(gpu, tmp_path):
    whole_loss, whole = gpu(loss_and_peak, tmp_path, None)
    chunked_loss, chunked = gpu(loss_and_peak, tmp_path, 16)
    assert chunked_loss == pytest.approx(whole_loss, rel=1e-5)
    assert whole > 2 * LOGITS_BYTES
    assert chunked < LOGITS_BYTES


def loss_and_peak(out, chunk_tokens):
    trainer = make_trainer(
        "ddp",
        out,
        model=tiny_llama(vocab=VOCAB),
        rows=ROWS,
        batch={"global_size": 4, "micro_size": 4},
        loss={"chunk_tokens": chunk_tokens},
        run={"device": "cuda"},
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.train_step()
    result = trainer.state.loss, torch.cuda.max_memory_allocated() - before
    trainer.close()
    return result

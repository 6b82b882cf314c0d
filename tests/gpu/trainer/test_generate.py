"""Text from parameters that are cut, gathered on the GPU."""

import pytest
from transformers import GenerationConfig

from tests.helpers.runs import make_trainer
from tests.helpers.tiny import tiny_llama
from tests.helpers.tokenizers import make_tokenizer

pytestmark = pytest.mark.gpu

PROMPT, NEW = "the cat", 12


def model():
    """Continues its prompts with ever other tokens."""
    return tiny_llama(vocab=300, tied=False, initializer_range=0.5)


@pytest.mark.case("F4")
@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_a_cut_model_writes_what_a_whole_one_writes_on_the_cpu(gpu, tmp_path, engine):
    tokenizer = make_tokenizer()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    settings = GenerationConfig(max_new_tokens=NEW, eos_token_id=tokenizer.eos_token_id)
    expected = model().eval().generate(ids, generation_config=settings)[0, ids.shape[1] :]
    assert len(set(expected.tolist())) > NEW / 2
    assert gpu(generate, engine, tmp_path) == [tokenizer.decode(expected, skip_special_tokens=True)]


def generate(engine, out):
    given = {"processing_class": make_tokenizer()}
    trainer = make_trainer(engine, out, model=model(), given=given, run={"device": "cuda"})
    assert all(p.device.type == "cuda" for p in trainer.run.model.parameters())
    texts = trainer.generate([PROMPT], max_new_tokens=NEW)
    trainer.close()
    return texts

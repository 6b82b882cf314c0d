"""A small real tokenizer, trained in milliseconds and offline."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<|start|>", "<|end|>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

MARKED_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

CORPUS = ["the cat sat on the mat", "what is the capital of France? Paris", "yes yes no no hello world foo() bar()"] * 3


def make_tokenizer(
    folder: Path | None = None,
    *,
    vocab_size: int = 300,
    bos: bool = True,
    eos_token: str | None = "</s>",
    pad_token: str | None = "<pad>",
    chat_template: str | None = CHAT_TEMPLATE,
    model_max_length: int = 1024,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with merges, so that token boundaries are as awkward as real ones.

    Args:
        folder: Where it is saved too; None: nowhere.
        vocab_size: At least 261: 256 bytes and the special tokens.
        bos: Whether a plain call puts `<s>` first, as Llama's tokenizer does.
        eos_token: End-of-sequence token; `<|end|>` is the chat template's end of turn.
        pad_token: Padding token; may be the same as `eos_token`.
        chat_template: Jinja template.
        model_max_length: The tokenizer's own limit.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token=eos_token,
        pad_token=pad_token,
        extra_special_tokens=["<|start|>", "<|end|>"],
        model_max_length=model_max_length,
        chat_template=chat_template,
    )
    if folder is not None:
        tokenizer.save_pretrained(folder)
    return tokenizer

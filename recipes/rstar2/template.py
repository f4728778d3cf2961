"""Gives a base model the chat template of rStar2-Agent.

    python recipes/rstar2/template.py model=models/Qwen3-14B-Base output=models/rstar2-base protocol=report

writes a checkpoint whose tokenizer has the template, from a base model whose tokenizer knows ChatML's two tokens.
`tool.json` beside it is the tool that the template shows, for servers that run its calls.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from engine.console.options import parse
from engine.rollout.chat_template import ChatTemplate
from recipes.rstar2.parts.sampling.protocol import PROTOCOLS, Protocol
from sandbox.printable import printable

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"


def install(model: Path, output: Path, protocol: Protocol) -> None:
    """Writes a checkpoint like `model` whose tokenizer has the protocol's template and ends a turn with <|im_end|>.

    Weights and all other files are hard links where the file system allows it, else copies. Of the model's
    generation_config.json only the tokens remain: a server would take its sampling for the default. `output` appears
    when it is complete. Raises ValueError, of which TemplateError is one, for a model that cannot have the template,
    or where `output` exists.
    """
    if not (model / "config.json").is_file():
        raise ValueError(f"model: no config.json in {str(model)!r}. Fix: give a Hugging Face folder")
    if output.exists():
        raise ValueError(f"output: {str(output)!r} exists. Fix: give another folder, or remove it")
    output.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        end = _write_tokenizer(model, made, protocol)
        _write_configuration(model, made, end)
        _write_json(made / "tool.json", protocol.schema(stateful=False))
        for path in sorted(model.iterdir()):
            if path.is_file() and not path.name.startswith((".", "chat_template")) and not (made / path.name).exists():
                _link(path.resolve(), made / path.name)
        tools = [protocol.schema(stateful=stateful) for stateful in (False, True)]
        ChatTemplate.load(made).with_tools(tools)  # audited with and without them
        made.chmod(0o755)  # not the temporary folder's
        made.rename(output)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _write_tokenizer(model: Path, output: Path, protocol: Protocol) -> int:
    """Writes the tokenizer with the template. Returns the token that ends a turn."""
    from transformers import AutoTokenizer

    if not (model / "tokenizer_config.json").is_file():
        raise ValueError(f"model: no tokenizer_config.json in {str(model)!r}. Fix: give a folder with its tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
    for token in (TURN_START, TURN_END):
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1 or tokenizer.decode(ids) != token:
            raise ValueError(
                f"model: the tokenizer in {str(model)!r} has no token {token!r}. Fix: take a model that was made for "
                "ChatML (Qwen, SmolLM), or add the token to its tokenizer and its embeddings first"
            )
    tokenizer.chat_template = protocol.template()
    tokenizer.eos_token = TURN_END
    tokenizer.save_pretrained(output, save_jinja_files=False)
    return tokenizer.convert_tokens_to_ids(TURN_END)


def _write_configuration(model: Path, output: Path, end: int) -> None:
    """Writes both configurations. end: the token that ends a turn.

    The model's own end tokens still end a generation, since it may fall back on them.
    """
    config = json.loads((model / "config.json").read_text())
    path = model / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    own = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = own if isinstance(own, list) else [own]
    others = [token for token in ends if token not in (end, None)]
    tokens = {"eos_token_id": [end, *others] if others else end}
    for name in ("bos_token_id", "pad_token_id"):
        if (token := generation.get(name, config.get(name))) is not None:
            tokens[name] = token
    _write_json(output / "generation_config.json", tokens)
    _write_json(output / "config.json", {**config, "eos_token_id": end})


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    model: Annotated[Path, "Hugging Face folder of the base model"] = Path("models/Qwen3-14B-Base")
    output: Annotated[Path, "folder to write the checkpoint to; it must not exist"] = Path("models/rstar2-base")
    protocol: Annotated[Literal["report", "release"], "whose chat it is"] = "report"


def main() -> int:
    config = parse(Config, sys.argv[1:], description=__doc__)
    try:
        install(config.model, config.output, PROTOCOLS[config.protocol])
    except (ValueError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    print(f"{config.output}: the chat template of the {config.protocol} on {config.model}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

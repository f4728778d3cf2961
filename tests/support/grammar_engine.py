"""An engine that samples under grammars: what it gave, as JSON. An argument is a checkpoint without a tokenizer."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing

from engine.gateway.grammar import grammar_of
from engine.gateway.requests import Constraint
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.port import GrammarRefused, Sampling
from engine.rollout.chat_template import ChatTemplate
from recipes.conversation import a_replica
from tests.support.paths import TINY

CODE = {
    "type": "object",
    "properties": {"code": {"type": "string"}},
    "required": ["code"],
    "additionalProperties": False,
}
PYTHON = {"type": "function", "function": {"name": "python", "parameters": CODE}}
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
NOWHERE = {"type": "array", "items": {"$ref": "#/$defs/nowhere"}}
QUESTION = "What is 6 * 7?"
MOVED = 5  # tokens after which a turn is moved


def constraint(**fields):
    return Constraint(field="tool_choice", **fields)


GRAMMARS = {
    "call": grammar_of(constraint(tools=(PYTHON,), once=True), "none"),
    "calls": grammar_of(constraint(tools=(PYTHON,)), "none"),
    "json": grammar_of(constraint(schema=AGE), "none"),
    "free": None,
}


def sampling(chat, grammar, seed, *, bundled=True, **fields):
    values = {
        "max_tokens": 120,
        "temperature": 1.0,
        "seed": seed,
        "stop_token_ids": (chat.end_of_turn,),
        "deliver_at": frozenset() if bundled else None,
        "grammar": grammar,
    }
    return Sampling(**(values | fields))


async def turn(replica, prompt, wanted, name):
    deltas = [delta async for delta in replica.generate(prompt, wanted, name)]
    return {
        "ids": [token for delta in deltas for token in delta.token_ids],
        "logprobs": [value for delta in deltas for value in delta.logprobs],
        "forced": [mark for delta in deltas for mark in delta.forced],
        "finish": deltas[-1].finish,
    }


async def moved(replica, chat, prompt, name):
    """A turn that is cut off, and goes on from its tokens as on another replica."""
    found = {"ids": [], "logprobs": [], "forced": []}
    first = sampling(chat, GRAMMARS[name], 5, bundled=False)
    async with aclosing(replica.generate(prompt, first, f"first-{name}")) as deltas:
        async for delta in deltas:
            found["ids"] += delta.token_ids
            found["logprobs"] += delta.logprobs
            found["forced"] += delta.forced
            if len(found["ids"]) >= MOVED:
                break
    so_far = found["ids"]
    rest = sampling(chat, GRAMMARS[name], 6, grammar_tokens=len(so_far), max_tokens=120 - len(so_far))
    again = await turn(replica, [*prompt, *so_far], rest, f"second-{name}")
    return {key: [*found[key], *again[key]] for key in found} | {"finish": again["finish"]}


async def refusal(replica, chat, prompt, grammar):
    try:
        await turn(replica, prompt, sampling(chat, grammar, 1), "refused")
    except GrammarRefused as error:
        return str(error)
    return None


async def main():
    chat = ChatTemplate.load(TINY)
    prompt = chat.prompt_ids([{"role": "user", "content": QUESTION}])
    checkpoint = sys.argv[1] if len(sys.argv) > 1 else str(TINY)
    config = ReplicaConfig(checkpoint=checkpoint, max_model_len=384, max_num_seqs=16, kv_blocks=256)
    async with a_replica(config) as replica:
        found = {"prompt": prompt, "turns": [], "refusals": {}}
        if checkpoint != str(TINY):
            found["refusals"]["call"] = await refusal(replica, chat, prompt, GRAMMARS["call"])
            found["free"] = await turn(replica, prompt, sampling(chat, None, 1), "free")
            print(json.dumps(found))
            return
        names = [*GRAMMARS] * 3
        turns = await asyncio.gather(
            *(
                turn(replica, prompt, sampling(chat, GRAMMARS[name], at, bundled=at % 2 == 0), f"{name}-{at}")
                for at, name in enumerate(names)
            )
        )
        turns += [await moved(replica, chat, prompt, name) for name in ("call", "json")]
        for name, each in zip([*names, "call", "json"], turns, strict=True):
            scored = await replica.logprobs([[*prompt, *each["ids"]]])
            found["turns"].append({**each, "grammar": name, "scored": scored[len(prompt) - 1 :].tolist()})
        endless = grammar_of(constraint(schema={"$ref": "#"}), "none")
        wrong = {
            "dead end": endless,
            "schema": grammar_of(constraint(schema=NOWHERE), "none"),
            "form": '{"type": "what"}',
            "text": "{",
        }
        for name, grammar in wrong.items():
            found["refusals"][name] = await refusal(replica, chat, prompt, grammar)
        found["after"] = await turn(replica, prompt, sampling(chat, GRAMMARS["call"], 0), "after")
    print(json.dumps(found))


if __name__ == "__main__":
    prepare_environment()
    asyncio.run(main())

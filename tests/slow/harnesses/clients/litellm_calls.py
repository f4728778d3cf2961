import json

import litellm
from cases import MODEL, agent, case, main, python

TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


def loop(model, question):
    """A loop over tools as mini agents write it."""
    messages = [{"role": "user", "content": question}]
    while True:
        message = litellm.completion(model=model, messages=messages, tools=[TOOL], max_tokens=200).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = python(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@case
def tools(question):
    return loop(f"openai/{MODEL}", question)


@case
def claude(question):
    return loop(f"anthropic/{MODEL}", question)


def streamed(model, question):
    messages = [{"role": "user", "content": question}]
    chunks = litellm.completion(model=model, messages=messages, stream=True, stream_options={"include_usage": True})
    chunks = list(chunks)
    whole = litellm.stream_chunk_builder(chunks)
    return [
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        whole.usage.total_tokens,
    ]


@case
def stream(question):
    return streamed(f"openai/{MODEL}", question)


@case
def stream_claude(question):
    return streamed(f"anthropic/{MODEL}", question)


@case
def responses(question):
    return litellm.responses(model=f"openai/{MODEL}", input=question).output[0].content[0].text


@case
def overflow(question):
    kinds = []
    for provider in ("openai", "anthropic", "hosted_vllm"):
        try:
            litellm.completion(
                model=f"{provider}/{MODEL}",
                messages=[{"role": "user", "content": "long " * 30_000}],
                **({"api_base": litellm.get_secret("OPENAI_BASE_URL")} if provider == "hosted_vllm" else {}),
            )
        except litellm.BadRequestError as error:
            kinds.append(type(error).__name__)
    return kinds


@agent
async def coroutine(question, endpoint):
    answer = await litellm.acompletion(
        model=f"openai/{endpoint.model}",
        api_base=endpoint.openai_url,
        api_key=endpoint.key,
        messages=[{"role": "user", "content": question}],
    )
    return answer.choices[0].message.content


main()

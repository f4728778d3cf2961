from cases import MODEL, agent, case, main, python
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Number(BaseModel):
    value: int


@case
async def tools(question):
    return (await Agent(f"openai:{MODEL}", tools=[python]).run(question)).output


@case
async def chat(question):
    return (await Agent(f"openai-chat:{MODEL}", tools=[python]).run(question)).output


@case
async def claude(question):
    return (await Agent(f"anthropic:{MODEL}", tools=[python]).run(question)).output


@case
async def stream(question):
    async with Agent(f"openai:{MODEL}", tools=[python]).run_stream(question) as result:
        return [text async for text in result.stream_text()][-1]


@case
async def typed(question):
    return (await Agent(f"openai:{MODEL}", tools=[python], output_type=Number).run(question)).output.value


@case
async def typed_chat(question):
    return (await Agent(f"openai-chat:{MODEL}", output_type=Number).run(question)).output.value


@case
async def typed_claude(question):
    return (await Agent(f"anthropic:{MODEL}", output_type=Number).run(question)).output.value


@case
async def native(question):
    return (await Agent(f"openai:{MODEL}", output_type=NativeOutput(Number)).run(question)).output.value


@case
async def prompted(question):
    return (await Agent(f"openai:{MODEL}", output_type=PromptedOutput(Number)).run(question)).output.value


@case
async def corrected(question):
    """The first call does not fit the tool, and the model is told so."""
    return (await Agent(f"openai-chat:{MODEL}", tools=[python]).run(question)).output


@agent
async def coroutine(question, endpoint):
    provider = OpenAIProvider(base_url=endpoint.openai_url, api_key=endpoint.key)
    clerk = Agent(OpenAIResponsesModel(endpoint.model, provider=provider), tools=[python])
    return (await clerk.run(question)).output


main()

import asyncio

from cases import MODEL, agent, case, main, python
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

TOOL = tool(python)


@case
def tools(question):
    return ToolCallingAgent([TOOL], OpenAIModel(MODEL)).run(question)


@case
def code(question):
    return CodeAgent([TOOL], OpenAIModel(MODEL)).run(question)


@case
def stream(question):
    agent = CodeAgent([TOOL], OpenAIModel(MODEL), stream_outputs=True)
    return list(agent.run(question, stream=True))[-1].output


@case
def structured(question):
    agent = CodeAgent([TOOL], OpenAIModel(MODEL), use_structured_outputs_internally=True)
    return agent.run(question)


@agent
async def coroutine(question, endpoint):
    model = OpenAIModel(endpoint.model, api_base=endpoint.openai_url, api_key=endpoint.key)
    return await asyncio.to_thread(ToolCallingAgent([TOOL], model).run, question)


main()

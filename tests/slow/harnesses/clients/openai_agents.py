from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, SQLiteSession, function_tool
from cases import MODEL, agent, case, main, python
from pydantic import BaseModel


class Number(BaseModel):
    value: int


TOOL = function_tool(python)


@case
async def tools(question):
    agent = Agent(name="clerk", instructions="Be brief.", model=MODEL, tools=[TOOL])
    return (await Runner.run(agent, question)).final_output


@case
async def stream(question):
    agent = Agent(name="clerk", instructions="Be brief.", model=MODEL, tools=[TOOL])
    result = Runner.run_streamed(agent, question)
    deltas = [event.data.delta async for event in result.stream_events() if is_text(event)]
    return ["".join(deltas), result.final_output]


def is_text(event):
    return event.type == "raw_response_event" and event.data.type == "response.output_text.delta"


@case
async def typed(question):
    agent = Agent(name="clerk", model=MODEL, tools=[TOOL], output_type=Number)
    return (await Runner.run(agent, question)).final_output.value


@case
async def forced(question):
    agent = Agent(name="clerk", model=MODEL, tools=[TOOL], model_settings=ModelSettings(tool_choice="required"))
    return (await Runner.run(agent, question)).final_output


@case
async def handoff(question):
    expert = Agent(name="expert", instructions="You know numbers.", model=MODEL)
    agent = Agent(name="clerk", instructions="Ask the expert.", model=MODEL, handoffs=[expert])
    result = await Runner.run(agent, question)
    return [result.last_agent.name, result.final_output]


@case
async def memory(question):
    agent, session = Agent(name="clerk", model=MODEL), SQLiteSession("one")
    await Runner.run(agent, question, session=session)
    return (await Runner.run(agent, "And once more?", session=session)).final_output


@agent
async def coroutine(question, endpoint):
    config = RunConfig(model_provider=OpenAIProvider(base_url=endpoint.openai_url, api_key=endpoint.key))
    clerk = Agent(name="clerk", instructions="Be brief.", model=endpoint.model, tools=[TOOL])
    return (await Runner.run(clerk, question, run_config=config)).final_output


main()

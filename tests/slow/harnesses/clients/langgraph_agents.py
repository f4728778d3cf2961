from cases import MODEL, agent, case, main, python
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Number(BaseModel):
    """A number."""

    value: int


def asked(question):
    return {"messages": [("user", question)]}


@case
async def tools(question):
    agent = create_agent(ChatOpenAI(model=MODEL), [python], system_prompt="Be brief.")
    return (await agent.ainvoke(asked(question)))["messages"][-1].content


@case
def claude(question):
    agent = create_agent(ChatAnthropic(model=MODEL), [python], system_prompt="Be brief.")
    return agent.invoke(asked(question))["messages"][-1].content


@case
def responses(question):
    agent = create_agent(ChatOpenAI(model=MODEL, use_responses_api=True), [python], system_prompt="Be brief.")
    return agent.invoke(asked(question))["messages"][-1].text


@case
def stream(question):
    agent = create_agent(ChatOpenAI(model=MODEL), [python])
    chunks = agent.stream(asked(question), stream_mode="messages")
    return "".join(chunk.text for chunk, _ in chunks if chunk.type == "AIMessageChunk")


@case
def stream_claude(question):
    agent = create_agent(ChatAnthropic(model=MODEL), [python])
    chunks = agent.stream(asked(question), stream_mode="messages")
    return "".join(chunk.text for chunk, _ in chunks if chunk.type == "AIMessageChunk")


@case
def typed_agent(question):
    agent = create_agent(ChatOpenAI(model=MODEL), [python], response_format=Number)
    return agent.invoke(asked(question))["structured_response"].value


@case
def typed(question):
    return ChatOpenAI(model=MODEL).with_structured_output(Number).invoke(question).value


@case
def typed_by_call(question):
    return ChatOpenAI(model=MODEL).with_structured_output(Number, method="function_calling").invoke(question).value


@case
def typed_claude(question):
    return ChatAnthropic(model=MODEL).with_structured_output(Number).invoke(question).value


@agent
async def coroutine(question, endpoint):
    model = ChatOpenAI(model=endpoint.model, base_url=endpoint.openai_url, api_key=endpoint.key)
    return (await create_agent(model, [python]).ainvoke(asked(question)))["messages"][-1].content


@agent
async def coroutine_claude(question, endpoint):
    model = ChatAnthropic(model=endpoint.model, base_url=endpoint.anthropic_url, api_key=endpoint.key)
    return (await create_agent(model, [python]).ainvoke(asked(question)))["messages"][-1].content


main()

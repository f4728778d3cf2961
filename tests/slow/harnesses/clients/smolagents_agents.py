from cases import MODEL, case, main, python
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


main()

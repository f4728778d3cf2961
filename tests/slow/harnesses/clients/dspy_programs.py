import dspy
from cases import MODEL, agent, case, main, python


def lm():
    return dspy.LM(f"openai/{MODEL}", cache=False)


@case
def predict(question):
    with dspy.context(lm=lm()):
        return dspy.Predict("question -> answer")(question=question).answer


@case
def thought(question):
    with dspy.context(lm=lm(), adapter=dspy.JSONAdapter()):
        return dspy.ChainOfThought("question -> answer: int")(question=question).answer


@case
def react(question):
    with dspy.context(lm=lm()):
        return dspy.ReAct("question -> answer: int", tools=[python])(question=question).answer


@agent
async def coroutine(question, endpoint):
    model = dspy.LM(f"openai/{endpoint.model}", api_base=endpoint.openai_url, api_key=endpoint.key, cache=False)
    with dspy.context(lm=model):
        return (await dspy.ChainOfThought("question -> answer: int").acall(question=question)).answer


main()

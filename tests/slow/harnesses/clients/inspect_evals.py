import tempfile

from cases import MODEL, agent, case, main
from cases import python as run
from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel


class Number(BaseModel):
    value: int


@tool
def python():
    async def execute(code: str) -> str:
        """Runs Python.

        Args:
            code: The expression to run.
        """
        return run(code)

    return execute


def accuracy(model, question, solver, **options):
    task = Task(dataset=[Sample(input=question, target="42")], solver=solver, scorer=includes(), **options)
    with tempfile.TemporaryDirectory() as logs:
        [log] = eval(task, model=get_model(model, memoize=False), log_dir=logs, display="none")
    assert log.status == "success", log.error
    return log.results.scores[0].metrics["accuracy"].value


@case
def tools(question):
    return accuracy(f"openai/{MODEL}", question, [use_tools(python()), generate()])


@case
def claude(question):
    return accuracy(f"anthropic/{MODEL}", question, [use_tools(python()), generate()])


@case
def loop(question):
    return accuracy(f"openai-api/openai/{MODEL}", question, react(tools=[python()]))


@case
def typed(question):
    schema = ResponseSchema(name="number", json_schema=json_schema(Number))
    return accuracy(f"openai-api/openai/{MODEL}", question, generate(), config=GenerateConfig(response_schema=schema))


@agent
async def coroutine(question, endpoint):
    name = f"openai-api/rocstar/{endpoint.model}"
    model = get_model(name, base_url=endpoint.openai_url, api_key=endpoint.key, memoize=False)
    return (await model.generate(question)).completion


main()

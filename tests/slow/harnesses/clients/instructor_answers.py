import instructor
from anthropic import Anthropic
from cases import MODEL, agent, case, main
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, field_validator


class Number(BaseModel):
    value: int

    @field_validator("value")
    @classmethod
    def is_large(cls, value):
        if value < 40:
            raise ValueError("too small")
        return value


def asked(client, question, **options):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=MODEL, messages=messages, response_model=Number, **options)


@case
def tools(question):
    return asked(instructor.from_openai(OpenAI()), question).value


@case
def provider(question):
    client = instructor.from_provider(f"openai/{MODEL}")
    return client.create(messages=[{"role": "user", "content": question}], response_model=Number).value


@case
def claude(question):
    return asked(instructor.from_anthropic(Anthropic()), question, max_tokens=100).value


@case
def json(question):
    return asked(instructor.from_openai(OpenAI(), mode=instructor.Mode.JSON), question).value


@case
def json_schema(question):
    return asked(instructor.from_openai(OpenAI(), mode=instructor.Mode.JSON_SCHEMA), question).value


@case
def responses(question):
    return asked(instructor.from_openai(OpenAI(), mode=instructor.Mode.RESPONSES_TOOLS), question).value


@case
def retried(question):
    """The first answer does not pass the validator, and the model is told so."""
    return asked(instructor.from_openai(OpenAI()), question, max_retries=2).value


@case
def stream(question):
    client = instructor.from_openai(OpenAI())
    messages = [{"role": "user", "content": question}]
    parts = client.chat.completions.create_partial(model=MODEL, messages=messages, response_model=Number)
    return [part.value for part in parts][-1]


@agent
async def coroutine(question, endpoint):
    client = instructor.from_openai(AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key))
    messages = [{"role": "user", "content": question}]
    return (await client.create(model=endpoint.model, messages=messages, response_model=Number)).value


main()

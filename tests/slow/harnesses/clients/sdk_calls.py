from anthropic import Anthropic, AsyncAnthropic, beta_tool
from cases import MODEL, agent, case, main
from cases import python as run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel


class Number(BaseModel):
    value: int


def messages(question):
    return [{"role": "user", "content": question}]


@case
def parse(question):
    answer = OpenAI().chat.completions.parse(model=MODEL, messages=messages(question), response_format=Number)
    return answer.choices[0].message.parsed.value


@case
def parse_responses(question):
    return OpenAI().responses.parse(model=MODEL, input=question, text_format=Number).output_parsed.value


@case
def parse_claude(question):
    answer = Anthropic().messages.parse(model=MODEL, max_tokens=99, messages=messages(question), output_format=Number)
    return answer.parsed_output.value


@case
def stream(question):
    with OpenAI().chat.completions.stream(model=MODEL, messages=messages(question)) as events:
        return events.get_final_completion().choices[0].message.content


@case
def stream_responses(question):
    with OpenAI().responses.stream(model=MODEL, input=question) as events:
        return events.get_final_response().output_text


@case
def stream_claude(question):
    with Anthropic().messages.stream(model=MODEL, max_tokens=99, messages=messages(question)) as events:
        return events.get_final_text()


@case
def runner(question):
    @beta_tool
    def python(code: str) -> str:
        """Runs Python."""
        return run(code)

    runner = Anthropic().beta.messages.tool_runner(
        model=MODEL, max_tokens=99, messages=messages(question), tools=[python]
    )
    return runner.until_done().content[-1].text


@agent
async def coroutine(question, endpoint):
    async with AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
        return (await client.responses.create(model=endpoint.model, input=question)).output_text


@agent
async def coroutine_claude(question, endpoint):
    async with AsyncAnthropic(base_url=endpoint.anthropic_url, api_key=endpoint.key) as client:
        answer = await client.messages.create(model=endpoint.model, max_tokens=99, messages=messages(question))
    return answer.content[0].text


main()

"""A taskset and a harness for verifiers: sums, asked by a program of three lines in this process."""

import re

import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        said = str(trace.messages[-1].content)
        return float(self.data.answer in re.findall(r"-?\d+", said))

    @vf.reward(weight=0.5)
    async def answered(self, trace: vf.Trace) -> float:
        return float("<answer>" in str(trace.messages[-1].content))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> list[SumTask]:
        pairs = [(first, second) for first in (12, 34, 56, 78) for second in (9, 87)]
        return [
            SumTask(SumData(prompt=f"Compute {first} + {second}", answer=str(first + second)), self.config.task)
            for first, second in pairs
        ]


class AskOnceConfig(vf.HarnessConfig):
    pass


class AskOnce(vf.Harness[AskOnceConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_) -> vf.ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages = [{"role": "user", "content": data.prompt}]
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout=answer.choices[0].message.content or "", stderr="")


__all__ = ["AskOnce", "SumTaskset"]

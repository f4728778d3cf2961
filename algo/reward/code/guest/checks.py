"""Runs the tests of a data set on what a program answered, in a process in which the program never runs.

It reads from standard input {"setup", "functions", "tests", "answers", "in_place", "stop"}: `answers` are pairs of call
and answer in the order in which the program was called, an answer being a line of `candidate` or null. It prints JSON:

    {"tests": [[verdict, detail], ...], "asked": [function, arguments] or null, "refused": [test, reason] or null}

verdict: "passed" or "failed". The list ends before the test that has asked for an answer which is not there, and, with
`stop`, after the first that failed. Each function under test is a stand-in that looks its answers up.
"""


def main(encode, decode):  # type: ignore[no-untyped-def]
    import builtins
    import json
    import os
    import random
    import sys

    request = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    answers: dict = {}
    for call, answer in request["answers"]:
        answers.setdefault(tuple(call), []).append(answer)
    asked: list = []
    refused: list = []
    lost: list = []

    # A BaseException, and noted beside it: tests may catch what they like and cannot pass without an answer.
    class NoAnswer(BaseException):
        pass

    def lose(reason):  # type: ignore[no-untyped-def]
        lost.append(reason)
        raise NoAnswer

    def stand_in(name):  # type: ignore[no-untyped-def]
        def call(*positional, **named):  # type: ignore[no-untyped-def]
            if asked or refused or lost:
                raise NoAnswer
            try:
                key = (name, encode([positional, named]))
            except ValueError as error:
                refused.append(f"{name} is called with what cannot leave the test: {error}")
                raise NoAnswer from None
            waiting = answers.get(key)
            if not waiting:
                asked.append(key)
                raise NoAnswer
            line = waiting.pop(0)
            if line is None:
                lose("no answer within the limits")
            try:
                kind, *parts = decode(line)
                if kind in ("value", "iterator", "range"):
                    result, changes = parts
                    if kind != "value":
                        result = iter(result) if kind == "iterator" else range(*result)
                    for index, value in changes if request["in_place"] else []:
                        change(positional[index], value)
                    return result
                if kind == "lost":
                    lose(str(parts[0]))
                name_of_error, message = parts
                exception = getattr(builtins, name_of_error)
                if not issubclass(exception, Exception):
                    raise ValueError(name_of_error)
                if issubclass(exception, (StopIteration, StopAsyncIteration)):
                    # In `all(map(...))` it would end the loop, and the rest of the test would be passed over.
                    lose(f"the program raised {name_of_error}")
            except (AttributeError, IndexError, TypeError, ValueError):
                lose("the answer cannot be read")
            try:
                raised = exception(message)
            except TypeError:  # UnicodeDecodeError takes five arguments
                raised = Exception(message)
            raise raised

        call.__name__ = name
        return call

    def change(value, new):  # type: ignore[no-untyped-def]
        if type(value) is not type(new) or not isinstance(value, (list, dict, set)):
            raise ValueError("only a list, dict or set can change")
        value.clear()
        value.extend(new) if isinstance(value, list) else value.update(new)

    space = {"__name__": "tests"}
    verdicts = []
    for number, test in enumerate(["", *request["tests"]]):
        random.seed(0)  # the same calls each time
        lost.clear()
        detail = ""
        try:
            if number == 0:
                exec(compile(request["setup"], "setup", "exec", 0, True, 0), space)
                space.update({name: stand_in(name) for name in request["functions"]})
                continue
            code = compile(test, f"test {number}", "exec", 0, True, 0)
        except BaseException as error:
            # A return outside of a function, say: such a test parses and does not compile.
            fault = "the setup fails with" if number == 0 else "it does not compile:"
            refused.append(f"{fault} {type(error).__name__}: {error}"[:300])
            number = max(number, 1)
            break
        try:
            exec(code, space)
        except BaseException as error:
            detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if asked or refused:
            break
        if lost:
            detail = lost[0]
        verdicts.append(["failed" if detail else "passed", detail])
        if detail and request["stop"]:
            break
    reply = {
        "tests": verdicts,
        "asked": asked[0] if asked else None,
        "refused": [number - 1, refused[0]] if refused else None,
    }
    with open(channel, "w", encoding="ascii") as output:
        json.dump(reply, output)
    os._exit(0)

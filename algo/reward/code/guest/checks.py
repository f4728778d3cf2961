"""Runs the tests of a data set on what a program answered, in a process in which the program never runs.

It reads from standard input {"setup", "functions", "tests", "answers", "in_place", "stop", "collect", "most_calls"}:
`answers` are pairs of call and answer in the order in which the program was called, an answer being a line of
`candidate`. It prints JSON:

    {"tests": [[verdict, detail], ...], "calls": [[function, arguments], ...], "complete": bool,
     "refused": [test, reason] or null}

verdict: "passed" or "failed". calls: what the tests called, in their order. complete: whether each call had an answer;
if not, the last call is the first without one, and the list of verdicts ends before its test. With `stop` it also ends
after the first that failed. Each function under test is a stand-in that looks its answers up.

collect: whether to go on behind a call without an answer, to find calls that do not depend on it: it gives an Unknown,
each statement that fails is left behind, and there are no verdicts. Such calls are a guess, as branches may go wrong.
At most `most_calls` are collected.
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
    collect = request["collect"]
    made: list = []
    missing: list = []
    refused: list = []
    lost: list = []
    latest: list = []  # the function that was called last, and what it returned
    of_program: list = []  # exceptions that stand-ins raised for it
    loops = [0]  # `while` loops around the present statement: what is unknown must not decide how often they turn

    def tell(verdicts):  # type: ignore[no-untyped-def]
        reply = {
            "tests": verdicts,
            "calls": made,
            "complete": not missing,
            "refused": [number - 1, refused[0]] if refused else None,
        }
        with open(channel, "w", encoding="ascii") as output:
            json.dump(reply, output)
        os._exit(0)

    # A BaseException, and noted beside it: tests may catch what they like and cannot pass without an answer.
    class NoAnswer(BaseException):
        pass

    def lose(reason):  # type: ignore[no-untyped-def]
        lost.append(reason)
        raise NoAnswer

    def stand_in(name):  # type: ignore[no-untyped-def]
        def call(*positional, **named):  # type: ignore[no-untyped-def]
            if (missing or refused or lost) and not collect:
                raise NoAnswer
            try:
                key = (name, encode([positional, named]))
            except ValueError as error:
                if not collect:  # it may have been made of what is unknown
                    refused.append(f"{name} is called with what cannot leave the test: {error}")
                raise NoAnswer from None
            made.append(key)
            waiting = answers.get(key)
            if not waiting:
                missing.append(key)
                if not collect:
                    raise NoAnswer
                if len(made) >= request["most_calls"]:
                    tell([])
                return Unknown()
            line = waiting.pop(0)
            latest[:] = [name]
            try:
                kind, *parts = decode(line)
                if kind in ("value", "iterator", "range"):
                    result, changes = parts
                    latest.append(result)
                    if kind != "value":
                        result = iter(result) if kind == "iterator" else range(*result)
                    for index, value in changes if request["in_place"] else []:
                        change(positional[index], value)
                    return result
                if kind == "lost":
                    lose(str(parts[0]))
                name_of_error, arguments = parts
                exception = getattr(builtins, name_of_error)
                if not issubclass(exception, Exception):
                    raise ValueError(name_of_error)
                if issubclass(exception, (StopIteration, StopAsyncIteration)):
                    # In `all(map(...))` it would end the loop, and the rest of the test would be passed over.
                    lose(f"the program raised {name_of_error}")
            except (AttributeError, IndexError, TypeError, ValueError):
                lose("the answer cannot be read")
            if not isinstance(arguments, tuple):
                lose("the answer cannot be read")
            try:
                raised = exception(*arguments)
            except (TypeError, ValueError):  # a subclass's message alone makes no UnicodeDecodeError, say
                raised = Exception(*arguments)
            of_program.append(raised)
            raise raised

        call.__name__ = name
        return call

    def change(value, new):  # type: ignore[no-untyped-def]
        if type(value) is not type(new) or not isinstance(value, (list, dict, set)):
            raise ValueError("only a list, dict or set can change")
        value.clear()
        value.extend(new) if isinstance(value, list) else value.update(new)

    class Unknown:
        """What a call without an answer gives while calls are collected: whatever is made of it is unknown too."""

    def unknown(*_, **__):  # type: ignore[no-untyped-def]
        return Unknown()

    def nothing(*_):  # type: ignore[no-untyped-def]
        raise NoAnswer

    def true(*_):  # type: ignore[no-untyped-def]
        return not loops[0] or nothing()

    # What is made of it, what would have to be a value of Python's own types, and what is compared.
    made_of_it = "neg pos abs invert round getitem call getattr"
    arithmetic = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
    reflected = " ".join(f"r{name}" for name in arithmetic.split(" "))
    own = "iter next len index int float complex str repr format hash reversed enter"
    for names, method in (
        (f"{made_of_it} {arithmetic} {reflected}", unknown),
        (own, nothing),
        ("eq ne lt le gt ge contains bool", true),
    ):
        for name in names.split(" "):
            setattr(Unknown, f"__{name}__", method)

    def compiled(code, name):  # type: ignore[no-untyped-def]
        return compile(parted(code) if collect else code, name, "exec", 0, True, 0)

    def parted(code):  # type: ignore[no-untyped-def]
        """Returns the code with each statement in a `try` of its own, from which a failure is left behind.

        Within a `while` loop only assertions are: another failure ends the loop, which might have no other end.
        """
        import ast

        handlers = ast.parse("try: pass\nexcept (Exception, _NoAnswer): pass").body[0].handlers  # type: ignore[attr-defined]
        enter, leave = ast.parse("_loops[0] += 1\n_loops[0] -= 1").body
        defined = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        whole = (*defined, ast.Global, ast.Nonlocal, ast.Return, ast.Break, ast.Continue, ast.Raise)

        def attempt(body, handlers, leave=()):  # type: ignore[no-untyped-def]
            return ast.Try(body=body, handlers=handlers, orelse=[], finalbody=[*leave], lineno=1, col_offset=0)

        def alone(statement, looping):  # type: ignore[no-untyped-def]
            outermost = isinstance(statement, ast.While) and not looping
            if isinstance(statement, (ast.FunctionDef, ast.For, ast.If, ast.While)):
                statement.body = [alone(each, looping or outermost) for each in statement.body]
            if isinstance(statement, (ast.For, ast.If, ast.While)):
                statement.orelse = [alone(each, looping or outermost) for each in statement.orelse]
            if outermost:
                return attempt([enter, attempt([statement], [], [leave])], handlers)
            if isinstance(statement, whole) or (looping and not isinstance(statement, ast.Assert)):
                return statement
            return attempt([statement], handlers)

        tree = ast.parse(code)
        tree.body = [alone(each, False) for each in tree.body]
        return tree

    def told(error, number):  # type: ignore[no-untyped-def]
        """Returns what is said of a failed test: the error, or where there is no message the line that failed."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if not str(error):
            place, at = error.__traceback__, 0
            while place is not None:
                at = place.tb_lineno if place.tb_frame.f_code.co_filename == f"test {number}" else at
                place = place.tb_next
            line = request["tests"][number - 1].splitlines()[at - 1].strip() if at else ""
            text = f"{type(error).__name__} at {line[:100]!r}"
            if len(latest) == 2:
                text += f", where {latest[0]} last returned {latest[1]!r:.60}"
        return text[:200]

    space = {"__name__": "tests", "_NoAnswer": NoAnswer, "_loops": loops}
    verdicts: list = []
    for number, test in enumerate(["", *request["tests"]]):
        random.seed(0)  # the same calls each time
        lost.clear()
        latest.clear()
        detail = ""
        try:
            if number == 0:
                exec(compiled(request["setup"], "setup"), space)
                space.update({name: stand_in(name) for name in request["functions"]})
                continue
            code = compiled(test, f"test {number}")
        except BaseException as error:
            if collect:
                continue
            # A return outside of a function, say: such a test parses and does not compile.
            fault = "the setup fails with" if number == 0 else "it does not compile:"
            refused.append(f"{fault} {type(error).__name__}: {error}"[:300])
            number = max(number, 1)
            break
        try:
            exec(code, space)
        except BaseException as error:
            try:
                detail = told(error, number)
            except Exception:  # what the program gave it may have no text: a long integer, a deep list
                detail = type(error).__name__
            if isinstance(error, ImportError) and error not in of_program and not collect:
                refused.append(f"it imports what the sandbox lacks: {error}"[:300])
        if collect:
            continue
        if missing or refused:
            break
        if lost:
            detail = lost[0]
        verdicts.append(["failed" if detail else "passed", detail])
        if detail and request["stop"]:
            break
    tell(verdicts)

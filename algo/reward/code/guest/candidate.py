"""Runs a program that is not trusted, and calls functions of it.

It reads from standard input {"program": text, "calls": [[function, arguments], ...]}, arguments as `plain.encode`
writes the pair of a tuple and a dict. It prints a line `loaded` and then a line for each call:

    ["value", result, changes]     changes: [index, value] of each argument that the call changed
    ["iterator", values, changes]  what a generator or another iterator yields, read to its end
    ["range", [start, stop, step], changes]
    ["raised", name, arguments]    name: the closest builtin Exception; arguments: what it is made of, a tuple
    ["lost", reason]               the call has no result that tests could look at

or the one line `failed REASON`. What the program itself prints is dropped. The program can forge each line, as it can
choose each result; there is nothing else here: no expected value and no test.
"""


def main(encode, decode):  # type: ignore[no-untyped-def]
    import itertools
    import json
    import os
    import sys
    import types

    LONGEST_ITERATOR = 100_000  # An endless generator has no result.
    LONGEST_MESSAGE = 10_000
    request = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def tell(line):  # type: ignore[no-untyped-def]
        rest = line.encode("ascii", "backslashreplace") + b"\n"
        while rest:
            rest = rest[os.write(channel, rest) :]

    def ascii_line(error):  # type: ignore[no-untyped-def]
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]

    def arguments_of(error, kind):  # type: ignore[no-untyped-def]
        if type(error).__name__ == kind:
            try:
                encode(error.args)
                return error.args
            except ValueError:
                pass
        return (str(error)[:LONGEST_MESSAGE],)

    # A module that can be found, as `dataclasses` and `typing` expect. Its name is not __main__: as in the harnesses of
    # the data sets, what a file does when it is run as a program is not asked for.
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    functions = {}
    try:
        exec(compile(request["program"], "solution.py", "exec", 0, True), module.__dict__)
        for name in {name for name, _ in request["calls"]}:
            if name in module.__dict__:
                functions[name] = module.__dict__[name]
            elif hasattr(module.__dict__.get("Solution"), name):
                functions[name] = getattr(module.__dict__["Solution"](), name)
            else:
                raise NameError(f"the program defines no {name}, neither at its top nor in a class Solution")
    except BaseException as error:
        tell(f"failed {ascii_line(error)}")
        os._exit(0)
    tell("loaded")
    for name, text in request["calls"]:
        positional, named = decode(text)
        before = [encode(value) for value in positional]
        try:
            result = functions[name](*positional, **named)
            answer = ["value", result]
            if type(result) is range:
                answer = ["range", [result.start, result.stop, result.step]]
            elif hasattr(type(result), "__next__"):
                values = list(itertools.islice(result, LONGEST_ITERATOR + 1))
                answer = ["iterator", values]
                if len(values) > LONGEST_ITERATOR:
                    answer = ["lost", f"the iterator has more than {LONGEST_ITERATOR} values"]
        except Exception as error:
            kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
            answer = ["raised", kind, arguments_of(error, kind)]
        except BaseException as error:
            answer = ["lost", ascii_line(error)]
        try:
            if answer[0] not in ("raised", "lost"):
                answer.append(
                    [[index, value] for index, value in enumerate(positional) if encode(value) != before[index]]
                )
            tell(encode(answer))
        except BaseException as error:
            tell(encode(["lost", ascii_line(error)]))
    os._exit(0)  # Threads and exit handlers of the program have nothing more to say.

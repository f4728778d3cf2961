"""The end of a main program that has finalisers: its objects die in the interpreter's order.

main_program.py runs this text under the name "sys", all of it as line 1, so that a warning which a dying object causes
looks as it does at the end of an interpreter. It finds `modules` (sys.modules), `gc` and `objects` (gc.get_objects, or
a function that returns nothing if something may still run).
"""

# ruff: noqa: F821
# mypy: ignore-errors

modules["tracemalloc"] = None  # then warnings have no hint
modules.pop("__mp_main__", None)
modules.pop("__main__", None)
modules["io"] = None  # then tracebacks show no source lines
gc.collect()


def main_namespaces():
    return [each for each in objects() if type(each) is dict and each.get("__name__") == "__main__"]


def drop_finalisers(namespaces):
    """Drops objects of the main program that other modules hold too (by a handler or a callback), so that they die."""
    for namespace in namespaces:
        for name in [*namespace]:
            if hasattr(namespace[name], "__del__"):
                del namespace[name]


drop_finalisers(main_namespaces())

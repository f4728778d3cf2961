"""The last act of a main program that has finalisers: its objects die in the interpreter's order.

main_program.py runs this text under the name "sys", all of it as line 1: so a warning that a dying object causes looks
as it does at the end of an interpreter. It finds `modules` (sys.modules), `gc` and `objects` (gc.get_objects, or a
function without a result if something may still run).
"""

# ruff: noqa: F821
# mypy: ignore-errors

modules["tracemalloc"] = None  # warnings then have no hint
modules.pop("__mp_main__", None)
modules.pop("__main__", None)
modules["io"] = None  # tracebacks then show no source lines
gc.collect()


def main_namespaces():
    return [found for found in objects() if type(found) is dict and found.get("__name__") == "__main__"]


def drop_finalisers(namespaces):
    """What other modules hold of the main program (a handler, a callback) does not keep its objects alive."""
    for namespace in namespaces:
        for name in [*namespace]:
            if hasattr(namespace[name], "__del__"):
                del namespace[name]


drop_finalisers(main_namespaces())

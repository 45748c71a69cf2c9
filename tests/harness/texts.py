"""Text of functions, for tests in this process and in others."""

FUNCTION = '''\
class Thing:
    @decorated(1)
    def method(self, a: int, /, b=2, *args, c: "str" = 'x', **kw) -> None:
        """A docstring."""
        # a comment
        x: int = 1
        if a and not b:
            return {**kw, "k": [i for i in args if i]}
        with self.lock as lock, open(f"{a!r:>{b}} {c}") as file:
            raise ValueError("text" "more") from None
        try:
            yield lambda q, *, r=1: q[1:2, ...] @ r
        except (A, B) as error:
            del x
        finally:
            print(1.5, 2j, b"bytes", "\\U0001fae8 é \\n", None, ..., 10 ** 20, -1)
'''

TRACED = """\
def helper(x):
    return 1 / x

def f(x):
    y = min(
        x,
        0,
    )
    z = helper(y)  # the line
    return z
"""
